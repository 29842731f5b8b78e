"""Adapters beyond plain LoRA: what peft loads is what was trained, merged or not; resumed, sharded,
and refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from peft import PeftModel
from run_helpers import LAYOUTS, Materials
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.__main__ import main as finetune
from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError, FinetuneError
from finetune.modeling.adapter import add_adapter, check_adapter
from finetune.modeling.loss import make_chunked_head
from finetune.modeling.model_config import load_model_config
from finetune.modeling.pretrained import count_parameters
from finetune.planning.inputs import fine_tuning_workload
from finetune.planning.shapes import shape_of_model
from finetune.planning.workload import Cluster
from finetune.training.optimizers import set_apart
from finetune.training.prepare import prepare_fine_tuning

IDS = torch.arange(7, 7 + 2 * 24).reshape(2, 24)
TOKENS = ["<|im_end|>", "<|im_start|>"]
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": "q_proj=8,down_proj=2", "alpha_pattern": "q_proj=4"},
    "layers": {"layers_to_transform": "1"},
    "modules": {"modules_to_save": ["embed_tokens", "model.norm"]},
    "tokens": {"train_tokens": TOKENS},
    "plus": {"lora_plus_ratio": 4.0},
}
COUNTED = KINDS | {
    "mlp": {"modules_to_save": ["mlp"], "lora_target_modules": ["q_proj", "down_proj"]},
    "norm": {"modules_to_save": ["norm"]},
    "layer": {"modules_to_save": ["layers.0.mlp"], "use_dora": True},
    "full names": {
        "rank_pattern": {"^model.layers.0.*q_proj": 8, "k_proj": 2},
        "layers_to_transform": "0",
    },
    "head": {"modules_to_save": ["lm_head"]},
}
# Everything that goes under ZeRO-3, and what does not; and what has to do with head and embedding.
SIZES = {**KINDS["rslora"], **KINDS["ranks"], **KINDS["plus"]}
SHARDED = {**SIZES, "modules_to_save": ["lm_head"]}
WHOLE = {**KINDS["dora"], **KINDS["tokens"]}
LOADED = {"sizes": {**SIZES, **KINDS["layers"]}, "dora": KINDS["dora"]}
ENDS = {name: KINDS[name] for name in ("modules", "tokens")}


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("kinds"), layers=2)


@pytest.fixture(scope="module")
def untied(materials: Materials) -> Path:
    """The same model, its head a weight of its own."""
    folder = materials.folder / "untied"
    run_helpers.make_model(folder, layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=False)
    torch.manual_seed(4)
    torch.nn.init.normal_(model.lm_head.weight, std=0.1)
    model.save_pretrained(folder)
    return folder


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def trained(settings: dict[str, Any]) -> torch.Tensor:
    """Train in this process; the logits of the model at the end."""
    from finetune import run
    from finetune.training.trainer import SFTTrainer

    seen: list[torch.Tensor] = []
    save_output = SFTTrainer.save_output

    def looking(self: SFTTrainer, *arguments: Any) -> None:
        seen.append(logits(self.model))
        save_output(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SFTTrainer, "save_output", looking)
        assert run(settings).state == "done"
    return seen[0]


def config_of(settings: dict[str, Any]) -> Any:
    return resolve_object(settings, 1).config


@pytest.mark.parametrize(
    ("kind", "form"),
    [(kind, "tied") for kind in LOADED | ENDS] + [(kind, "untied") for kind in ENDS],
)
def test_peft_loads_what_was_trained_and_it_merges(materials, untied, tmp_path, kind, form) -> None:
    model = materials.model if form == "tied" else untied
    settings = materials.settings(
        tmp_path / "run", model=str(model), max_steps=3, warmup_steps=0, **(LOADED | ENDS)[kind]
    )
    live = trained(settings)
    adapted = PeftModel.from_pretrained(base(model), tmp_path / "run")
    torch.testing.assert_close(logits(adapted), live, rtol=1e-5, atol=1e-5)
    with adapted.disable_adapter():
        torch.testing.assert_close(logits(adapted), logits(base(model)), rtol=1e-5, atol=1e-5)
    assert (
        finetune(
            ["merge", "--adapter", str(tmp_path / "run"), "--output-dir", str(tmp_path / "merged")]
        )
        == 0
    )
    torch.testing.assert_close(logits(base(tmp_path / "merged")), live, rtol=1e-4, atol=1e-4)
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert merged["tie_word_embeddings"] == (form == "tied")
    assert ("lm_head.weight" in load_file(tmp_path / "merged" / "model.safetensors")) == (
        form == "untied"
    )


def test_it_is_what_it_says(materials, tmp_path) -> None:
    """Shapes, scales and rows in the files of three runs."""
    settings = {"max_steps": 1, "warmup_steps": 0}
    for kind in ("ranks", "tokens", "layers"):
        trained(materials.settings(tmp_path / kind, **settings, **KINDS[kind]))
    ranks, tokens, layers = (
        load_file(tmp_path / kind / "adapter_model.safetensors")
        for kind in ("ranks", "tokens", "layers")
    )
    of = {
        name: {len(t) for key, t in ranks.items() if f"{name}.lora_A" in key}
        for name in ("q_proj", "down_proj", "k_proj")
    }
    assert of == {"q_proj": {8}, "down_proj": {2}, "k_proj": {4}}
    told = json.loads((tmp_path / "ranks" / "adapter_config.json").read_text())
    assert (told["alpha_pattern"], told["lora_alpha"]) == ({"q_proj": 4}, 8)
    (rows,) = [tensor for name, tensor in tokens.items() if "trainable_tokens_delta" in name]
    assert rows.shape == (2, 32)
    before = (
        base(materials.model)
        .get_input_embeddings()
        .weight[
            json.loads((tmp_path / "tokens" / "adapter_config.json").read_text())[
                "trainable_token_indices"
            ]["model.embed_tokens"]
        ]
    )
    assert 0 < float((rows - before).abs().max()) < 0.05  # of one step at a rate of 0.01
    assert {name.split(".layers.")[1][0] for name in layers} == {"1"} and len(layers) == 14


def test_b_learns_faster(materials, tmp_path) -> None:
    """AdamW's first step moves each number by the rate, whatever its gradient."""
    for ratio in (1.0, 4.0):
        folder = tmp_path / str(ratio)
        trained(
            materials.settings(
                folder, max_steps=1, warmup_steps=0, learning_rate=1e-3, lora_plus_ratio=ratio
            )
        )
        file = load_file(folder / "adapter_model.safetensors")
        ups = torch.cat([tensor.flatten() for name, tensor in file.items() if "lora_B" in name])
        assert float(ups.abs().median()) == pytest.approx(ratio * 1e-3, rel=0.02)


