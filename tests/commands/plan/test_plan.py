"""`python -m finetune plan`: its words, numbers and refusals; `--check` on a run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT
from plan_workloads import known_shape
from pydantic_core import PydanticCustomError

import finetune
from finetune.commands.plan.command import PlanOptions, bytes_of, main
from finetune.data.corpus.preparation import PrepareSettings, prepare_tokens
from finetune.errors import ConfigError, DataError, FinetuneError
from finetune.planning.shapes import KNOWN_MODELS, known_config

FROZEN = Path(__file__).parents[2] / "frozen" / "plan.txt"
PRESET = ["--config", str(ROOT / "ds_configs" / "qwen32b_lora_zero3.json"), "--data", "rows.jsonl"]
NODES = [
    "--nodes",
    "2",
    "--devices-per-node",
    "8",
    "--device-name",
    "910B3",
    "--device-memory",
    "64GiB",
]
HOSTS = ["--host-memory", "512GiB", "--host-bandwidth", "20GB", "--network-bandwidth", "25GB"]


def plan(capsys: pytest.CaptureFixture[str], *words: str, expect: int = 0) -> dict:
    assert main([*words, "--json"]) == expect
    return json.loads(capsys.readouterr().out)


def config_json(folder: Path, name: str) -> Path:
    """A public model's config.json, alone in a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(known_config(name)))
    return path


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-32B", "Qwen/Qwen2.5-72B"]
)
def test_from_a_config_json_alone_more_devices_need_less_each(name: str, tmp_path, capsys):
    path, needs = config_json(tmp_path, name), []
    for nodes, devices in ((1, 1), (1, 4), (1, 8), (2, 8), (8, 8)):
        machines = [
            "--nodes",
            str(nodes),
            "--devices-per-node",
            str(devices),
            "--device-name",
            "H100",
        ]
        found = plan(capsys, *PRESET, "--model-config", str(path), *machines, *HOSTS)
        assert found["model"]["parameters"] == known_shape(name).total
        assert (
            sum(t["bytes"] for t in found["terms"] if t["place"] == "device")
            >= found["device_bytes"]
        )
        needs.append(found["device_bytes"])
    assert needs == sorted(needs, reverse=True)


def test_flags_alone_describe_a_run(tmp_path, capsys):
    path = config_json(tmp_path, "Qwen/Qwen3-8B")
    found = plan(capsys, "--model-config", str(path), "--device-type", "npu", *NODES, *HOSTS)
    assert found["cluster"]["device_type"] == "npu" and found["sharding"] == "none"
    named = plan(capsys, "--model", "Qwen/Qwen3-8B", *NODES, *HOSTS)
    assert named["device_bytes"] == found["device_bytes"]
    made = plan(capsys, "pretrain", "--depth", "12", "--device-batch-size", "16", *NODES, *HOSTS)
    assert made["model"]["model_type"] == "nanochat"


def test_the_windows_of_token_files_are_counted(tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": "ab " * n}) + "\n" for n in range(1, 60))
    )
    settings = PrepareSettings(300, valid_fraction=0.0)
    prepared = prepare_tokens((str(tmp_path / "texts.jsonl"),), tmp_path / "tokens", settings)
    words = [
        "pretrain",
        "--train-data-path",
        str(tmp_path / "tokens"),
        "--depth",
        "1",
        "--max-seq-len",
        "20",
        *NODES,
    ]
    words += ["--device-batch-size", "1", "--total-batch-size", "320", *HOSTS]
    found = {
        kind: plan(capsys, *words, "--windows", kind) for kind in ("stream", "document", "best-fit")
    }
    tokens = prepared.splits["train"][0].tokens
    for kind, one in found.items():
        data = one["data"]
        size = 21 if kind == "best-fit" else 20  # no token of one is another's
        assert data["tokens"] == tokens and data["window_kind"] == kind
        assert data["windows"] * size + data["cut_tokens"] == tokens - (kind != "best-fit")
        assert data["steps_per_pass"] == data["windows"] / 16
    assert main([*words, "--windows", "best-fit", "--lang", "en"]) == 0
    assert f"{found['best-fit']['data']['windows']:,} windows (best-fit)" in capsys.readouterr().out
    frozen = next(line for line in FROZEN.read_text().splitlines() if line.startswith("data: "))
    assert set(found["stream"]["data"]) == set(frozen.split()[1:])
    assert plan(capsys, *PRESET, "--model", "Qwen/Qwen3-8B", *NODES, *HOSTS)["data"] is None


def test_a_dict_needs_no_model_beside_a_config_json(tmp_path):
    path = config_json(tmp_path, "Qwen/Qwen3-8B")
    machines = {
        "devices_per_node": 8,
        "device_name": "910B3",
        "host_memory": "512GiB",
        "host_bandwidth": "20GB",
    }
    alone = finetune.plan({}, model_config=path, **machines).to_json()
    assert (
        alone["device_bytes"]
        == finetune.plan({"model": "Qwen/Qwen3-8B"}, **machines).to_json()["device_bytes"]
    )
    with pytest.raises(ConfigError, match="model is not set"):
        finetune.plan({}, **machines)


