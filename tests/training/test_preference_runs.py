"""Runs on preferences: their logs, their reference, a resume, and the commands around them."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import preference_rows
import pytest
import run_helpers
import run_patches
import torch
from launching import ROOT
from run_helpers import Materials, events
from safetensors import safe_open

import finetune
from finetune.batching.collate import collate
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError, StateError
from finetune.modeling.adapter import add_adapter
from finetune.modeling.lora import adapter_off, fuse_lora
from finetune.modeling.loss import microbatch_losses
from finetune.modeling.pretrained import load_model
from finetune.training.preferences.reference import SavedReference

STEPS = 9
MATERIALS = {"records": 6}
FROZEN = ROOT / "tests" / "frozen"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def materials(materials: Materials) -> Materials:
    preference_rows.make_pairs(materials.folder / "pairs.jsonl", 40)
    preference_rows.make_pairs(materials.folder / "valid_pairs.jsonl", 7, seed=1)
    for name, records, seed in (("labels", 40, 0), ("nine", 9, 3), ("single", 1, 3)):
        preference_rows.make_pairs(
            materials.folder / f"{name}.jsonl", records, seed=seed, labels=True
        )
    return materials


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    rate = 1e-3 if changes.get("finetuning") == "full" else 1e-2
    own = {"kind": "dpo", "max_steps": STEPS, "learning_rate": rate}
    own |= {"data": str(materials.folder / "pairs.jsonl")}
    own |= {"valid_data": str(materials.folder / "valid_pairs.jsonl")}
    return materials.settings(output_dir, **(own | changes))


def train(wanted: dict[str, Any], processes: int = 1, **options: Any) -> run_helpers.Ranks:
    return run_helpers.train(wanted, processes, module="finetune.dpo", **options)


def stop_at(step: int) -> dict[str, Any]:
    arguments = (0, step, signal.SIGTERM)
    return {"patch": run_patches.signal_self, "patch_arguments": arguments, "expect": 3}


def logged(folder: Path, *names: str) -> list[list[float]]:
    return [[line[n] for n in names] for line in run_helpers.lines(folder / "trainer_log.jsonl")]


@pytest.fixture(scope="module")
def runs(materials: Materials) -> Callable[[str], Path]:
    """Output folder of a run on one process that nobody stopped, by what is trained."""

    def get(finetuning: str) -> Path:
        folder = materials.folder / f"run-{finetuning}"
        if not folder.exists():
            train(settings(materials, folder, finetuning=finetuning))
        return folder

    return get


@pytest.mark.parametrize("finetuning", ["lora", "full"])
def test_a_run_begins_at_its_reference_and_learns(runs, finetuning: str):
    """Before the first update nothing differs: the loss is ln 2, the margin 0. And the frozen fields."""
    steps = run_helpers.lines(runs(finetuning) / "trainer_log.jsonl")
    first, last = steps[0], steps[-1]
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert first["margin"] == pytest.approx(0, abs=1e-6)
    assert last["loss"] < 0.6 and last["margin"] > 0.2 and last["accuracy"] > 0.9
    assert last["margin"] == pytest.approx(last["chosen_reward"] - last["rejected_reward"])
    before, after = evals = events(runs(finetuning), "eval")
    assert before["eval_loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert after["eval_accuracy"] > 0.8 and after["eval_accuracy/explain"] > 0.5
    frozen = re.findall(r"^(.*?): (.*)$", (FROZEN / "events.txt").read_text(), re.M)
    known = {name: {field.rstrip("?") for field in fields.split()} for name, fields in frozen}
    for name, records in (("trainer_log.jsonl", steps), ("eval", evals)):
        for record in records:
            level = "/(explain|reasoning|topology)$"
            found = {re.sub(level, "/LEVEL", field) for field in record} - {"event", "time"}
            assert found <= known[name] and {"eval_margin/LEVEL", "margin/LEVEL"} & found


def test_a_saved_reference_is_used_only_by_a_run_like_its_own(tmp_path: Path, caplog):
    parts = {"weights": "w", "data": "d", "dtype": "float32"}
    drawn = np.array([True, False, True])
    common = {"side": "train", "drawn": drawn, "others": (), "cache_dir": tmp_path / "cache"}
    saved = SavedReference(parts=parts, folder=tmp_path / "run", fresh=True, **common)
    assert saved.find() == "is missing"
    table = torch.tensor([[1.0, 2.0], [torch.nan] * 2, [3.0, 4.0]])
    saved.folder.mkdir()
    saved.store(table)
    torch.testing.assert_close(saved.find(), table, equal_nan=True)
    elsewhere = replace(saved, folder=tmp_path / "new")
    torch.testing.assert_close(elsewhere.find(), table, equal_nan=True)  # by the cache
    moved = replace(elsewhere, cache_dir=tmp_path / "none", others=(saved.folder,))
    torch.testing.assert_close(moved.find(), table, equal_nan=True)

    def why(**changes: Any) -> Any:
        return replace(saved, cache_dir=tmp_path / "none", **changes).find()

    assert why(parts=parts | {"weights": "x"}) == "is of another model"
    assert why(parts=parts | {"data": "x"}) == "is of other data"
    assert why(parts=parts | {"dtype": "bfloat16"}) == "is of another dtype"
    assert why(drawn=np.array([True] * 3)) == "lacks 1 of the samples that this run draws"
    assert isinstance(why(parts=parts | {"dtype": "bfloat16"}, fresh=False), torch.Tensor)
    assert "was computed in float32, and this run computes in bfloat16" in caplog.text
    path = saved.folder / saved.name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # of a value
    path.write_bytes(content)
    assert why() == "is damaged"
    path.write_bytes(b"x")
    assert "cannot be read" in why()
    error = replace(saved, side="valid-mismatched").refusal("is damaged")
    assert "of the validation data before the run is not known" in error.what


def test_only_samples_that_are_drawn_are_asked_about(materials: Materials, tmp_path: Path):
    """And a run that draws others cannot go on with that; engines load each .safetensors of a folder."""
    run, cache = tmp_path / "run", tmp_path / "cache"
    cache.mkdir()
    (cache / "reference").write_text("in the way")
    full = {"finetuning": "full", "cache_dir": str(cache)}
    output = train(settings(materials, run, max_steps=2, **full)).output()
    assert "[WARNING] the cache of references cannot be written" in output
    assert "reference 1/2" in output and "about 16 samples" in output
    with safe_open(run / "reference" / "train.st", framework="pt") as file:
        asked = file.get_tensor("samples").tolist()
    drawn = {number for ids in run_helpers.sample_ids(run) for number in ids}
    assert asked == sorted(drawn) and len(asked) == 16
    assert [path.name for path in run.glob("*.safetensors")] == ["model.safetensors"]
    longer = settings(materials, run, max_steps=4, allow_data_change=True, **full)
    with pytest.raises(StateError, match=r"train.st lacks \d+ of the samples that this run draws"):
        finetune.run(longer)


@pytest.mark.slow
def test_a_signal_while_the_model_is_asked(materials: Materials, runs, tmp_path: Path):
    """Nothing is trained or saved; the next start begins anew."""
    run, cache = tmp_path / "run", str(tmp_path / "cache")
    wanted = settings(materials, run, finetuning="full", cache_dir=cache)
    patch = {"patch": run_patches.signal_while_asking, "patch_arguments": (1, 2, signal.SIGTERM)}
    output = train(wanted, 2, expect=3, **patch).output()
    assert "SIGTERM: stopping before the first step, without a checkpoint" in output
    assert "stopped by SIGTERM at step 0; no checkpoint is saved" in output
    status = run_helpers.status(run)
    assert (status["state"], status["step"], status["checkpoint"]) == ("stopped", 0, None)
    assert [event["step"] for event in events(run, "signal")] == [0]
    assert not events(run, "eval") and not (run / "reference").exists()
    train(wanted, 2)
    assert run_helpers.losses(run) == pytest.approx(run_helpers.losses(runs("full")), rel=1e-5)


@pytest.mark.parametrize(
    "changes", [{"lora_dropout": 0.2, "use_dora": True}, {"modules_to_save": ("norm",)}], ids=str
)
def test_the_adapter_off_is_the_base(materials: Materials, changes: dict[str, Any]):
    """Whatever is trained of it; and that stays trained."""
    config = RunConfig(model=str(materials.model), data="d", output_dir="o", lora_r=4, **changes)
    base = load_model(config, model_dtype=torch.float64, zero3=False)
    ids = torch.arange(12).numpy()
    microbatch = collate([(ids, ids > 4, -1)], packing=False, pad_token_id=0)
    with torch.no_grad():
        wanted = microbatch_losses(base, microbatch, CPU)
    model = add_adapter(base, config, one_dtype=True)
    fuse_lora(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    for name in trained:
        torch.nn.init.normal_(model.get_parameter(name))
    model.train()
    with torch.no_grad():
        with adapter_off(model):
            found = microbatch_losses(model, microbatch, CPU)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        assert (microbatch_losses(model, microbatch, CPU) - wanted).abs().max() > 1e-3
    assert trained == [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loss": "kto", "global_batch_size": 1, "micro_batch_size": 1},
            "--global-batch-size to 2",
        ),
        ({"loss": "kto", "sft_weight": 0.5}, "leave --sft-weight out"),
        ({"kind": "ppo"}, "kind is 'ppo'"),
    ],
)
def test_what_does_not_go_together_is_refused(materials, tmp_path, changes: dict, words: str):
    with pytest.raises(ConfigError) as caught:
        finetune.run(settings(materials, tmp_path / "run", **changes))
    assert words in str(caught.value) and not (tmp_path / "run").exists()


def prepared(materials: Materials, name: str, preference: str) -> Any:
    """The samples of a data file of this module."""
    from transformers import AutoTokenizer

    from finetune.data.dataset import prepare_samples

    tokenizer = AutoTokenizer.from_pretrained(materials.model)
    own = {"cutoff_len": 96, "cache_dir": str(materials.folder / "cache"), "preference": preference}
    return prepare_samples([str(materials.folder / f"{name}.jsonl")], tokenizer, **own)


def log_probs(model: Any, ids: np.ndarray, supervised: np.ndarray) -> torch.Tensor:
    """Of the supervised tokens, by a plain forward."""
    document = torch.tensor(ids.astype("int64"))
    found = model(document[None]).logits[0, :-1].log_softmax(-1)
    return found.gather(1, document[1:, None])[:, 0][torch.tensor(supervised[1:])]


def test_eval_says_which_answers_a_model_prefers(materials: Materials, capsys):
    """Against a plain forward for each answer; the loss is that of the chosen ones."""
    from transformers import AutoModelForCausalLM

    from finetune.commands.evaluate.command import main

    data, cache = str(materials.folder / "valid_pairs.jsonl"), str(materials.folder / "cache")
    words = ["--model", str(materials.model), "--data", data, "--cache-dir", cache, "--json"]
    words += ["--device-type", "cpu", "--dtype", "float32", "--cutoff-len", "96"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["models"][0]["overall"]
    samples = prepared(materials, "valid_pairs", "pairs")
    model, chosen, margins = AutoModelForCausalLM.from_pretrained(materials.model), [], []
    with torch.no_grad():
        for number, first in enumerate(samples.first_lengths.tolist()):
            ids, supervised = samples[number]
            chosen.append(log_probs(model, ids[:first], supervised[:first]))
            rejected = log_probs(model, ids[first:], supervised[first:])
            margins.append(float(chosen[-1].mean() - rejected.mean()))
    frozen = dict(re.findall(r"^(score|pairs): (.*)$", (FROZEN / "eval.txt").read_text(), re.M))
    assert set(found) == {*frozen["score"].split(), *frozen["pairs"].split()}
    assert found["accuracy"] == sum(margin > 0 for margin in margins) / 7
    assert found["margin"] == pytest.approx(sum(margins) / 7, rel=1e-4)
    assert found["loss"] == pytest.approx(-float(torch.cat(chosen).mean()), rel=1e-5)


def kto(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    own = {"loss": "kto", "finetuning": "full", "valid_data": None, "max_steps": 3}
    own |= {"data": str(materials.folder / "labels.jsonl")}
    return settings(materials, output_dir, **(own | changes))


def test_kto_of_all_weights_is_that_of_a_second_model(materials: Materials, tmp_path: Path):
    """AdamW in float64 next to a copy of the model as it was, which is asked everything in every step."""
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    own = {"desirable_weight": 2.0, "undesirable_weight": 0.1, "beta": 0.3}
    train(kto(materials, run, learning_rate=5e-3, warmup_steps=0, max_grad_norm=0, **own))
    samples = prepared(materials, "labels", "labels")
    model, before = (
        AutoModelForCausalLM.from_pretrained(materials.model, dtype=torch.float64) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def ratio(prompt: int, answer: int) -> torch.Tensor:
        """log(pi(y) / ref(y)) of one sample's answer to another's prompt, cut at cutoff_len."""
        (ids, mask), (others, other_mask) = samples[prompt], samples[answer]
        begin, other = int(mask.argmax()), int(other_mask.argmax())
        document = np.concatenate([ids[:begin], others[other:]])[:96]
        trained = np.concatenate([np.zeros(begin, dtype=bool), other_mask[other:]])[:96]
        now, then = (log_probs(m, document, trained).sum() for m in (model, before))
        return now - then.detach()

    points = []
    for ids, line in zip(
        run_helpers.sample_ids(run), run_helpers.lines(run / "trainer_log.jsonl"), strict=True
    ):
        batch = [samples.record_ids.tolist().index(number) for number in ids]
        with torch.no_grad():
            others = zip(batch, [*batch[1:], batch[0]], strict=True)
            point = torch.stack([ratio(*pair) for pair in others]).mean().clamp(min=0)
        losses = []
        for sample in batch:
            good, difference = samples.labels[sample] == 1, 0.3 * (ratio(sample, sample) - point)
            loss = 2.0 * (1 - difference.sigmoid()) if good else 0.1 * (1 - (-difference).sigmoid())
            losses.append(loss)
        loss = torch.stack(losses).mean()
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["reference_point"] == pytest.approx(float(point), rel=1e-3, abs=1e-5)
        points.append(float(point))
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = line["learning_rate"]
        optimizer.step()
    assert points[0] == pytest.approx(0, abs=1e-12) and max(points) > 0.01, "it is compared"


def test_kto_of_all_weights_goes_on_with_what_was_said(materials: Materials, tmp_path: Path):
    """Stopped after its first step. Of the validation data one batch has one sample."""
    whole, run, cache = tmp_path / "whole", tmp_path / "run", tmp_path / "cache"
    changes = {"valid_data": str(materials.folder / "nine.jsonl"), "cache_dir": str(cache)}
    train(kto(materials, whole, **changes))
    names = ["train-mismatched.st", "train.st", "valid-mismatched.st", "valid.st"]
    assert sorted(path.name for path in (whole / "reference").iterdir()) == names
    output = train(kto(materials, run, **changes), **stop_at(1)).output()
    assert "asking the model" not in output, "the cache of the first run has it"
    shutil.rmtree(cache)
    train(kto(materials, run, **changes))
    assert logged(run, "loss", "reference_point") == logged(whole, "loss", "reference_point")
    assert events(run, "eval")[-1]["eval_loss"] == events(whole, "eval")[-1]["eval_loss"]


def test_kto_of_all_weights_asks_nothing_about_no_pairs(materials, tmp_path):
    """One validation record has no other answers; its reference point is 0."""
    changes = {"valid_data": str(materials.folder / "single.jsonl"), "max_steps": 1}
    finetune.run(kto(materials, tmp_path / "run", **changes, cache_dir=str(tmp_path / "cache")))
    names = sorted(path.name for path in (tmp_path / "run" / "reference").iterdir())
    assert names == ["train-mismatched.st", "train.st", "valid.st"]
    assert events(tmp_path / "run", "eval")[-1]["eval_reference_point"] == 0