def test_groups_of_their_own_keep_everything_but_the_rate() -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.AdamW(
        [{"params": [first, second], "weight_decay": 0.3}, {"params": [third]}], lr=0.1
    )
    set_apart(optimizer, {id(second)}, 5.0)
    groups = [
        (group["params"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    ]
    assert groups == [([first], 0.1, 0.3), ([third], 0.1, 0.01), ([second], 0.5, 0.3)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{**SIZES, **WHOLE}, SHARDED], ids=["whole", "sharded"])
def test_killed_and_resumed_it_is_the_same_run_bit_by_bit(materials, tmp_path, kind) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_helpers.train(materials.settings(whole, save_steps=2, **kind))
    wanted = materials.settings(killed, save_steps=2, async_save=False, **kind)
    run_helpers.kill_and_resume(wanted, 5, resumed_at=4)
    run_helpers.assert_same_training(killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(SHARDED, "plain"), (SHARDED, "zero3_offload"), (WHOLE, "plain"), (WHOLE, "zero2")],
)
def test_two_processes_train_the_same(materials, tmp_path, kind, layout) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_helpers.train(materials.settings(one, **kind))
    run_helpers.train(materials.settings(two, packing=False, **kind, **LAYOUTS[layout]), 2)
    assert (
        run_helpers.largest_relative_difference(run_helpers.losses(one), run_helpers.losses(two))
        < 1e-5
    )
    found, expected = run_helpers.result_weights(two), run_helpers.result_weights(one)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_auto_takes_the_stops_that_were_never_trained(materials, tmp_path, caplog) -> None:
    folder = tmp_path / "model"
    run_helpers.make_model(folder, layers=2)
    model = base(folder)
    with torch.no_grad():  # as a base model has them that saw plain text alone
        model.get_input_embeddings().weight[-20:] = 0.02
    model.save_pretrained(folder)
    settings = materials.settings(tmp_path / "run", model=str(folder))
    prepared = prepare_fine_tuning(config_of(settings))
    end = prepared.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "<|im_end|> was never trained" in caplog.text and "--train-tokens auto" in caplog.text
    caplog.clear()
    auto = config_of(settings | {"train_tokens": "auto"})
    assert prepare_fine_tuning(auto).trained_token_ids == (end,)
    assert "never trained" not in caplog.text
    other = config_of(settings | {"train_tokens": "<|im_start|>"})
    assert "<|im_end|> was never trained" in (prepare_fine_tuning(other), caplog.text)[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True, **LAYOUTS["zero3"]}, "DoRA reads base weights"),
        ({"train_tokens": TOKENS, **LAYOUTS["zero3"]}, "trainable tokens"),
        ({"rank_pattern": "q_proj=big"}, "q_proj=big is no name with a whole number"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj=0 is no name"),
        ({"rank_pattern": "q_proj=8,q_proj=4"}, "q_proj is named twice"),
        ({"rank_pattern": "q_porj=8"}, "names q_porj"),
        ({"alpha_pattern": {"nothing": 8}}, "names nothing"),
        ({"rank_pattern": "norm=8"}, "choose from down_proj"),
        ({"rank_pattern": "k_proj=8", "lora_target_modules": ["q_proj"]}, "choose from q_proj"),
        (
            {"rank_pattern": {"model.layers.1.*q_proj": 8}, "layers_to_transform": "0"},
            "no module of that name",
        ),
        ({"rank_pattern": {"(": 8}}, "no regular expression"),
        ({"quantization": "nf4", "modules_to_save": ["down_proj"]}, "embeddings, head and norms"),
        ({"quantization": "int8", "modules_to_save": ["mlp"]}, "embeddings, head and norms"),
        ({"layers_to_transform": "1,2-7"}, "names 2, 3, 4, 5, 6, 7"),
        ({"layers_to_transform": ["last"]}, "is no layer"),
        ({"layers_to_transform": "3-1"}, "3-1 goes backwards"),
        ({"layers_to_transform": []}, "no layer is named"),
        (
            {"train_tokens": TOKENS, "lora_target_modules": ["q_proj", "lm_head"]},
            "lora_target_modules names lm_head",
        ),
        (
            {"train_tokens": TOKENS, "modules_to_save": ["model.embed_tokens"]},
            "modules_to_save names embed_tokens",
        ),
        ({"modules_to_save": "head"}, "names head"),
        ({"train_tokens": "<|end|>"}, "no token '<|end|>'"),
        ({"lora_plus_ratio": 0.0}, "above 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(materials, tmp_path, changes, words) -> None:
    with pytest.raises(FinetuneError) as refused:
        prepare_fine_tuning(config_of(materials.settings(tmp_path / "run", **changes)))
    assert words in str(refused.value) and isinstance(refused.value, ConfigError)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_tokens": TOKENS},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["model.embed_tokens"]},
        {"modules_to_save": ["norm"]},
        {"lora_target_modules": ["q_proj", "lm_head"]},
    ],
)
def test_a_plan_knows_whether_logits_are_made_in_chunks(materials, untied, changes) -> None:
    for model in (materials.model, untied):
        config = config_of(materials.settings(materials.folder, model=str(model), **changes))
        network = base(model)
        shape = shape_of_model(network)
        adapted = add_adapter(
            network, config, one_dtype=False, token_ids=(1, 2) if config.train_tokens else ()
        )
        planned = fine_tuning_workload(
            config, shape, Cluster(device_type="cpu")
        ).computing.whole_logits
        assert planned == (make_chunked_head(adapted) is None), model


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"^model.layers.0.*q_proj": 8}},
        {"rank_pattern": {r"layers\.1\..*_proj": 8}, "alpha_pattern": "mlp.down_proj=4"},
        {"quantization": "nf4", "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    ],
)
def test_names_that_peft_takes_are_taken(materials, changes) -> None:
    config = config_of(materials.settings(materials.folder, **changes))
    check_adapter(load_model_config(config.model), config)


