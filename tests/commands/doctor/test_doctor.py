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
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, run_cli
from packaging.version import Version
from rich.console import Console
from smi_tools import make_tools

from finetune.commands.doctor import command as doctor
from finetune.commands.doctor import data_probe, devices, host
from finetune.commands.doctor.check import Check, worst
from finetune.commands.doctor.command import DoctorOptions
from finetune.commands.doctor.config import Demands, check_output, demands_of
from finetune.commands.doctor.probe import Answer, answer_with
from finetune.commands.doctor.versions import PAIRS
from finetune.config.fields import flag
from finetune.config.options import flags_of
from finetune.config.run_config import RunConfig
from finetune.errors import FinetuneError
from finetune.runtime.language import speaking

FAKE_NPU = ROOT / "tests" / "fake_npu"
FROZEN = ROOT / "tests" / "frozen" / "doctor.txt"

Diagnose = Callable[..., tuple[int, dict[str, Any]]]


def by_name(code: int, text: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the checks by name (the last of a name)."""
    report = json.loads(text)
    assert report["exit_code"] == code
    return code, {check["name"]: check for check in report["checks"]}


@pytest.fixture
def diagnose(monkeypatch, capsys) -> Diagnose:
    """The command in this process."""

    def call(words: str, **variables: str) -> tuple[int, dict[str, Any]]:
        with monkeypatch.context() as patch:
            patch.chdir(ROOT)
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CXX"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            code = doctor.main(["--json", *words.split()])
        return by_name(code, capsys.readouterr().out)

    return call


def failing(checks: dict[str, Any]) -> set[str]:
    return {name for name, check in checks.items() if check["verdict"] == "fail"}


# ---------------------------------------------------------------- this machine


def test_quick_imports_no_torch():
    trace = {"launcher": "python", "launcher_args": ["-X", "importtime"]}
    result = run_cli(["doctor", "--quick"], module="finetune", **trace)
    lines = [line for line in result.stderr.splitlines() if "|" in line]
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in lines}
    assert "rich" in loaded
    assert not loaded & {"torch", "transformers", "deepspeed", "accelerate", "datasets"}


# ------------------------------------------------------ simulated NPUs (nothing here ran on Ascend)


def test_simulated_npus(tmp_path: Path):
    """The fake device of the tests, and an npu-smi that lists two of them."""
    make_tools(tmp_path, {"npu-smi": "npu_26.0_910B3_container.txt"})
    variables = {"PYTHONPATH": f"{ROOT}:{FAKE_NPU}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = run_cli(["doctor", "--json", "--nproc", 2], env=variables, module="finetune")
    code, checks = by_name(result.returncode, result.stdout)
    assert code == 0 and not failing(checks)
    for name, verdict, text in (
        ("torch_npu_import", "ok", "simulated"),
        ("devices", "ok", "2 x 910B3"),
        ("device_memory", "warn", "pid 212"),
        ("torch_npu_pairing", "warn", ""),
    ):
        assert checks[name]["verdict"] == verdict and text in checks[name]["what"]
    values = {"available": ["npu", "cpu"], "device_type": "npu", "count": 2}
    assert checks["torch_device"]["values"] == values


def test_simulated_npus_without_memory(tmp_path: Path, monkeypatch, diagnose: Diagnose):
    monkeypatch.syspath_prepend(FAKE_NPU)
    make_tools(tmp_path / "busy", {"npu-smi": "npu_24.1_910B1_busy.txt"})
    make_tools(tmp_path / "broken", {"npu-smi": "npu_no_driver.txt"})
    busy, broken = (f"{tmp_path / name}:{os.environ['PATH']}" for name in ("busy", "broken"))
    wanted = "--quick --nproc 4 --min-devices 4 --min-free-memory 20"
    code, checks = diagnose(wanted, PATH=busy)
    assert code == 1 and failing(checks) == {"device_memory"}
    assert "208841" in checks["device_memory"]["fix"]
    # As in containers without the driver's management library: memory is unknown, torch says
    # whether that matters.
    code, checks = diagnose("--quick --device-type npu", PATH=broken)
    assert code == 0 and checks["devices"]["verdict"] == "warn"
    assert "-8005" in checks["devices"]["what"]


@pytest.mark.parametrize(
    ("torch", "name", "what"),
    [
        # as torch_npu without CANN, which torch loads by itself
        ("raise ImportError", "torch_npu_import", "libhccl.so: cannot open shared object file"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "torch_import", "SIGSEGV"),
        ("import time; time.sleep(60)", "torch_import", "did not end in 2 s"),
    ],
)
def test_torch_that_cannot_be_loaded(torch, name, what, tmp_path, monkeypatch):
    stubs = {"torch": torch}
    if name == "torch_npu_import":
        asked = "import os\nif os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD') != '0':"
        stubs = {"torch": f"{asked} import torch_npu", "torch_npu": f"{torch}('{what}')"}
    for module, text in stubs.items():
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(devices, "TORCH_TIMEOUT_SECONDS", 2.0 if "time" in torch else 60.0)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    (check,), device_type = devices.check_torch(environment, "auto", None)
    assert device_type is None and (check.name, check.verdict) == (name, "fail")
    assert what in check.what


# ---------------------------------------------------------------- real faults


def test_what_is_wrong_with_a_machine(tmp_path: Path, diagnose: Diagnose):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        code, checks = diagnose("--quick", MASTER_PORT=port)
    assert code == 1 and failing(checks) == {"port"}
    assert checks["master_address"]["verdict"] == checks["own_address"]["verdict"] == "skip"
    assert checks["port"]["values"]["holder"] == os.getpid() and port in checks["port"]["what"]
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no-such-host.invalid"}
    code, checks = diagnose("--quick", **nodes, GLOO_SOCKET_IFNAME="ib9")
    assert code == 1
    assert failing(checks) == {"master_address", "master_reachable", "socket_interface"}
    # no compiler: fails if DeepSpeed has to build, and only then
    code, checks = diagnose("--quick --device-type cpu", PATH=str(tmp_path))
    assert code == 0 and checks["compiler"]["verdict"] == "skip"
    preset = f"--config ds_configs/zero3.json --output-dir {tmp_path / 'run'} --device-type cpu"
    code, checks = diagnose(f"--quick {preset}", PATH=str(tmp_path))
    assert code == 1 and failing(checks) == {"compiler"}
    assert "DeepSpeed" in checks["compiler"]["what"]


def test_a_wrong_configuration(tiny_model: Path, tmp_path: Path, diagnose: Diagnose):
    config = tmp_path / "run.json"
    settings = {"model": "m", "data": "d", "output_dir": "o", "learning_rat": 1e-4}
    config.write_text(json.dumps(settings))
    model = f"--model {tiny_model} --data nowhere.jsonl --output-dir {tmp_path / 'x'}"
    for words, name, said in (
        (f"--config {config}", "config", "learning_rat"),
        ("--config not-there.json", "config", "does not exist"),
        (model, "paths", "nowhere.jsonl"),
    ):
        code, checks = diagnose(f"--quick {words}")
        assert code == 1 and failing(checks) == {name} and said in checks[name]["what"]


# ---------------------------------------------------------------- model and data


def probed(words: str, kind: str, monkeypatch) -> list[dict[str, Any]]:
    """The data probe's report of a command line, asked in this process."""
    request = {"kind": kind, "module": f"finetune.{kind}", "arguments": words.split()}
    request |= {"world_size": 1, "language": "en"}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(logging.getLogger("finetune"), "level", logging.NOTSET)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        answer_with(data_probe.probe)
    return Answer(0, printed.getvalue()).report


def test_bad_data(tiny_model: Path, tiny_data: Path, tmp_path: Path, monkeypatch):
    model = f"--model {tiny_model} --output-dir {tmp_path / 'run'}"
    broken = f"{model} --data {ROOT / 'data_samples' / 'broken.jsonl'}"
    found = probed(broken, "sft", monkeypatch)
    assert [check["verdict"] for check in found] == ["ok", "ok", "fail"]
    assert found[-1]["name"] == "data" and "broken.jsonl" in found[-1]["what"]
    data = probed(f"{model} --data {tiny_data} --cutoff-len 40", "sft", monkeypatch)[-1]
    assert data["name"] == "data" and data["verdict"] == "warn"
    assert "lost the end of an answer" in data["what"]
    layers = f"{model} --data {tiny_data} --lora-target-modules no_such_layer"
    assert [check["name"] for check in probed(layers, "sft", monkeypatch)] == ["model"]
    monkeypatch.setattr(data_probe, "LARGE_BYTES", 100)
    large = probed(f"{model} --data {tiny_data}", "sft", monkeypatch)[-1]
    assert large["verdict"] == "ok" and "they were not tokenized" in large["what"]
    assert probed(broken, "sft", monkeypatch)[-1]["verdict"] == "fail"


def test_token_files(tmp_path: Path, monkeypatch):
    import numpy as np

    (np.arange(4096, dtype=np.uint16) % 100).tofile(tmp_path / "tokens.bin")
    words = f"--train-data-path {tmp_path / 'tokens.bin'} --output-dir {tmp_path / 'run'}"
    words += " --vocab-size 128 --depth 2 --max-seq-len 64 --device-batch-size 2"
    tokenizer, data = probed(f"{words} --total-batch-size 512", "pretrain", monkeypatch)
    assert (tokenizer["name"], tokenizer["verdict"]) == ("tokenizer", "warn")
    assert (data["name"], data["verdict"], data["values"]["tokens"]) == ("data", "ok", 4096)
    few = probed(f"{words} --total-batch-size 8192", "pretrain", monkeypatch)[-1]
    assert (few["name"], few["verdict"]) == ("data", "fail") and "fewer than the 128" in few["what"]


# ---------------------------------------------------------------- the command line


def test_wrong_command_lines():
    for words in ("--nproc 0", "--quick --full", "--lang fr", "--launched", "tune", "--quik"):
        with pytest.raises(FinetuneError):
            doctor.main(words.split())


def test_what_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_PORT", "x")
    english = ("[ERROR]", "fix: ", "[SKIP]", "fix the errors first")
    for language, words in (("en", english), ("zh", ("[ERROR]", "请先修复错误", "修复："))):
        with speaking("en"):
            assert doctor.main(["pretrain", "--quick", "--lang", language]) == 1
        printed = capsys.readouterr().out
        assert all(word in printed for word in words)
    screen = Console(file=io.StringIO(), force_terminal=True, width=60)
    doctor.show([Check("a").ok("x" * 70), Check("b").fail("bad", "repair it")], screen)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[" in text and "repair it" in text


@pytest.mark.frozen
def test_form_of_json_and_exit_codes():
    warned = Check("b").warn("hm", "do")
    checks = [Check("a", values={"number": 1}).ok("fine {number}"), warned, Check("c").skip("no")]
    assert checks[0].what == "fine 1"
    assert doctor.exit_code(checks) == 0
    assert doctor.exit_code([*checks, Check("d").fail("x", "y")]) == 1
    assert worst([]) == "skip" and worst(checks) == "warn"
    report = doctor.to_json(checks)
    second = {"name": "b", "verdict": "warn", "what": "hm", "fix": "do", "values": {}}
    assert report["checks"][1] == second
    assert doctor.summary(checks) == "1 ok, 1 warnings, 0 errors, 1 skipped: ready to start"
    flags = {flag(name) for name in set(flags_of(DoctorOptions)) - set(DoctorOptions.positional)}
    frozen = dict(line.split(": ") for line in FROZEN.read_text().splitlines())
    found = {"report": report, "check": second, "verdicts": doctor.TAGS, "flags": flags}
    for name, names in found.items():
        assert sorted(names) == frozen[name].split()
    source = "".join(path.read_text() for path in (ROOT / "finetune/commands/doctor").glob("*.py"))
    composed = "disk_cache disk_output locks_cache locks_output"
    names = frozen["names"].split()
    assert [name for name in names if f'"{name}"' not in source] == composed.split()
    document = (ROOT / "docs" / "guides" / "doctor.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in document] == []
    rows = dict(re.findall(r"^\| (9\.\d) \| (.+) \|$", document, re.M))
    for cann, releases in PAIRS.items():
        if cann >= "9.0":
            written = {one for one in releases if Version(one) >= Version("2.10")}
            assert set(rows.pop(cann).split(", ")) == written
    assert not rows


# ---------------------------------------------------------------- what a configuration asks for


def test_demands_of_offload(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": 3, "offload_param": {"device": "cpu"}}
    zero["offload_optimizer"] = optimizer
    keys = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": True}
    run = {"model": str(tmp_path), "data": "d", "output_dir": "o"}

    def demands(*machine: Any, **more: Any) -> Demands:
        return demands_of(RunConfig(**run | {"deepspeed": keys} | more), *machine)

    lora = demands("npu", 2, 1)
    assert lora.deepspeed and lora.cpu_adam and lora.pinned
    assert (lora.host_bytes, lora.disk_bytes) == (1000, 0)
    full = demands("npu", 2, 2, finetuning="full")
    assert full.host_bytes == 500 + 4000 and full.disk_bytes == 6 * 1000 * 3 + 1000
    alone = demands("cpu", 2, 1, deepspeed=None)
    assert (alone.deepspeed, alone.host_bytes) == (False, 2000)
    assert demands_of(None, "cpu", 1, 1).host_bytes == 0
    optimizer["pin_memory"] = False
    for pin, device_type, pinned in (
        ({}, "npu", True),
        ({}, "cpu", False),
        ({"pin_memory": False}, "npu", False),
    ):
        zero["offload_param"] = {"device": "cpu", **pin}
        assert demands(device_type, 2, 1).pinned is pinned


def test_operators_that_the_run_does_not_use_are_at_most_a_warning(monkeypatch):
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
    def look(name: str, waits: bool = False) -> tuple[str, str]:
        config = RunConfig(model="m", data="d", output_dir=str(tmp_path / name))
        (check,) = check_output(config, waits=waits)
        return check.verdict, check.what

    assert look("new")[0] == "ok"
    for name, file in (("photos", "cat.jpg"), ("run", "run_identity.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    assert look("photos")[0] == "fail"
    (tmp_path / "run" / "status.json").write_text('{"state": "stopped", "step": 7}')
    assert look("run")[0] == "ok" and "stopped at step 7" in look("run")[1]
    with (tmp_path / "run" / ".lock").open("w") as lock:
        lock.write(json.dumps({"pid": 77, "host": "box"}))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert look("run")[0] == "fail" and "pid 77 on box" in look("run")[1]
        assert look("run", waits=True)[0] == "warn"
