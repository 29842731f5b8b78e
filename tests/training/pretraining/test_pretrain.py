"""Whole pretraining runs: against a plain loop, on 1 and 2 processes, resumed, under each launcher;
and the result.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import run_helpers
import torch
from conftest import make_records
from launching import BIN, run_cli, run_command, said
from run_patches import kill_self
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands.prepare import command as prepare
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve_object
from finetune.config.schedules import ScheduleSettings, learning_rate_schedule
from finetune.data.corpus.token_shards import TokenShards
from finetune.data.corpus.windows import Windows
from finetune.errors import DataError
from finetune.modeling import lfm2_value
from finetune.modeling.scratch import make_model, scratch_config
from finetune.runtime.ports import free_port
from finetune.storage.run_folder import differences
from finetune.training.optimizers import make_optimizer, scaled_rates, set_matrix_schedule
from finetune.training.pretraining.prepare import prepare_pretraining

STEPS, LENGTH, WINDOWS = 30, 32, 8
# how much further apart a run and the plain loop may be than plain loops among themselves
ROUNDING_FACTOR = 5.0
# the last checkpoint of the killed run, and the step before which it is killed
SAVED, KILLED = 20, 24
HERE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """A folder that `prepare` made of 1,000 short documents."""
    folder = tmp_path_factory.mktemp("tokens")
    texts = [{"text": f"{row['instruction']}: {row['output']}."} for row in make_records(1000)]
    (folder / "src.jsonl").write_text(
        "".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8"
    )
    flags = [
        "--data",
        folder / "src.jsonl",
        "--output-dir",
        folder / "shards",
        "--vocab-size",
        300,
        "--num-workers",
        1,
    ]
    assert prepare.main([str(word) for word in [*flags, "--valid-fraction", 0.2]]) == 0
    return folder / "shards"


@pytest.fixture(scope="module")
def settings(tokens: Path) -> dict:
    return {
        "train_data_path": str(tokens),
        "valid_data_path": str(tokens),
        "depth": 1,
        "max_seq_len": LENGTH,
        "device_batch_size": 2,
        "total_batch_size": WINDOWS * LENGTH,
        "num_iterations": STEPS,
        "warmup_steps": 2,
        "lr_scaling": False,
        "embedding_lr": 0.05,
        "weight_decay": 0.1,
        "dtype": "float32",
        "device_type": "cpu",
        "save_steps": 10,
        "eval_steps": 10,
        "eval_tokens": 40 * LENGTH,
        "sample_every": STEPS,
        "log_samples": True,
        "report_to": "none",
    }


def train(settings: dict, output: Path, processes: int = 1, **changes) -> Path:
    run_helpers.train(
        {**settings, **changes, "output_dir": str(output)}, processes, module="finetune.pretrain"
    )
    return output


@pytest.fixture(scope="module")
def one(settings: dict, tmp_path_factory) -> Path:
    """One process, from begin to end."""
    return train(settings, tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def two(settings: dict, tmp_path_factory) -> Path:
    return train(settings, tmp_path_factory.mktemp("runs") / "two", processes=2)


@pytest.mark.parametrize("optimizer", ["normuon", "muon", "adamw"])
def test_a_plain_loop_does_the_same(
    optimizer: str, one: Path, settings: dict, tokens: Path, tmp_path: Path
):
    """Windows of the sample log, whole batches, no accumulation: from the definition.

    How far rounding alone may carry two equal trainings apart depends on the CPU's kernels and on
    the optimizer: Muon orthogonalizes in bfloat16, which makes small singular values of a gradient
    large, and their rounding errors too. So the yardstick is measured: further plain loops differ
    from the first only in the order in which they sum a gradient over the windows of a batch.
    """
    ours = (
        one
        if optimizer == "normuon"
        else train(settings, tmp_path / "run", optimizer=optimizer, sample_every=0)
    )
    settings = {**settings, "optimizer": optimizer, "output_dir": "x"}
    batches = run_helpers.sample_ids(ours)
    model, losses = plain_loop(settings, batches, tokens)
    twins = [plain_loop(settings, batches, tokens, parts=parts) for parts in (2, 4, WINDOWS)]
    rounding = max(run_helpers.largest_relative_difference(losses, twin) for _, twin in twins)
    assert rounding < 1e-3, "no yardstick"
    difference = run_helpers.largest_relative_difference(losses, run_helpers.losses(ours))
    assert difference <= max(1e-5, ROUNDING_FACTOR * rounding)
    assert losses[-1] < losses[0] - 0.1, "nothing was learned"
    result = run_helpers.result_weights(ours)
    for name, parameter in model.named_parameters():
        size = parameter.norm()
        rounding = max(
            float((twin.get_parameter(name) - parameter).norm() / size) for twin, _ in twins
        )
        difference = float((result[name] - parameter).norm() / size)
        assert difference <= max(1e-4, ROUNDING_FACTOR * rounding), name


def plain_loop(
    settings: dict, batches: list[list[int]], tokens: Path, parts: int = 1
) -> tuple[torch.nn.Module, list[float]]:
    """Train from the definition, with each batch cut into so many parts; the model and its losses."""
    model = make_model(scratch_config("nanochat", 1, vocab_size=300, max_seq_len=LENGTH), seed=42)
    config = resolve_object(settings, 1, PretrainConfig).config
    windows = Windows(TokenShards(tokens, split="train"), LENGTH)
    rates = scaled_rates(config, width=64, worth_tokens=1, run_tokens=1)
    optimizer = make_optimizer(model, config, rates, fused=True, compute_dtype=torch.float32)
    peaks = [group["lr"] for group in optimizer.param_groups]
    warmdown = learning_rate_schedule(
        "warmdown", ScheduleSettings(STEPS, 2, warmdown_ratio=0.65, final_fraction=0.05)
    )
    losses = []
    for step, ids in enumerate(batches):
        batch = torch.from_numpy(np.stack([windows[i][0] for i in ids])).long()
        factor = warmdown(step)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        set_matrix_schedule(optimizer, step, total_steps=STEPS, warmdown_ratio=0.65, decay=0.1)
        total = 0.0
        for part in batch.chunk(parts):
            logits = model(part[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss / parts).backward()
            total += loss.item() / parts
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return model.requires_grad_(False), losses


def test_each_window_once_a_pass(one: Path, tokens: Path):
    taken = [i for ids in run_helpers.sample_ids(one) for i in ids]
    available = len(Windows(TokenShards(tokens, split="train"), LENGTH))
    assert len(taken) == STEPS * WINDOWS <= available
    assert len(set(taken)) == len(taken) and max(taken) < available


def test_two_processes_are_the_same_training(one: Path, two: Path):
    assert run_helpers.sample_ids(two) == run_helpers.sample_ids(one)
    assert (
        run_helpers.largest_relative_difference(run_helpers.losses(one), run_helpers.losses(two))
        < 1e-4
    )
    for a, b in zip(run_helpers.events(one, "eval"), run_helpers.events(two, "eval"), strict=True):
        assert a["step"] == b["step"] and a["eval_bpb"] == pytest.approx(b["eval_bpb"], rel=1e-4)
    assert run_helpers.events(two, "start")[0]["world_size"] == 2


def test_bits_per_byte_by_definition(one: Path, tokens: Path):
    """From the result folder: nats of tokens that stand for text, over the bytes of that text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(one), AutoTokenizer.from_pretrained(one)
    windows = Windows(TokenShards(tokens, split="val"), LENGTH, limit=40)
    special = set(tokenizer.all_special_ids)
    nats = total_bytes = 0.0
    for index in range(len(windows)):
        ids = torch.from_numpy(windows[index][0]).long()
        with torch.no_grad():
            log_probabilities = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        for position, token in enumerate(ids[1:].tolist()):
            if token not in special:
                nats -= log_probabilities[position, token].item()
                # A byte-level token is written with one character for each of its bytes.
                total_bytes += len(tokenizer.convert_ids_to_tokens(token))
    last = run_helpers.events(one, "eval")[-1]
    assert last["step"] == STEPS
    assert last["eval_bpb"] == pytest.approx(nats / math.log(2) / total_bytes, rel=1e-5)
    # The first evaluation is the start's: every token equally likely.
    assert run_helpers.events(one, "eval")[0]["eval_loss"] == pytest.approx(math.log(320), abs=1e-2)


