"""Runs on preferences: their logs, their reference, going on on another layout, and the commands
around them.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import preference_rows
import pytest
import run_helpers
import run_patches
import torch
from launching import ROOT, run_cli, said
from run_helpers import LAYOUTS, Materials
from safetensors import safe_open

import finetune
from finetune.batching.collate import collate
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError
from finetune.modeling.adapter import add_adapter
from finetune.modeling.lora import adapter_off, fuse_lora
from finetune.modeling.loss import microbatch_losses
from finetune.modeling.pretrained import load_model
from finetune.training.preferences.objective import Mismatched, mismatched_pairs

STEPS = 9
FROZEN_EVAL = ROOT / "tests" / "frozen" / "eval.txt"


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    made = run_helpers.make_materials(tmp_path_factory.mktemp("preferences"), records=6)
    preference_rows.make_pairs(made.folder / "pairs.jsonl", 40)
    preference_rows.make_pairs(made.folder / "valid_pairs.jsonl", 7, seed=1)
    preference_rows.make_pairs(made.folder / "labels.jsonl", 40, labels=True)
    return made


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    rate = 1e-3 if changes.get("finetuning") == "full" else 1e-2
    data = {
        "data": str(materials.folder / "pairs.jsonl"),
        "valid_data": str(materials.folder / "valid_pairs.jsonl"),
    }
    return materials.settings(
        output_dir, **{**data, "max_steps": STEPS, "learning_rate": rate, **changes}
    )


def train(wanted: dict[str, Any], processes: int = 1, **options: Any) -> run_helpers.Ranks:
    return run_helpers.train(wanted, processes, module="finetune.dpo", **options)


@pytest.fixture(scope="module")
def runs(materials: Materials):
    """Output folder of a run on one process that nobody stopped, by what is trained."""

    def get(finetuning: str) -> Path:
        folder = materials.folder / f"run-{finetuning}"
        if not folder.exists():
            train(settings(materials, folder, finetuning=finetuning))
        return folder

    return get


@pytest.mark.parametrize("finetuning", ["lora", "full"])
def test_a_run_begins_at_its_reference_and_learns(runs, finetuning: str):
    """Before the first update nothing differs from the reference: the loss is ln 2, the margin
    0.
    """
    lines = run_helpers.lines(runs(finetuning) / "trainer_log.jsonl")
    assert lines[0]["loss"] == pytest.approx(0.6931472, abs=1e-6) and lines[0][
        "margin"
    ] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["loss"] < 0.6 and lines[-1]["margin"] > 0.2 and lines[-1]["accuracy"] > 0.9
    assert lines[-1]["margin"] == pytest.approx(
        lines[-1]["chosen_reward"] - lines[-1]["rejected_reward"]
    )
    before, after = run_helpers.events(runs(finetuning), "eval")
    assert before["eval_loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert after["eval_accuracy"] > 0.8 and after["eval_accuracy/explain"] > 0.5


def test_the_logs_have_the_frozen_fields(runs):
    text = (ROOT / "tests" / "frozen" / "events.txt").read_text()
    found = re.findall(r"^(.*?): (.*)$", text, re.M)
    known = {name: {field.rstrip("?") for field in fields.split()} for name, fields in found}
    steps, evals = (
        run_helpers.lines(runs("lora") / "trainer_log.jsonl"),
        run_helpers.events(runs("lora"), "eval"),
    )
    for name, records in (("trainer_log.jsonl", steps), ("eval", evals)):
        for record in records:
            found = {
                re.sub("/(explain|reasoning|topology)$", "/LEVEL", field) for field in record
            } - {"event", "time"}
            assert found <= known[name] and {"eval_margin/LEVEL", "margin/LEVEL"} & found


@pytest.fixture(scope="module")
def stopped(materials: Materials):
    """Output folder of a run of all weights that was stopped at step 2, for copies; and its own
    cache.
    """
    folder = materials.folder / "stopped"
    wanted = settings(
        materials, folder, finetuning="full", cache_dir=str(materials.folder / "stopped-cache")
    )
    train(wanted, patch=run_patches.signal_self, patch_arguments=(0, 2, signal.SIGTERM), expect=3)
    return folder


def go_on(materials: Materials, stopped: Path, run: Path, expect: int, **changes: Any) -> str:
    """With another cache, so that nothing is found there either. Returns what was said."""
    if not run.exists():
        shutil.copytree(stopped, run)
    ranks = run_helpers.start(
        settings(
            materials,
            run,
            **{"finetuning": "full", "cache_dir": str(run.parent / "cache"), **changes},
        ),
        module="finetune.dpo",
    )
    assert ranks.wait() == [expect], ranks.output()
    return ranks.output()


def test_a_reference_that_is_gone_is_said(materials: Materials, stopped: Path, tmp_path: Path):
    """A model that was trained whole cannot be asked again."""
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    (run / "reference" / "train.st").unlink()
    said = go_on(materials, stopped, run, 2)
    assert "of the training data before the run is not known: reference/train.st is missing" in said
    assert "put the file back" in said


def test_a_damaged_reference_is_refused(materials: Materials, stopped: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    path = run / "reference" / "train.st"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # of a value
    path.write_bytes(content)
    assert "reference/train.st is damaged" in go_on(materials, stopped, run, 2)


def test_kto_reference_point_is_cut_at_the_cutoff_and_not_at_the_longest_sample():
    """A long prompt meets a long answer: longer than any sample, and within cutoff_len."""

    class Samples:
        lengths = np.array([10, 10])
        record_ids = labels = np.array([0, 1])
        documents = ((8, 2), (2, 8))  # tokens of prompt and answer

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            prompt, answer = self.documents[index]
            return np.arange(10) + 100 * index, np.repeat([False, True], [prompt, answer])

    pairs = mismatched_pairs(np.array([0, 1]), 2)
    found = Mismatched(Samples(), pairs, cutoff_len=20)
    assert found.lengths.tolist() == [16, 4] and found.supervised_counts.tolist() == [8, 2]
    assert found[0][0].tolist() == [*range(8), *range(102, 110)]
    assert Mismatched(Samples(), pairs, cutoff_len=12).lengths.tolist() == [12, 4]


def test_a_run_goes_on_without_validation_data_and_in_another_dtype(
    materials: Materials, stopped, runs, tmp_path
):
    said = go_on(materials, stopped, tmp_path / "run", 0, valid_data=None, dtype="bfloat16")
    assert said.count("was computed in float32, and this run computes in bfloat16") == 1
    mine, others = (run_helpers.losses(folder) for folder in (tmp_path / "run", runs("full")))
    assert len(mine) == STEPS and run_helpers.largest_relative_difference(others, mine) < 0.05


@pytest.mark.slow
def test_what_was_not_asked_of_other_validation_data_is_said(
    materials: Materials, stopped: Path, tmp_path: Path
):
    other, cache = materials.folder / "other_pairs.jsonl", str(tmp_path / "cache")
    preference_rows.make_pairs(other, 5, seed=2)
    said = go_on(materials, stopped, tmp_path / "run", 2, valid_data=str(other))
    assert (
        "of the validation data before the run is not known: reference/valid.st is of other data"
        in said
    )
    assert len(run_helpers.losses(tmp_path / "run")) == 2, "refused before training"
    # A run that begins with that data leaves what was said of it in the cache.
    train(
        settings(
            materials,
            tmp_path / "new",
            finetuning="full",
            valid_data=str(other),
            cache_dir=cache,
            max_steps=1,
        )
    )
    before = (tmp_path / "run" / "reference" / "valid.st").read_bytes()
    go_on(materials, stopped, tmp_path / "run", 0, valid_data=str(other))
    assert (tmp_path / "run" / "reference" / "valid.st").read_bytes() == before


def test_only_samples_that_are_drawn_are_asked_about(materials: Materials, tmp_path: Path):
    """And a run that draws others cannot go on with that; engines load each .safetensors of a
    folder.
    """
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "reference").write_text("in the way")
    wanted = settings(
        materials, tmp_path / "run", finetuning="full", max_steps=2, cache_dir=str(cache)
    )
    ranks = train(wanted)
    assert "[WARNING] the cache of references cannot be written" in ranks.output()
    assert "reference 1/2" in ranks.output() and "about 16 samples" in ranks.output()
    with safe_open(tmp_path / "run" / "reference" / "train.st", framework="pt") as file:
        asked = file.get_tensor("samples").tolist()
    drawn = {number for ids in run_helpers.sample_ids(tmp_path / "run") for number in ids}
    assert asked == sorted(drawn) and len(asked) == 16
    assert [path.name for path in (tmp_path / "run").glob("*.safetensors")] == ["model.safetensors"]
    said = go_on(materials, tmp_path, tmp_path / "run", 2, max_steps=4, allow_data_change=True)
    assert re.search(r"reference/train.st lacks \d+ of the samples that this run draws", said)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_while_the_model_is_asked(
    materials: Materials, runs, tmp_path: Path, processes: int
):
    """Nothing is trained or saved; the next start begins anew."""
    wanted = settings(
        materials, tmp_path / "run", finetuning="full", cache_dir=str(tmp_path / "cache")
    )
    patch = {
        "patch": run_patches.signal_while_asking,
        "patch_arguments": (processes - 1, 2, signal.SIGTERM),
    }
    ranks = train(wanted, processes, expect=3, **patch)
    assert (
        "[WARNING] SIGTERM: stopping before the first step, without a checkpoint; once more in 3 s"
        in ranks.output()
    )
    assert "saving after this step" not in ranks.output()
    assert "stopped by SIGTERM at step 0; no checkpoint is saved" in ranks.output()
    status = run_helpers.status(tmp_path / "run")
    assert (status["state"], status["step"], status["checkpoint"]) == ("stopped", 0, None)
    assert [event["step"] for event in run_helpers.events(tmp_path / "run", "signal")] == [0]
    assert (
        not run_helpers.events(tmp_path / "run", "eval")
        and not (tmp_path / "run" / "reference").exists()
    )
    train(wanted, processes)
    mine, others = (run_helpers.losses(folder) for folder in (tmp_path / "run", runs("full")))
    assert run_helpers.largest_relative_difference(others, mine) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("finetuning", "executions"),
    [
        (
            "lora",
            [(2, {"packing": False, **LAYOUTS["zero3_offload"]}), (1, {"micro_batch_size": 4})],
        ),
        ("full", [(1, {"micro_batch_size": 4, "packing": False}), (2, LAYOUTS["zero3"])]),
    ],
    ids=["lora", "full"],
)
def test_stopped_at_step_7_and_on_by_another_layout(
    materials, runs, tmp_path, finetuning, executions
):
    output_dir = tmp_path / "run"
    for number, (processes, changes) in enumerate(executions):
        stop = (
            {}
            if number
            else {"patch": run_patches.signal_self, "patch_arguments": (0, 7, signal.SIGTERM)}
        )
        wanted = settings(
            materials,
            output_dir,
            finetuning=finetuning,
            cache_dir=str(tmp_path / "cache"),
            **changes,
        )
        train(wanted, processes, expect=0 if number else 3, **stop)
    assert [event["step"] for event in run_helpers.events(output_dir, "resume")] == [7]
    reference = runs(finetuning)
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(reference)
    difference = run_helpers.largest_relative_difference(
        run_helpers.losses(reference), run_helpers.losses(output_dir)
    )
    assert difference < 1e-5


@pytest.mark.parametrize(
    "changes", [{"lora_dropout": 0.2}, {"use_dora": True}, {"modules_to_save": ("norm",)}], ids=str
)
def test_the_adapter_off_is_the_base(materials: Materials, changes: dict[str, Any]):
    """Whatever is trained of it; and that stays trained."""
    config = RunConfig(model=str(materials.model), data="d", output_dir="o", lora_r=4, **changes)
    base = load_model(config, model_dtype=torch.float64, zero3=False)
    ids = torch.arange(12).numpy()
    microbatch = collate([(ids, ids > 4, -1)], packing=False, pad_token_id=0)
    with torch.no_grad():
        wanted = microbatch_losses(base, microbatch, torch.device("cpu"))
    model = add_adapter(base, config, one_dtype=True)
    fuse_lora(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.train()
    with torch.no_grad(), adapter_off(model):
        found = microbatch_losses(model, microbatch, torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    with torch.no_grad():
        assert (
            microbatch_losses(model, microbatch, torch.device("cpu")) - wanted
        ).abs().max() > 1e-3
    assert trained == [
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loss": "kto", "global_batch_size": 1, "micro_batch_size": 1},
            "set --global-batch-size to 2",
        ),
        ({"loss": "kto", "sft_weight": 0.5}, "leave --sft-weight out"),
        ({"loss": "hinge"}, "dpo, ipo, orpo, simpo"),
        ({"kind": "ppo"}, "kind is 'ppo'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    materials: Materials, tmp_path: Path, changes: dict, words: str
):
    wanted = {**settings(materials, tmp_path / "run"), "kind": "dpo", **changes}
    with pytest.raises(ConfigError) as caught:
        finetune.run(wanted)
    assert words in str(caught.value) and not (tmp_path / "run").exists()


def test_eval_says_which_answers_a_model_prefers(
    materials: Materials, capsys: pytest.CaptureFixture[str]
):
    """Against a plain forward for each answer; the loss is that of the chosen ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.commands.evaluate.command import main
    from finetune.data.dataset import prepare_samples

    data, cache = str(materials.folder / "valid_pairs.jsonl"), str(materials.folder / "cache")
    words = [
        "--model",
        str(materials.model),
        "--data",
        data,
        "--cache-dir",
        cache,
        "--device-type",
        "cpu",
    ]
    assert main([*words, "--dtype", "float32", "--cutoff-len", "96", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"][0]["overall"]
    tokenizer = AutoTokenizer.from_pretrained(materials.model)
    samples = prepare_samples([data], tokenizer, cutoff_len=96, cache_dir=cache, preference="pairs")
    model, means, chosen = AutoModelForCausalLM.from_pretrained(materials.model), [], []
    for number in range(len(samples)):
        ids, supervised = samples[number]
        first = int(samples.first_lengths[number])
        for part in (slice(0, first), slice(first, None)):
            document = torch.from_numpy(ids[part].astype("int64"))
            with torch.no_grad():
                log_probs = model(document[None]).logits[0, :-1].log_softmax(-1)
            said = log_probs.gather(1, document[1:, None])[:, 0][
                torch.from_numpy(supervised[part][1:].copy())
            ]
            means.append(float(said.mean()))
            chosen += [said] if part.start == 0 else []
    margins = [one - other for one, other in zip(means[0::2], means[1::2], strict=True)]
    frozen = dict(
        line.split(": ")
        for line in FROZEN_EVAL.read_text().splitlines()
        if ": " in line and line[0] != "#"
    )
    assert set(found) == {*frozen["score"].split(), *frozen["pairs"].split()}
    assert found["accuracy"] == sum(margin > 0 for margin in margins) / 7
    assert found["margin"] == pytest.approx(sum(margins) / 7, rel=1e-4)
    assert found["loss"] == pytest.approx(-float(torch.cat(chosen).mean()), rel=1e-5)


@pytest.mark.slow
def test_the_commands_around_a_run(materials: Materials, runs, tmp_path: Path):
    folder = runs("lora")
    words = [
        "--model",
        materials.model,
        "--data",
        materials.folder / "pairs.jsonl",
        "--output-dir",
        tmp_path / "new",
    ]
    doctor = run_cli(
        ["doctor", "dpo", "--json", *words, "--device-type", "cpu", "--cutoff-len", 96],
        module="finetune",
    )
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert checks["data"]["verdict"] == "ok", said(doctor)
    machine = [
        "--nodes",
        1,
        "--devices-per-node",
        1,
        "--device-name",
        "H100",
        "--device-memory",
        "80GiB",
    ]
    plan = run_cli(
        ["plan", "dpo", "--json", *words, *machine, "--micro-batch-size", 2, "--cutoff-len", 96],
        module="finetune",
    )
    assert json.loads(plan.stdout)["row_tokens"] == 2 * 2 * 96, said(plan)
    look = json.loads(run_cli(["monitor", folder, "--once", "--json"], module="finetune").stdout)
    assert look["kind"] == "dpo" and look["state"] == "done"
    assert run_cli(["report", folder, "--lang", "en"], module="finetune").returncode == 0
    assert "training on preferences" in (folder / "report.html").read_text()
    merged = run_cli(
        ["merge", "--adapter", folder, "--output-dir", tmp_path / "merged"], module="finetune"
    )
    assert merged.returncode == 0, said(merged)


@pytest.mark.slow
def test_labels_of_two_processes_are_those_of_one(materials: Materials, tmp_path: Path):
    """KTO's reference point is a mean over the global batch, whoever computes it."""
    data = {
        "data": str(materials.folder / "labels.jsonl"),
        "valid_data": None,
        "loss": "kto",
        "undesirable_weight": 0.1,
    }
    ways = [(1, {}), (2, {"packing": False, "micro_batch_size": 4})]
    for processes, changes in ways:
        train(settings(materials, tmp_path / str(processes), **data, **changes), processes)
    first, second = (run_helpers.lines(tmp_path / name / "trainer_log.jsonl") for name in "12")
    for one, other in zip(first, second, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["reference_point"] == pytest.approx(other["reference_point"], rel=1e-3, abs=1e-6)
    assert any(line["reference_point"] > 0 for line in first)


# ---------------------------------------------------------------------- KTO, all weights trained


def kto(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    data = {"data": str(materials.folder / "labels.jsonl"), "valid_data": None}
    return settings(
        materials,
        output_dir,
        **{"loss": "kto", "finetuning": "full", **data, "max_steps": 3, **changes},
    )


def test_kto_of_all_weights_is_that_of_a_second_model(materials: Materials, tmp_path: Path):
    """AdamW in float64 beside a copy of the model as it was, which is asked about everything in
    every step.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.data.dataset import prepare_samples

    run = tmp_path / "run"
    weights = {"desirable_weight": 2.0, "undesirable_weight": 0.1}
    train(
        kto(
            materials, run, beta=0.3, learning_rate=5e-3, warmup_steps=0, max_grad_norm=0, **weights
        )
    )
    data, cache = [str(materials.folder / "labels.jsonl")], str(materials.folder / "cache")
    tokenizer = AutoTokenizer.from_pretrained(materials.model)
    samples = prepare_samples(data, tokenizer, cutoff_len=96, cache_dir=cache, preference="labels")
    model, before = (
        AutoModelForCausalLM.from_pretrained(materials.model, dtype=torch.float64) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def ratio(prompt: int, answer: int) -> torch.Tensor:
        """log(pi(y) / ref(y)) of one sample's answer to another's prompt."""
        (ids, mask), (others, other_mask) = samples[prompt], samples[answer]
        begins, longest = (int(mask.argmax()), int(other_mask.argmax())), 96  # cutoff_len
        document = torch.tensor(
            [*ids[: begins[0]].tolist(), *others[begins[1] :].tolist()][:longest]
        )
        trained = torch.tensor([*[False] * begins[0], *other_mask[begins[1] :].tolist()][:longest])
        said = [m(document[None]).logits[0, :-1].log_softmax(-1) for m in (model, before)]
        one, other = (
            log_probs.gather(1, document[1:, None])[:, 0][trained[1:]].sum() for log_probs in said
        )
        return one - other.detach()

    points = []
    for ids, line in zip(
        run_helpers.sample_ids(run), run_helpers.lines(run / "trainer_log.jsonl"), strict=True
    ):
        batch = [samples.record_ids.tolist().index(number) for number in ids]
        with torch.no_grad():
            others = [*batch[1:], batch[0]]
            point = (
                torch.stack([ratio(*pair) for pair in zip(batch, others, strict=True)])
                .mean()
                .clamp(min=0)
            )
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
    assert points[0] == pytest.approx(0, abs=1e-12) and max(points) > 0.01, (
        "what is compared is there"
    )


def test_kto_of_all_weights_goes_on_with_what_was_said(materials: Materials, tmp_path: Path):
    """Stopped after its first step; and where that is gone, it is said. Validation data has one
    sample in a batch.
    """
    preference_rows.make_pairs(materials.folder / "nine.jsonl", 9, seed=3, labels=True)
    changes = {
        "valid_data": str(materials.folder / "nine.jsonl"),
        "cache_dir": str(tmp_path / "cache"),
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(kto(materials, whole, **changes))
    assert sorted(path.name for path in (whole / "reference").iterdir()) == [
        "train-mismatched.st", "train.st", "valid-mismatched.st", "valid.st"
    ]  # fmt: skip
    stop = {
        "patch": run_patches.signal_self,
        "patch_arguments": (0, 1, signal.SIGTERM),
        "expect": 3,
    }
    said = train(kto(materials, run, **changes), **stop).output()
    assert "asking the model" not in said, "the cache of the first run has it"
    shutil.rmtree(tmp_path / "cache")
    shutil.copytree(run, tmp_path / "gone")
    train(kto(materials, run, **changes))
    for name in ("loss", "reference_point"):
        mine, others = (
            [line[name] for line in run_helpers.lines(folder / "trainer_log.jsonl")]
            for folder in (run, whole)
        )
        assert mine == others
    assert (
        run_helpers.events(run, "eval")[-1]["eval_loss"]
        == run_helpers.events(whole, "eval")[-1]["eval_loss"]
    )
    (tmp_path / "gone" / "reference" / "train-mismatched.st").unlink()
    shutil.rmtree(tmp_path / "cache")
    ranks = run_helpers.start(kto(materials, tmp_path / "gone", **changes), module="finetune.dpo")
    assert ranks.wait() == [2] and "reference/train-mismatched.st is missing" in ranks.output()


def test_kto_of_all_weights_asks_nothing_about_no_pairs(materials: Materials, tmp_path: Path):
    """One validation record has no other answers; its reference point is 0."""
    preference_rows.make_pairs(materials.folder / "single.jsonl", 1, seed=3, labels=True)
    changes = {"valid_data": str(materials.folder / "single.jsonl"), "max_steps": 1}
    output = train(
        kto(materials, tmp_path / "run", **changes, cache_dir=str(tmp_path / "cache"))
    ).output()
    assert (
        "asking the model before its first step about 1 samples" in output
        and "about 0 " not in output
    )
    names = sorted(path.name for path in (tmp_path / "run" / "reference").iterdir())
    assert names == ["train-mismatched.st", "train.st", "valid.st"]
    assert run_helpers.events(tmp_path / "run", "eval")[-1]["eval_reference_point"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_kto_of_all_weights_by_two_processes_is_that_of_one(
    materials: Materials, tmp_path: Path, layout: str
):
    """More than one pass, so that a prompt has several other answers and a pair may come twice."""
    more = {"max_steps": 12, "undesirable_weight": 0.1}
    sharded = LAYOUTS["zero3"] if layout == "zero3" else {}
    ways = [(1, {}), (2, {"packing": False, "micro_batch_size": 4, **sharded})]
    for processes, changes in ways:
        own = {"cache_dir": str(tmp_path / f"cache-{processes}")}
        train(kto(materials, tmp_path / str(processes), **{**more, **changes, **own}), processes)
    first, second = (run_helpers.lines(tmp_path / name / "trainer_log.jsonl") for name in "12")
    for one, other in zip(first, second, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["reference_point"] == pytest.approx(other["reference_point"], rel=1e-3, abs=1e-5)
    assert any(line["reference_point"] > 0 for line in first)