def test_a_size_without_a_unit_is_refused_in_words():
    with pytest.raises(FinetuneError, match="64 has no unit") as caught:
        finetune.plan({"model": "Qwen/Qwen3-8B"}, devices_per_node=8, device_memory=64)
    assert "64GiB" in str(caught.value)


def test_a_preset_on_two_nodes(capsys):
    found = plan(capsys, *PRESET, *NODES, *HOSTS)
    assert (
        found["fits"] is True and found["sharding"] == "ZeRO-3 + offload of optimizer and weights"
    )
    assert found["rows_per_step"] == 8 and found["step"]["tokens"] == 128 * 2048
    assert 0 < found["step"]["shortest_seconds"] <= found["step"]["longest_seconds"]
    by_name = {choice["sharding"]: choice for choice in found["choices"]}
    assert by_name["none"]["fits"] is False  # 61 GiB of weights and what goes with them
    assert by_name["ZeRO-3"]["fits"] is True
    assert any(
        advice.startswith("sharding ZeRO-3 fits and moves less") for advice in found["advice"]
    )


def test_lora_of_a_small_model_needs_no_zero3(capsys):
    found = plan(capsys, *PRESET, "--model", "Qwen/Qwen2.5-7B", *NODES, *HOSTS)
    assert any("LoRA needs no ZeRO-3 here" in advice for advice in found["advice"])


def test_what_does_not_fit_is_said_with_what_would(capsys):
    small = [
        "--devices-per-node",
        "8",
        "--device-name",
        "910B3",
        "--device-memory",
        "64GiB",
        "--host-memory",
        "2TiB",
    ]
    words = [*PRESET, "--finetuning", "full", "--deepspeed", "none", *small]
    found = plan(capsys, *words, expect=1)
    assert found["fits"] is False and found["largest_micro_batch"] == 0
    assert any("does not fit" in advice for advice in found["advice"])
    assert main([*words, "--lang", "zh"]) == 1
    assert "放不下" in capsys.readouterr().out


def test_the_largest_microbatch_fits_and_the_next_does_not(capsys):
    words = [*PRESET, *NODES, *HOSTS, "--gradient-checkpointing"]
    largest = plan(capsys, *words)["largest_micro_batch"]
    assert largest > 1

    def fits(micro_batch: int, expect: int) -> bool:
        batch = [
            "--micro-batch-size",
            str(micro_batch),
            "--global-batch-size",
            str(micro_batch * 16),
        ]
        return plan(capsys, *words, *batch, expect=expect)["fits"]

    assert fits(largest, 0) is True and fits(largest + 1, 1) is False


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("conservative", "15-16 GB"), ("balanced", "20-22 GB"), ("aggressive", "28-30 GB")],
)
def test_what_a_preset_was_chosen_for_stands_beside_the_plans_own(
    preset: str, expected: str, capsys
):
    words = [
        "--config",
        str(ROOT / "ds_configs" / f"pretrain_gpu2_{preset}.json"),
        "--devices-per-node",
        "2",
    ]
    found = plan(
        capsys,
        *words,
        "--device-name",
        "A100",
        "--device-memory",
        "80GiB",
        "--host-memory",
        "128GiB",
    )
    assert (
        found["guide_memory"] == expected and found["device_bytes"] > 0 and found["choices"] == []
    )
    assert main([*words, "--device-name", "H100"]) == 0
    text = capsys.readouterr().out
    assert (
        f"expected of each device with this preset: {expected}" in text
        and "each device:" in text
        and "not judged" in text
    )


def test_a_mixture_of_experts_is_planned_and_its_experts_are_not_adapted(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mixtral"}))
    words = [*PRESET, "--model-config", str(path), *NODES, *HOSTS]
    found = plan(capsys, *words, "--lora-target-modules", "q_proj", "v_proj")
    assert found["model"]["parameters"] == 46_702_792_704
    assert main([*words, "--lora-target-modules", "q_proj"]) == 0
    assert "46.70 B (12.88 B of them for each token) parameters" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="where a mixture has its experts"):
        main(words)


def test_help_imports_no_torch():
    code = (
        "import contextlib, sys\n"
        "from finetune.commands.plan import check, command\n"
        "with contextlib.suppress(SystemExit): command.main(['--help'])\n"
        "print(sorted({'torch', 'transformers', 'deepspeed', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("usage: python -m finetune plan") and done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device-memory", "lots"], "'lots' is not a size"),
        (["--device-memory", "0GiB"], "is not a size above 0"),
        (["--nodes", "0"], "nodes is 0"),
        (["--efficiency", "1.5"], "at most 1"),
        (["--lang", "fr"], "give en, zh"),
        (["--kind", "rlhf"], "no kind of runs named 'rlhf'"),
        (["rlhf"], "no kind of runs named 'rlhf'"),
        (["--model", "someone/else"], "sizes of someone/else are not known"),
        (["--learning-rat", "1"], "learning"),
    ],
)
def test_wrong_input_is_refused_in_words(words: list[str], said: str):
    with pytest.raises(FinetuneError) as caught:
        main([*PRESET, *NODES, *words])
    assert said in str(caught.value) and "fix:" in str(caught.value)


