"""Doctor between processes: a real world of two, a rank that dies in it, ranks that compute wrong,
a real dry run.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, environment, run_cli, said
from run_helpers import alive

from finetune.commands.doctor import command, dry_run, probe
from finetune.commands.doctor.dry_run import LOSS_TOLERANCE, check_dry_run, compare
from finetune.commands.doctor.host import not_built
from finetune.commands.doctor.launched import check_launched, judge
from finetune.commands.doctor.probe import Answer, print_report, run_to_end
from finetune.config.base_config import BaseConfig
from finetune.config.kinds import KINDS, RunKind
from finetune.config.resolution import resolve
from finetune.runtime.launch_environment import launch_world

FAKE_NPU = ROOT / "tests" / "fake_npu"
FINE = Answer(0, "")


# ---------------------------------------------------------------- real processes


def test_a_launched_world_on_simulated_npus():
    """Collectives by the simulated hccl, a product in bfloat16; nothing here ran on Ascend."""
    env = {"PYTHONPATH": f"{ROOT}:{FAKE_NPU}"}
    result = run_cli(["doctor", "--launched", "--json"], nproc=2, module="finetune", env=env)
    assert result.returncode == 0, said(result)
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert {name: check["verdict"] for name, check in checks.items()} == dict.fromkeys(
        ("launched_world", "collectives", "matmul"), "ok"
    )
    assert checks["launched_world"]["values"] == {"backend": "hccl"}
    assert checks["matmul"]["values"]["dtype"] == "bfloat16"


def test_what_libraries_print_is_not_in_the_answer(capfd, monkeypatch):
    """The gloo of torch 2.10 prints to stdout, and NCCL where NCCL_DEBUG is set."""

    def noisy(_device_type: str) -> tuple[Any, list[Any]]:
        os.write(1, b"[Gloo] Rank 0 is connected\n")
        ctypes.CDLL(None).puts(b"NCCL INFO")  # into C's buffer, where stdout is a file
        return launch_world(), judge(reports(1), 1, FINE)

    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
        monkeypatch.setenv(name.replace("RANK", "WORLD_SIZE"), "1")
    monkeypatch.setattr(command, "check_this_world", noisy)
    assert command.main(["--launched", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["exit_code"] == 0
    assert "[Gloo] Rank 0" in said.err and "NCCL INFO" in said.err


def test_ranks_that_die_are_named(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ: os._exit(7)\n")
    (check,) = check_launched(2, "cpu", environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"}))
    assert (check.name, check.verdict) == ("launched_world", "fail")
    assert check.values["silent"] == [0, 1]
    assert any("exitcode" in line for line in check.values["messages"])


PREFERENCES = "--model m --data d --output-dir o --device-type cpu"
WINDOWS = "--train-data-path t.bin --output-dir o --device-type cpu --dtype float32"


def configured(name: str, words: str) -> tuple[RunKind, BaseConfig | None]:
    kind = KINDS[name]
    if not words:
        return kind, None
    return kind, resolve(words.split(), world_size=1, model_class=kind.config_class).config


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pretrain", f"{WINDOWS} --model m --num-iterations 9 --finetuning lora"),
        ("dpo", PREFERENCES),
    ],
)
def test_a_dry_run_for_real(name: str, words: str):
    kind, config = configured(name, words)
    check = check_dry_run(kind, 1, "cpu", config, environment())
    assert check.verdict == "ok", check.what
    assert check.values["kind"] == name and name in check.what
    assert check.values["loss"] == pytest.approx(check.values["resumed_loss"], rel=1e-6)
    # a second step that the first one had no part in shows nothing
    if words == PREFERENCES:
        assert abs(check.values["loss"] - math.log(2)) > 10 * LOSS_TOLERANCE


def test_a_dry_run_is_of_the_kind_of_the_configuration(monkeypatch):
    """What is started, and with which settings; `test_a_dry_run_for_real` starts it."""
    runs: list[Any] = []

    def end(words: Sequence[str], **_more: Any) -> Answer:
        if "--config" in words:
            output = Path(words[words.index("--output-dir") + 1])
            model = next(kind for kind in KINDS.values() if kind.module in words).config_class
            runs.append(resolve(list(words[3:]), world_size=1, model_class=model).config)
            output.mkdir()
            (output / "trainer_log.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
        return Answer(0, "")

    monkeypatch.setattr(dry_run, "run_to_end", end)
    tuned = {"loss": "simpo", "beta": 3.0, "simpo_gamma": 0.5, "finetuning": "full"}
    made = {"arch": "llama", "optimizer": "adamw", "dtype": "float32", "global_batch_size": 2}
    for name, words, wanted, data in (
        ("dpo", f"{PREFERENCES} --loss kto", {"loss": "kto"}, "labels.jsonl"),
        (
            "dpo",
            f"{PREFERENCES} --loss simpo --beta 3 --simpo-gamma 0.5 --finetuning full",
            tuned,
            "pairs.jsonl",
        ),
        ("pretrain", f"{WINDOWS} --arch llama --optimizer adamw", made, ""),
        ("pretrain", f"{WINDOWS} --model m --num-iterations 9", {"finetuning": "full"}, ""),
    ):
        kind, config = configured(name, words)
        assert check_dry_run(kind, 1, "cpu", config, environment()).verdict == "ok"
        first, second = runs[-2:]
        assert type(first) is kind.config_class
        assert {name: getattr(first, name) for name in wanted} == wanted
        assert second.resume == f"{first.output_dir}/checkpoint-1"
        assert not data or Path(first.sources[0].path).name == data

    class Toy(RunKind):
        name = "toy"

    check = check_dry_run(Toy(), 1, "cpu", None, environment())
    assert check.verdict == "skip" and "toy" in check.what


def test_a_dry_run_that_fails_says_why(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('this torch is broken')\n")
    broken = environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    check = check_dry_run(KINDS["dpo"], 1, "cpu", None, broken)
    assert check.verdict == "fail" and "this torch is broken" in check.what
    assert "making a tiny model" in check.what and check.values["messages"]


# ---------------------------------------------------------------- what ranks report, judged


def reports(count: int = 4, **changed: dict[int, Any]) -> list[dict[str, Any]]:
    """Reports of ranks that agree, but for `field={rank: value}`."""
    facts = {"device": "910B3", "backend": "hccl", "dtype": "bfloat16", "sum_error": 0.0}
    facts |= {"gathered_ranks": list(range(count)), "matmul_digest": "d", "matmul_error": 2e-3}
    made = [{"rank": rank, **facts} for rank in range(count)]
    for field, by_rank in changed.items():
        for rank, value in by_rank.items():
            made[rank][field] = value
    return made


@pytest.mark.parametrize(
    ("changed", "name", "verdict", "ranks"),
    [
        ({"sum_error": {2: 1.0}}, "collectives", "fail", "rank 2"),
        ({"gathered_ranks": {0: [0, 1, 3, 2]}}, "collectives", "fail", "rank 0"),
        ({"matmul_error": {1: float("nan")}}, "matmul", "fail", "rank 1"),
        ({"matmul_digest": {1: "other"}}, "matmul", "warn", "rank 1"),
        # bits are compared among equal devices only
        ({"device": {0: "A100"}, "matmul_digest": {0: "a"}}, "matmul", "ok", ""),
    ],
)
def test_a_rank_that_is_wrong_is_named(changed: dict, name: str, verdict: str, ranks: str):
    found = {check.name: check for check in judge(reports(**changed), 4, FINE)}
    assert found[name].verdict == verdict and ranks in found[name].what
    assert {check.verdict for check in found.values() if check.name != name} == {"ok"}


def test_missing_ranks_and_half_written_reports(capsys):
    for report in reversed(reports(3)):
        print("[Gloo] no line end", end="")
        print_report(report)
    messages = capsys.readouterr().out.replace('"matmul_error": 0.002}\n', "", 1)
    answer = Answer(1, f"{messages}x\ntorch.OutOfMemoryError: no memory\nbye")
    assert [report["rank"] for report in answer.reports] == [1, 0]
    (check,) = judge(answer.reports, 4, answer)
    assert check.verdict == "fail" and check.values["silent"] == [2, 3]
    assert "rank 2, 3 of 4" in check.what and "OutOfMemoryError" in check.what
    (hung,) = judge([], 2, Answer(None, ""))
    assert hung.verdict == "fail" and "too busy" in hung.fix


def test_a_resumed_step_must_be_the_step():
    for resumed, verdict in ((2.001, "ok"), (2.01, "fail"), (math.nan, "fail")):
        assert compare("sft", 2.0, resumed, 2).verdict == verdict


# ---------------------------------------------------------------- processes that are asked


def test_a_process_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(probe, "GRACE_SECONDS", 0.5)
    command = ["sh", "-c", "trap '' TERM; echo $$; while true; do sleep 9; done"]
    answer = run_to_end(command, environment=environment(), timeout_seconds=1.0)
    assert answer.code is None and answer.reason == "it did not answer in time"
    assert not alive([int(answer.messages)])


def test_an_operator_that_cannot_be_built():
    error = "RuntimeError: Error building extension"
    for messages, what, fix in (
        (f"/bin/sh: 1: c++: not found\n{error}\nx", error, "install a C++ compiler"),
        (f"x\nKeyError: 'ASCEND_HOME'\n{error}", "KeyError: 'ASCEND_HOME'", "set_env.sh"),
        ("a.cpp:3:1: error: no type\nninja: stopped", "a.cpp:3:1: error: no type", "fix what"),
    ):
        check = not_built("cpu_adam", Answer(1, messages))
        assert check.what.endswith(what) and fix in check.fix