def test_a_copied_embedding_leaves_the_layers_their_dtype(materials, untied) -> None:
    config = config_of(materials.settings(materials.folder, modules_to_save=["embed_tokens"]))
    for folder in (materials.model, untied):
        model = add_adapter(base(folder).to(torch.bfloat16), config, one_dtype=False)
        seen = []
        layer = model.get_base_model().model.layers[0]
        layer.register_forward_pre_hook(
            lambda _module, inputs, seen=seen: seen.append(inputs[0].dtype)
        )
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=IDS).logits.float().sum().backward()
        (gradient,) = [
            p.grad for n, p in model.named_parameters() if "embed_tokens.modules_to_save" in n
        ]
        assert seen == [torch.bfloat16] and gradient.dtype == torch.float32 and gradient.any()


def test_a_ratio_of_one_is_plain_lora(materials) -> None:
    assert (
        config_of(materials.settings(materials.folder, lora_plus_ratio=1)).lora_plus_ratio is None
    )


def test_layers_are_sorted_and_each_is_named_once(materials) -> None:
    settings = materials.settings(materials.folder, layers_to_transform="7,0-2,1")
    assert config_of(settings).layers_to_transform == (0, 1, 2, 7)


@pytest.mark.parametrize("kind", COUNTED)
def test_a_plan_counts_what_is_trained(materials, untied, kind) -> None:
    """Against the parameters of the model that is trained."""
    for model in (materials.model, untied):
        network = base(model)
        shape = shape_of_model(network)
        config = config_of(materials.settings(materials.folder, model=str(model), **COUNTED[kind]))
        ids = (1, 2) if kind == "tokens" else ()
        adapted = add_adapter(network, config, one_dtype=False, token_ids=ids)
        planned = fine_tuning_workload(config, shape, Cluster(device_type="cpu")).trained
        assert planned == count_parameters(adapted)["trainable"]


def test_each_makes_another_run(materials, tmp_path) -> None:
    plain = prepare_fine_tuning(config_of(materials.settings(tmp_path))).identity
    for changes in KINDS.values():
        found = prepare_fine_tuning(config_of(materials.settings(tmp_path, **changes))).identity
        assert found.keys() - plain.keys() == changes.keys()
        assert json.loads(json.dumps(found)) == found