def test_sizes():
    assert bytes_of("64GiB") == 64 * 2**30 and bytes_of("512 GB") == 512 * 10**9
    assert (
        bytes_of("25GB/s") == 25 * 10**9 and bytes_of("1.5tib") == 3 * 2**39 and bytes_of("7") == 7
    )
    with pytest.raises(PydanticCustomError, match="is not a size above 0"):
        bytes_of("7 miles")


@pytest.mark.frozen
def test_the_json_is_frozen(capsys):
    lines = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]
    frozen = {name: set(fields.split()) for name, fields in (line.split(": ") for line in lines)}
    found = plan(capsys, *PRESET, *NODES, *HOSTS)
    for name in ("cluster", "model", "step"):
        assert set(found[name]) == frozen[name]
    assert {field for term in found["terms"] for field in term} == frozen["term"]
    assert {field for choice in found["choices"] for field in choice} == frozen["choice"]
    assert set(found) == frozen["plan"]


# ---------------------------------------------------------------- --check


def run_folder(folder: Path, peak_bytes: int) -> Path:
    """What a run of two CPU processes on the bundled model leaves."""
    run = folder / "run"
    run.mkdir()
    settings = {
        "model": str(ROOT / "data_samples" / "tiny-qwen3"),
        "data": ["rows.jsonl"],
        "output_dir": str(run),
    }
    (run / "run.yaml").write_text(
        json.dumps({**settings, "cutoff_len": 256, "global_batch_size": 8})
    )
    start = {
        "event": "start",
        "world_size": 2,
        "device_type": "cpu",
        "dtype": "float32",
        "zero_stage": 0,
    }
    start["plan"] = {"heaviest_row_tokens": 200, "rows_per_rank": [4, 4.0, 4]}
    end = {
        "event": "end",
        "state": "done",
        "peak_device_bytes": [1, peak_bytes],
        "peak_host_bytes": [1, peak_bytes],
    }
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (start, end)))
    steps = [
        {"step": n, "tokens_per_second": speed}
        for n, speed in enumerate((1.0, 2.0, 50.0, 70.0, 60.0), 1)
    ]
    (run / "trainer_log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return run


@pytest.mark.frozen
def test_a_run_is_compared_with_its_plan(tmp_path, capsys):
    run = run_folder(tmp_path, 10**9)
    found = json.loads(_said(capsys, ["--check", str(run), "--json"], None))
    [compared] = found["compared"]
    right = compared["predicted_bytes"]
    assert compared["error"] == pytest.approx(right / 10**9 - 1)
    assert found["tokens_per_second"] == 60.0 and found["efficiency"] is None
    lines = FROZEN.read_text().splitlines()
    assert set(found) == set(next(line for line in lines if line.startswith("check: ")).split()[1:])
    assert set(compared) == set(
        next(line for line in lines if line.startswith("compared: ")).split()[1:]
    )
    for measured, code in (
        (right, 0),
        (int(right * 1.1), 0),
        (int(right * 1.3), 1),
        (int(right / 1.3), 1),
    ):
        events = (run / "events.jsonl").read_text().splitlines()
        end = {**json.loads(events[1]), "peak_host_bytes": [measured, 5]}
        (run / "events.jsonl").write_text(f"{events[0]}\n{json.dumps(end)}\n")
        assert ("missed" in _said(capsys, ["--check", str(run), "--lang", "en"], code)) == (
            code == 1
        )


def _said(capsys, words: list[str], expect: int | None) -> str:
    code = main(words)
    assert expect is None or code == expect
    return capsys.readouterr().out


def test_a_run_without_figures_is_refused(tmp_path):
    run = run_folder(tmp_path, 10**9)
    events = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text(events[0] + "\n")
    with pytest.raises(DataError, match="did not log its peak memory"):
        main(["--check", str(run)])
    with pytest.raises(DataError, match="no run is there"):
        main(["--check", str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="takes the run's own settings"):
        main(["--check", str(run), "--cutoff-len", "5"])


def test_known_models_are_named_in_the_refusal_of_others():
    with pytest.raises(ConfigError) as caught:
        main([*PRESET, *NODES, "--model", "no/such"])
    assert KNOWN_MODELS[0] in caught.value.fix


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_names_every_option(words: list[str], capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "--nnodes" in text and "--nproc-per-node" in text
    shown = {info.alias or name for name, info in PlanOptions.model_fields.items()} - {"run_kind"}
    assert all(f"--{name.replace('_', '-')} " in text for name in shown)
