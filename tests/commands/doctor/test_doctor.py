"""The doctor command: right verdicts and exit codes on this machine, on simulated NPUs, and with
real faults.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, run_cli, said
from packaging.version import Version
from smi_tools import make_tools

from finetune.commands.doctor import command as doctor
from finetune.commands.doctor import config as run_config
from finetune.commands.doctor import data_probe, devices, host
from finetune.commands.doctor.check import Check, worst
from finetune.commands.doctor.command import (
    DoctorOptions,
    exit_code,
    quick_checks,
    summary,
    to_json,
)
from finetune.commands.doctor.config import Demands, check_output, demands_of
from finetune.commands.doctor.probe import Answer, answer_with
from finetune.commands.doctor.versions import PAIRS
from finetune.config.fields import flag
from finetune.config.kinds import KINDS, kind_of_arguments
from finetune.config.options import flags_of, read_known_options
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError, FinetuneError

FAKE_NPU = ROOT / "tests" / "fake_npu"
FROZEN = ROOT / "tests" / "frozen" / "doctor.txt"


def diagnose(
    args: Sequence[object], env: dict[str, str | None] | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    """Exit code, and the checks by name (the last of a name), of the real command."""
    result = run_cli(["doctor", "--json", *args], env=env, module="finetune", **more)
    assert result.returncode in (0, 1), said(result)
    report = json.loads(result.stdout)
    assert report["exit_code"] == result.returncode
    return result.returncode, {check["name"]: check for check in report["checks"]}


def failing(checks: dict[str, Any]) -> set[str]:
    return {name for name, check in checks.items() if check["verdict"] == "fail"}


# ---------------------------------------------------------------- this machine


def test_this_machine_with_a_configuration(tiny_model: Path, tiny_data: Path, tmp_path: Path):
    """Everything but processes: torch imported, model and data read; nothing is left in the output
    folder.
    """
    output = tmp_path / "run"
    code, checks = diagnose(
        [
            "--model",
            tiny_model,
            "--data",
            tiny_data,
            "--output-dir",
            output,
            "--device-type",
            "cpu",
            "--nproc",
            2,
        ]
    )
    assert code == 0 and not failing(checks)
    assert (
        checks["torch_device"]["verdict"]
        == checks["data"]["verdict"]
        == checks["tokenizer"]["verdict"]
        == "ok"
    )
    assert checks["data"]["values"]["rows"] == 60 and checks["model"]["values"] == {
        "model_type": "qwen3"
    }
    assert checks["batch"]["values"]["world_size"] == 2
    assert checks["cuda_driver"]["verdict"] == "skip" or shutil.which("nvidia-smi")
    assert not output.exists() and list(tmp_path.iterdir()) == []


def test_quick_imports_no_torch():
    checks = quick_checks(environment={})
    assert worst(checks) in ("ok", "warn") and len(checks) >= 10
    result = run_cli(
        ["doctor", "--quick"],
        module="finetune",
        launcher="python",
        launcher_args=["-X", "importtime"],
    )
    loaded = {
        line.rpartition("|")[2].strip().split(".")[0]
        for line in result.stderr.splitlines()
        if "|" in line
    }
    assert "rich" in loaded and not loaded & {
        "torch",
        "transformers",
        "deepspeed",
        "accelerate",
        "datasets",
    }


def test_quick_checks_as_the_launcher_calls_them(tiny_model: Path, tiny_data: Path, tmp_path: Path):
    words = [
        "--model",
        str(tiny_model),
        "--data",
        str(tiny_data),
        "--output-dir",
        str(tmp_path / "run"),
    ]
    config = resolve([*words, "--device-type", "cpu"], world_size=2).config
    good = quick_checks(config, processes=2, environment={"PATH": os.environ["PATH"]})
    assert worst(good) in ("ok", "warn") and "port" not in {check.name for check in good}
    bad = quick_checks(config, processes=2, environment={"RANK": "0", "WORLD_SIZE": "2"})
    assert [check.name for check in bad if check.verdict == "fail"] == ["stale_rank"]


# ------------------------------------------------------ simulated NPUs (nothing here ran on Ascend)


def test_simulated_npus(tmp_path: Path):
    """The fake device of the tests, and an npu-smi that lists two of them."""
    make_tools(tmp_path, {"npu-smi": "npu_26.0_910B3_container.txt"})
    env = {"PYTHONPATH": f"{ROOT}:{FAKE_NPU}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code, checks = diagnose(["--nproc", 2], env=env)
    assert code == 0 and not failing(checks)
    assert (
        checks["torch_npu_import"]["verdict"] == "ok"
        and "simulated" in checks["torch_npu_import"]["what"]
    )
    assert checks["torch_device"]["values"] == {
        "available": ["npu", "cpu"],
        "device_type": "npu",
        "count": 2,
    }
    assert checks["devices"]["verdict"] == "ok" and "2 x 910B3" in checks["devices"]["what"]
    assert (
        checks["device_memory"]["verdict"] == "warn"
        and "pid 212" in checks["device_memory"]["what"]
    )
    assert checks["ascend_home"]["verdict"] == checks["torch_npu_pairing"]["verdict"] == "warn"


def test_simulated_npus_without_memory(tmp_path: Path):
    make_tools(tmp_path, {"npu-smi": "npu_24.1_910B1_busy.txt"})
    env = {"PYTHONPATH": f"{ROOT}:{FAKE_NPU}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    wanted = ["--quick", "--nproc", 4, "--min-devices", 4, "--min-free-memory", 20]
    code, checks = diagnose(wanted, env=env)
    assert code == 1 and failing(checks) == {"device_memory"}
    assert "208841" in checks["device_memory"]["fix"]
    # As in containers without the driver's management library: memory is unknown, torch says
    # whether that matters.
    make_tools(tmp_path / "broken", {"npu-smi": "npu_no_driver.txt"})
    code, checks = diagnose(
        ["--quick", "--device-type", "npu"], env={**env, "PATH": f"{tmp_path}/broken:{env['PATH']}"}
    )
    assert (
        code == 0
        and checks["devices"]["verdict"] == "warn"
        and "-8005" in checks["devices"]["what"]
    )
    code, checks = diagnose(
        [*wanted[:2], 2, "--min-free-memory", 20], env={**env, "ASCEND_RT_VISIBLE_DEVICES": "0,3"}
    )
    assert code == 0 and checks["device_memory"]["verdict"] == "ok"


def test_torch_npu_that_cannot_be_loaded(tmp_path: Path):
    """As torch_npu without CANN: its import raises, and takes `import torch` along where torch
    loads it by itself.
    """
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or"
        " directory')\n"
    )
    code, checks = diagnose([], env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert code == 1 and failing(checks) == {"torch_npu_import"}
    assert (
        "libhccl.so" in checks["torch_npu_import"]["what"]
        and "set_env.sh" in checks["torch_npu_import"]["fix"]
    )


def test_torch_that_cannot_be_loaded(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    code, checks = diagnose([], env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert code == 1 and "torch_import" in failing(checks)
    assert "SIGSEGV" in checks["torch_import"]["what"]


def test_a_device_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(devices, "TORCH_TIMEOUT_SECONDS", 1.0)
    (check,), device_type = devices.check_torch(
        {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}, "auto", None
    )
    assert device_type is None and (check.name, check.verdict) == ("torch_import", "fail")
    assert "did not end in 1 s" in check.what and "npu-smi" in check.fix


# ---------------------------------------------------------------- real faults


def test_a_taken_port(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, checks = diagnose(["--quick"], env={"MASTER_PORT": str(port)})
    assert code == 1 and failing(checks) == {"port"}
    assert {checks[name]["verdict"] for name in ("master_address", "own_address")} == {"skip"}
    assert checks["port"]["values"]["holder"] == os.getpid() and str(port) in checks["port"]["what"]


def test_an_unresolvable_master_and_contradicting_variables():
    env = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "no-such-host.invalid",
        "GLOO_SOCKET_IFNAME": "ib9",
    }
    code, checks = diagnose(["--quick"], env=env)
    assert code == 1 and failing(checks) == {
        "master_address",
        "master_reachable",
        "socket_interface",
    }


def test_no_compiler(tmp_path: Path):
    """A PATH with this Python and no compiler: fails where DeepSpeed has to build, and only
    there.
    """
    env = {"PATH": str(tmp_path), "CXX": None}
    code, checks = diagnose(["--quick", "--device-type", "cpu"], env=env)
    assert code == 0 and checks["compiler"]["verdict"] == "skip"
    words = [
        "--quick",
        "--config",
        "ds_configs/zero3.json",
        "--output-dir",
        tmp_path / "run",
        "--device-type",
        "cpu",
    ]
    code, checks = diagnose(words, env=env)
    assert code == 1 and failing(checks) == {"compiler"}
    assert "DeepSpeed" in checks["compiler"]["what"]


def test_wrong_versions(tmp_path: Path):
    """Distributions as pip leaves them, found before the real ones; torch's build is read off its
    file.
    """
    for name, version in (("transformers", "4.57.1"), ("torch", "2.6.0"), ("torch_npu", "2.6.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(
        "__version__ = '2.6.0+cpu'\ncuda: Optional[str] = None\n"
    )
    cann = tmp_path / "cann"
    (cann / "x86_64-linux").mkdir(parents=True)
    (cann / "x86_64-linux" / "ascend_toolkit_install.info").write_text("version=8.2.RC1\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "ASCEND_HOME_PATH": str(cann)}
    code, checks = diagnose(["--quick"], env=env)
    assert code == 1 and failing(checks) == {"packages", "torch_npu_pairing"}
    assert "transformers 4.57.1 is outside" in checks["packages"]["what"]
    assert "torch 2.6.0 is outside" in checks["packages"]["what"]
    assert (
        "CANN 8.2.RC1 has torch_npu 2.6.0, 2.5.1.post1 only" in checks["torch_npu_pairing"]["what"]
    )


def probed(
    words: Sequence[object], kind: str, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """The data probe's report of a command line, asked in this process (torch is loaded here
    already).
    """
    request = {
        "kind": kind,
        "module": f"finetune.{kind}",
        "arguments": [str(word) for word in words],
        "world_size": 1,
    }
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**request, "language": "en"})))
    monkeypatch.setattr(logging.getLogger("finetune"), "level", logging.NOTSET)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        answer_with(data_probe.probe)
    return Answer(0, printed.getvalue()).report


def test_bad_data(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = ["--model", tiny_model, "--output-dir", tmp_path / "run"]
    broken = ROOT / "data_samples" / "broken.jsonl"
    found = probed([*model, "--data", broken], "sft", monkeypatch)
    assert [check["verdict"] for check in found] == ["ok", "ok", "fail"]
    assert found[-1]["name"] == "data" and "broken.jsonl" in found[-1]["what"]
    short = [*model, "--data", tiny_data, "--cutoff-len", 40]
    (data,) = [check for check in probed(short, "sft", monkeypatch) if check["name"] == "data"]
    assert data["verdict"] == "warn" and "lost the end of an answer" in data["what"]
    layers = [*model, "--data", tiny_data, "--lora-target-modules", "no_such_layer"]
    assert [check["name"] for check in probed(layers, "sft", monkeypatch)] == ["model"]
    monkeypatch.setattr(data_probe, "LARGE_BYTES", 100)
    large = probed([*model, "--data", tiny_data], "sft", monkeypatch)[-1]
    assert large["verdict"] == "ok" and "they were not tokenized" in large["what"]
    assert probed([*model, "--data", broken], "sft", monkeypatch)[-1]["verdict"] == "fail"


def test_token_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import numpy as np

    tokens = tmp_path / "tokens.bin"
    (np.arange(4096, dtype=np.uint16) % 100).tofile(tokens)
    words = [
        "--train-data-path",
        tokens,
        "--vocab-size",
        128,
        "--output-dir",
        tmp_path / "run",
        "--depth",
        2,
    ]
    words += ["--max-seq-len", 64, "--device-batch-size", 2]
    found = probed([*words, "--total-batch-size", 512], "pretrain", monkeypatch)
    assert [(check["name"], check["verdict"]) for check in found] == [
        ("tokenizer", "warn"),
        ("data", "ok"),
    ]
    assert found[-1]["values"]["tokens"] == 4096
    few = probed([*words, "--total-batch-size", 8192], "pretrain", monkeypatch)[-1]
    assert (few["name"], few["verdict"]) == ("data", "fail") and "fewer than the 128" in few["what"]


def test_a_wrong_configuration(tiny_model: Path, tmp_path: Path):
    config = tmp_path / "run.json"
    config.write_text(
        json.dumps({"model": "m", "data": "d", "output_dir": "o", "learning_rat": 1e-4})
    )
    code, checks = diagnose(["--quick", "--config", config])
    assert (
        code == 1 and failing(checks) == {"config"} and "learning_rat" in checks["config"]["what"]
    )
    words = [
        "--quick",
        "--model",
        tiny_model,
        "--data",
        "nowhere.jsonl",
        "--output-dir",
        tmp_path / "x",
    ]
    code, checks = diagnose(words)
    assert code == 1 and failing(checks) == {"paths"} and "nowhere.jsonl" in checks["paths"]["what"]


# ---------------------------------------------------------------- the command line


def test_help_and_wrong_command_lines(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--help"])
    assert ended.value.code == 0
    assert "--min-free-memory" in capsys.readouterr().out
    wrong = (
        ["--nproc", "0"],
        ["--nproc", "two"],
        ["--quick", "--full"],
        ["--lang", "fr"],
        ["--launched"],
        ["tune"],
    )
    for words in (*wrong, ["--min-free-memory", "-1"], ["--min-devices", "0"]):
        with pytest.raises(ConfigError):
            doctor.main(words)
    options, rest = read_known_options(
        DoctorOptions, ["pretrain", "--nproc_per_node", "2", "--depth", "4", "--quick"]
    )
    assert (options.kind, options.nproc, options.quick, rest) == (
        "pretrain",
        2,
        True,
        ["--depth", "4"],
    )
    with pytest.raises(FinetuneError, match="quik"):
        doctor.main(["--quik"])
    assert run_cli(["doctor", "--min-device", "2"], module="finetune").returncode == 2


def test_lines_in_both_languages():
    english = run_cli(
        ["doctor", "--quick", "--lang", "en"], module="finetune", env={"MASTER_PORT": "x"}
    )
    assert english.returncode == 1 and "[ERROR]" in english.stdout and "fix: " in english.stdout
    assert "fix the errors first" in english.stdout and "[SKIP]" in english.stdout
    chinese = run_cli(
        ["doctor", "--quick"], module="finetune", env={"LC_ALL": "zh_CN.UTF-8", "MASTER_PORT": "x"}
    )
    assert "请先修复错误" in chinese.stdout and "修复：" in chinese.stdout


def test_a_terminal_gets_a_table():
    from io import StringIO

    from rich.console import Console

    screen = Console(file=StringIO(), force_terminal=True, width=60)
    made = doctor.show([Check("a").ok("x" * 70), Check("b").fail("bad", "repair it")], screen)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert len(made) == 2 and "\x1b[" in text and "repair it" in text
    assert all(len(line.replace("\x1b", "")) < 100 for line in text.splitlines())


@pytest.mark.frozen
def test_form_of_json_and_exit_codes():
    checks = [
        Check("a", values={"number": 1}).ok("fine {number}"),
        Check("b").warn("hm", "do"),
        Check("c").skip("no"),
    ]
    assert checks[0].what == "fine 1"
    assert exit_code(checks) == 0 and exit_code([*checks, Check("d").fail("x", "y")]) == 1
    assert worst([]) == "skip" and worst(checks) == "warn"
    report = to_json(checks)
    assert report["checks"][1] == {
        "name": "b",
        "verdict": "warn",
        "what": "hm",
        "fix": "do",
        "values": {},
    }
    assert summary(checks) == "1 ok, 1 warnings, 0 errors, 1 skipped: ready to start"
    keys = {
        "report": sorted(report),
        "check": sorted(report["checks"][0]),
        "verdicts": sorted(doctor.TAGS),
    }
    keys["flags"] = sorted(
        flag(name) for name in set(flags_of(DoctorOptions)) - set(DoctorOptions.positional)
    )
    source = "".join(path.read_text() for path in (ROOT / "finetune/commands/doctor").glob("*.py"))
    frozen = FROZEN.read_text().splitlines()
    assert [f"{name}: {' '.join(values)}" for name, values in keys.items()] == frozen[:4]
    assert [
        name for name in frozen[4].removeprefix("names: ").split() if f'"{name}"' not in source
    ] == [
        "disk_cache",
        "disk_output",
        "locks_cache",
        "locks_output",
    ]


@pytest.mark.frozen
def test_every_check_is_documented():
    document = (ROOT / "docs" / "guides" / "doctor.md").read_text(encoding="utf-8")
    names = FROZEN.read_text().splitlines()[4].removeprefix("names: ").split()
    assert [name for name in names if f"`{name}`" not in document] == []
    rows = dict(re.findall(r"^\| (9\.\d) \| (.+) \|$", document, re.M))
    assert {cann: set(cell.split(", ")) for cann, cell in rows.items()} == {
        cann: {one for one in releases if Version(one) >= Version("2.10")}
        for cann, releases in PAIRS.items()
        if cann >= "9.0"
    }


# ---------------------------------------------------------------- what a configuration asks for


def test_which_kind_the_arguments_are_for(tmp_path: Path):
    def kind_of(words: list[str]) -> str:
        return kind_of_arguments(words).name

    for file in sorted((ROOT / "ds_configs").glob("*.json")):
        assert kind_of(["--config", str(file)]) == (
            "pretrain" if "pretrain" in file.name else "sft"
        ), file.name
    assert kind_of(["--depth", "4"]) == "pretrain"
    # a typing error among them
    assert kind_of(["--depth", "4", "--num-iteration", "9"]) == "pretrain"
    assert kind_of([]) == kind_of(["--config", "not-there.json"]) == "sft"
    plain = tmp_path / "plain.json"  # DeepSpeed's own: its optimizer is not pretraining's
    plain.write_text(
        json.dumps(
            {"optimizer": {"type": "AdamW"}, "compile": {}, "zero_optimization": {"stage": 2}}
        )
    )
    assert kind_of(["--config", str(plain)]) == "sft"
    assert {*PretrainConfig.model_fields, *PretrainConfig.aliases} >= KINDS[
        "pretrain"
    ].telling_settings
    assert not KINDS["pretrain"].telling_settings & {*RunConfig.model_fields, *RunConfig.aliases}


def test_batch_arithmetic_of_a_preset():
    config, checks = run_config.check_config(
        ["--config", str(ROOT / "ds_configs/pretrain_npu4_standard.json")], KINDS["pretrain"], 4
    )
    assert (
        config is not None
        and checks[-1].what == "65,536 tokens a step = 4 x 1024 x 4 processes x 4"
    )
    words = [
        "--model",
        "m",
        "--data",
        "d",
        "--output-dir",
        "o",
        "--micro-batch-size",
        "3",
        "--global-batch-size",
        "16",
    ]
    config, checks = run_config.check_config(words, KINDS["sft"], 1)
    assert config is None and [check.verdict for check in checks] == ["fail"]
    assert "nearest that agree" in checks[0].fix


def test_demands_of_offload(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x" * 1000)
    keys = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "zero_force_ds_cpu_optimizer": True,
    }
    file = tmp_path / "run.json"
    file.write_text(
        json.dumps({**keys, "finetune": {"model": str(model), "data": "d", "output_dir": "o"}})
    )
    lora = demands_of(resolve(["--config", str(file)], world_size=2).config, "npu", 2, 1)
    assert (lora.deepspeed, lora.cpu_adam, lora.pinned, lora.host_bytes, lora.disk_bytes) == (
        True,
        True,
        True,
        1000,
        0,
    )
    keys["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    for given, device_type, pinned in (
        ({}, "npu", True),
        ({}, "cpu", False),
        ({"pin_memory": False}, "npu", False),
    ):
        keys["zero_optimization"]["offload_param"] = {"device": "cpu", **given}
        config = RunConfig(model=str(model), data="d", output_dir="o", deepspeed=keys)
        assert demands_of(config, device_type, 2, 1).pinned is pinned
    full = demands_of(
        resolve(["--config", str(file), "--finetuning", "full"], world_size=2).config, "npu", 2, 2
    )
    assert full.host_bytes == 500 + 4000 and full.disk_bytes == 6 * 1000 * 3 + 1000
    alone = demands_of(
        resolve(["--config", str(file), "--deepspeed", "none"], world_size=2).config, "cpu", 2, 1
    )
    assert (alone.deepspeed, alone.host_bytes) == (False, 2000)
    assert demands_of(None, "cpu", 1, 1).host_bytes == 0


def test_operators_that_the_run_does_not_use_are_at_most_a_warning(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("check_shared_memory_operator", "check_cpu_adam"):
        monkeypatch.setattr(host, name, lambda *_, name=name: Check(name).fail("x", "y"))
    machine = doctor.Machine({}, None, "cpu", 1, DoctorOptions(full=True), [])
    assert [check.verdict for check in machine.operator_checks()] == ["warn", "warn"]
    monkeypatch.setattr(doctor.Machine, "demands", Demands(deepspeed=True, cpu_adam=True))
    machine.options = DoctorOptions()
    assert [check.verdict for check in machine.operator_checks()] == ["fail", "fail"]
    machine.device_type = "npu"
    assert [check.name for check in machine.operator_checks()] == ["check_cpu_adam"]
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert list(machine.operator_checks()) == []
    machine.options = DoctorOptions(full=True)
    assert [check.verdict for check in machine.operator_checks()] == ["skip"]


def test_output_folders(tmp_path: Path):
    def look(folder: Path, **more: Any) -> Check:
        words = ["--model", "m", "--data", "d", "--output-dir", str(folder)]
        (check,) = check_output(resolve(words, world_size=1).config, **more)
        return check

    assert look(tmp_path / "new").verdict == "ok"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    assert look(tmp_path / "photos").verdict == "fail"
    run = tmp_path / "run"
    run.mkdir()
    (run / "run_identity.json").write_text("{}")
    (run / "status.json").write_text('{"state": "stopped", "step": 7}')
    assert look(run).verdict == "ok" and "stopped at step 7" in look(run).what
    with (run / ".lock").open("w") as lock:
        lock.write(json.dumps({"pid": 77, "host": "box"}))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert look(run).verdict == "fail" and "pid 77 on box" in look(run).what
        assert look(run, waits=True).verdict == "warn"
    assert look(run).verdict == "ok"