def test_lines_of_the_log(one: Path):
    record = run_helpers.lines(one / "trainer_log.jsonl")[-1]
    assert {
        "step",
        "loss",
        "learning_rate",
        "step_seconds",
        "tokens_per_second",
        "mfu",
    } <= record.keys()
    assert record["mfu"] is None  # a CPU's peak is unknown: not 0.00%
    start = run_helpers.events(one, "start")[0]
    assert (
        start["gradient_accumulation_steps"] == 4 and start["total_batch_size"] == WINDOWS * LENGTH
    )
    assert start["flops_per_token"] > 0
    samples = run_helpers.events(one, "sample")
    assert [event["step"] for event in samples] == [STEPS] and len(samples[0]["samples"]) == 3


@pytest.fixture(scope="module")
def killed(settings: dict, tmp_path_factory) -> Path:
    """What is left of a run that one process made until it was killed."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    ranks = run_helpers.start(
        {**settings, "output_dir": str(folder)},
        patch=kill_self,
        patch_arguments=(0, KILLED),
        module="finetune.pretrain",
    )
    assert ranks.wait() == [-signal.SIGKILL], ranks.output()
    assert not (folder / "model.safetensors").exists()
    return folder


@pytest.fixture
def interrupted(killed: Path, tmp_path: Path) -> Path:
    """A copy of the killed run, to go on with."""
    return shutil.copytree(killed, tmp_path / "interrupted")


def test_resumed_on_the_same_number_it_is_bit_identical(
    interrupted: Path, one: Path, settings: dict
):
    train(settings, interrupted)
    assert [event["step"] for event in run_helpers.events(interrupted, "resume")] == [SAVED]
    assert run_helpers.sample_ids(interrupted) == run_helpers.sample_ids(one)
    assert run_helpers.losses(interrupted) == run_helpers.losses(one)
    ours, theirs = run_helpers.result_weights(interrupted), run_helpers.result_weights(one)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_resumed_on_another_number_it_is_the_same_training(
    interrupted: Path, one: Path, settings: dict
):
    train(settings, interrupted, processes=2, device_batch_size=4)
    assert run_helpers.sample_ids(interrupted) == run_helpers.sample_ids(one)
    assert run_helpers.losses(interrupted)[-1] == pytest.approx(
        run_helpers.losses(one)[-1], rel=1e-4
    )


def test_resumed_on_simulated_npus_it_is_the_same_training(
    interrupted: Path, one: Path, settings: dict, tmp_path
):
    """It computes on the CPU: this shows the plumbing, nothing about Ascend."""
    config = tmp_path / "run.json"
    config.write_text(json.dumps({**settings, "device_type": "npu"}))
    paths = os.pathsep.join([str(HERE / "fake_npu"), str(HERE.parent)])
    flags = ["--config", config, "--output-dir", interrupted]
    run_cli(flags, env={"PYTHONPATH": paths}, module="finetune.pretrain", check=True)
    again = run_helpers.events(interrupted, "start")[-1]
    assert (again["device_type"], again["world_size"], again["step"]) == ("npu", 1, SAVED)
    assert again["compiled"] is False
    assert run_helpers.sample_ids(interrupted) == run_helpers.sample_ids(one)
    assert run_helpers.losses(interrupted)[-1] == pytest.approx(
        run_helpers.losses(one)[-1], rel=1e-4
    )


LAUNCHERS = ("self-started", "torch.distributed.launch")  # the first becomes torchrun


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_way_of_starting_is_the_same_run(
    launcher: str, one: Path, settings: dict, tmp_path: Path
):
    config, output = tmp_path / "run.json", tmp_path / "out"
    config.write_text(json.dumps({**settings, "sample_every": 0, "eval_steps": 0, "save_steps": 0}))
    flags = ["--config", config, "--output-dir", output]
    module = "finetune.pretrain"
    if launcher == "self-started":
        result = run_cli([*flags, "--distributed", "--world_size", 2], module=module)
    else:
        words = [
            BIN / "python",
            "-m",
            "torch.distributed.launch",
            "--nproc_per_node=2",
            f"--master_port={free_port()}",
        ]
        # Under a launcher, --distributed has no effect.
        asked = ["--distributed", "--world_size", 4]
        result = run_command([str(word) for word in [*words, "-m", module, *flags, *asked]])
    assert result.returncode == 0, said(result)
    assert run_helpers.events(output, "start")[0]["world_size"] == 2
    assert run_helpers.sample_ids(output) == run_helpers.sample_ids(one)
    assert (
        run_helpers.largest_relative_difference(run_helpers.losses(one), run_helpers.losses(output))
        < 1e-4
    )


def test_the_result_is_an_ordinary_model(one: Path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(one), AutoTokenizer.from_pretrained(one)
    assert type(model).__name__ == "NanoChatForCausalLM"
    assert model.get_input_embeddings().padding_idx is None
    ids = tokenizer("def test", return_tensors="pt").input_ids
    made = model.generate(
        ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    assert made.shape[1] > ids.shape[1]
    assert "finetune" not in (one / "config.json").read_text()
    config = json.loads((one / f"checkpoint-{STEPS}" / "config.json").read_text())
    assert config["model_type"] == "nanochat" and config.get("pad_token_id") is None


def test_the_result_is_fine_tuned(one: Path, tiny_data: Path, tmp_path: Path):
    adapter = fine_tuned(one, tiny_data, tmp_path)
    assert any("mlp.fc1.lora_B" in name and tensor.any() for name, tensor in adapter.items())


def fine_tuned(model: Path, data: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA adapter after three steps."""
    settings = {
        "model": str(model),
        "data": str(data),
        "output_dir": str(tmp_path / "sft"),
        "cutoff_len": 256,
        "global_batch_size": 4,
        "max_steps": 3,
        "device_type": "cpu",
        "dtype": "float32",
        "report_to": "none",
        "cache_dir": str(tmp_path / "cache"),
    }
    run_helpers.train(settings)
    return run_helpers.result_weights(tmp_path / "sft")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["lfm2", "lfm2_value"])
def test_short_convolutions_go_the_whole_way(
    arch: str, settings: dict, tiny_data: Path, tmp_path: Path
):
    """Killed, resumed on two processes, loaded by transformers, asked, fine-tuned."""
    settings = {**settings, "arch": arch, "depth": 2, "async_save": False}
    whole, killed = train(settings, tmp_path / "whole"), tmp_path / "killed"
    patch = {"patch": kill_self, "patch_arguments": (0, KILLED), "module": "finetune.pretrain"}
    ranks = run_helpers.start({**settings, "output_dir": str(killed)}, **patch)
    assert ranks.wait() == [-signal.SIGKILL], ranks.output()
    train(settings, killed, processes=2, device_batch_size=4)
    assert [event["step"] for event in run_helpers.events(killed, "resume")] == [SAVED]
    assert run_helpers.sample_ids(killed) == run_helpers.sample_ids(whole)
    assert run_helpers.losses(killed)[-1] == pytest.approx(run_helpers.losses(whole)[-1], rel=1e-4)

    lfm2_value.register()
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(whole),
        AutoTokenizer.from_pretrained(whole),
    )
    name_of_class = {"lfm2": "Lfm2ForCausalLM", "lfm2_value": "Lfm2ValueForCausalLM"}[arch]
    assert type(model).__name__ == name_of_class and not model.config.tie_word_embeddings
    ids = tokenizer("router: ", return_tensors="pt").input_ids
    made = model.generate(
        ids, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    result = run_cli(
        ["chat", "--model", whole, "--device-type", "cpu", "--prompt", "router"], module="finetune"
    )
    assert made.shape[1] > ids.shape[1] and result.returncode == 0, said(result)
    adapter = fine_tuned(whole, tiny_data, tmp_path)
    for name in ("conv.in_proj.lora_B", "self_attn.q_proj.lora_B", "feed_forward.w2.lora_B"):
        assert any(name in key and tensor.any() for key, tensor in adapter.items()), name
    merged = tmp_path / "merged"
    words = ["merge", "--adapter", tmp_path / "sft", "--output-dir", merged]
    result = run_cli([str(word) for word in words], module="finetune")
    assert result.returncode == 0, said(result)
    again = AutoModelForCausalLM.from_pretrained(merged)
    assert type(again).__name__ == name_of_class
    own = arch == "lfm2_value"
    assert (
        (merged / "lfm2_value.py").exists()
        == own
        == ("trust_remote_code" in (merged / "README.md").read_text())
    )


@pytest.mark.parametrize("arch", ["qwen3", "llama", "lfm2", "lfm2_value"])
def test_other_architectures_and_optimizers(arch: str, settings: dict, tmp_path: Path):
    changes = {
        "arch": arch,
        "optimizer": "adamw",
        "learning_rate": 3e-3,
        "lr_scheduler": "cosine",
        "save_steps": 0,
    }
    changes["depth"] = 2 if "lfm2" in arch else 1  # of one layer alone LFM2 has no convolution
    output = train(
        settings,
        tmp_path / arch,
        **changes,
        num_iterations=4,
        document_aligned=True,
        max_grad_norm=1.0,
    )
    lfm2_value.register()
    assert (
        type(AutoModelForCausalLM.from_pretrained(output))
        .__name__.lower()
        .startswith(arch.replace("_", ""))
    )
    losses = run_helpers.losses(output)
    assert losses[-1] < losses[0]


def test_best_fit_windows_are_a_run_of_their_own_on_any_number(
    settings: dict, tokens: Path, tmp_path: Path, caplog
):
    settings = {
        **settings,
        "windows": "best-fit",
        "num_iterations": 6,
        "save_steps": 3,
        "sample_every": 0,
    }
    settings["async_save"] = False  # the checkpoint is whole when the process ends itself
    whole = train(settings, tmp_path / "whole")
    ranks = run_helpers.start(
        {**settings, "output_dir": str(tmp_path / "killed")},
        patch=kill_self,
        patch_arguments=(0, 5),
        module="finetune.pretrain",
    )
    assert ranks.wait() == [-signal.SIGKILL], ranks.output()
    again = train(settings, tmp_path / "killed", processes=2)
    assert [event["step"] for event in run_helpers.events(again, "resume")] == [3]
    assert run_helpers.sample_ids(again) == run_helpers.sample_ids(whole)
    assert (
        run_helpers.largest_relative_difference(
            run_helpers.losses(whole), run_helpers.losses(again)
        )
        < 1e-4
    )

    def prepared(**changes):
        return prepare_pretraining(
            resolve_object({**settings, **changes, "output_dir": "x"}, 1, PretrainConfig).config
        )

    train_windows = prepared().train
    # <|endoftext|>
    assert {int(train_windows[index][0][0]) for index in range(len(train_windows))} == {1}
    identity, plain = prepared().identity, prepared(windows="stream").identity
    assert identity["windows"] == "best-fit" and identity["document_aligned"] is False
    # Those of runs that were begun before there was a choice of three.
    assert "windows" not in plain and plain["document_aligned"] is False
    aligned = prepared(windows="document").identity
    assert aligned.keys() == plain.keys() and aligned["document_aligned"] is True
    assert "69% of the training tokens are cut by --windows best-fit" in caplog.text
    caplog.clear()
    assert prepared(max_seq_len=128).train.cut_tokens > 0 and "are cut by" not in caplog.text
    np.arange(4000, dtype="<u2").tofile(tmp_path / "bare.bin")
    with pytest.raises(DataError, match="does not say where its documents begin"):
        prepared(train_data_path=str(tmp_path / "bare.bin"), vocab_size=4000)


def test_a_run_whose_rates_went_with_the_square_root_goes_on_with_it_alone(settings: dict):
    def identity(**changes):
        changes = {**settings, "output_dir": "x", **changes}
        return prepare_pretraining(resolve_object(changes, 1, PretrainConfig).config).identity

    new, before = identity(lr_scaling=True), identity(lr_scaling=True, lr_batch_exponent=0.5)
    of_0_1_0 = {name: value for name, value in new.items() if name != "lr_batch_exponent"}
    assert differences(of_0_1_0, new) == [("lr_batch_exponent", 0.5, 0.25)]
    assert differences(of_0_1_0, before) == []
    assert differences(before, new) == [("lr_batch_exponent", 0.5, 0.25)]
    assert "lr_batch_exponent" not in identity(lr_scaling=False), "it says nothing there"


def test_token_files_without_header_or_tokenizer(settings: dict, tmp_path: Path):
    """The guides' raw .bin files: a vocabulary size is enough; the result has no tokenizer."""
    choose = np.random.default_rng(0)
    for name in ("train", "val"):
        choose.integers(0, 300, 4000).astype("<u2").tofile(tmp_path / f"{name}.bin")
    paths = {
        "train_data_path": str(tmp_path / "train.bin"),
        "valid_data_path": str(tmp_path / "val.bin"),
    }
    output = train(
        settings, tmp_path / "out", **paths, vocab_size=300, num_iterations=2, save_steps=0
    )
    assert AutoModelForCausalLM.from_pretrained(output).config.vocab_size == 320
    assert not (output / "tokenizer.json").exists()
    assert "eval_bpb" not in run_helpers.events(output, "eval")[-1]
