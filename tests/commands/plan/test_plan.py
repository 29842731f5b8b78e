"""`python -m finetune plan`: its words, numbers and refusals; `--check` on a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import ROOT

import finetune
from finetune.commands.plan.command import main
from finetune.data.corpus.preparation import PrepareSettings, prepare_tokens
from finetune.errors import ConfigError, FinetuneError
from finetune.planning.shapes import KNOWN_MODELS, known_config

FROZEN = ROOT / "tests" / "frozen" / "plan.txt"
PRESET = f"--config {ROOT / 'ds_configs' / 'qwen32b_lora_zero3.json'} --data rows.jsonl"
NODES = "--nodes 2 --devices-per-node 8 --device-name 910B3 --device-memory 64GiB"
HOSTS = "--host-memory 512GiB --host-bandwidth 20GB --network-bandwidth 25GB"


def plan(capsys, words: str, expect: int = 0) -> dict:
    assert main([*words.split(), "--json"]) == expect
    return json.loads(capsys.readouterr().out)


def printed(capsys, words: str, expect: int = 0) -> str:
    assert main(words.split()) == expect
    return capsys.readouterr().out


def config_json(folder: Path, name: str) -> Path:
    """A public model's config.json, alone in a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(known_config(name)))
    return path


def test_flags_alone_describe_a_run(tmp_path, capsys):
    path = config_json(tmp_path, "Qwen/Qwen3-8B")
    found = plan(capsys, f"--model-config {path} {NODES} {HOSTS}")
    assert found["cluster"]["device_type"] == "npu" and found["sharding"] == "none"
    typed = plan(capsys, f"--model Qwen/Qwen3-8B --device-type cuda {NODES} {HOSTS}")
    assert typed["cluster"]["device_type"] == "cuda"
    made = plan(capsys, f"pretrain --depth 12 --device-batch-size 16 {NODES} {HOSTS}")
    assert made["model"]["model_type"] == "nanochat"
    # from Python a dict needs no model either
    machines = {"devices_per_node": 8, "device_name": "910B3", "host_memory": "512GiB"}
    alone = finetune.plan({}, model_config=path, **machines).to_json()
    named = finetune.plan({"model": "Qwen/Qwen3-8B"}, **machines).to_json()
    assert alone["device_bytes"] == named["device_bytes"]
    with pytest.raises(ConfigError, match="model is not set"):
        finetune.plan({}, **machines)
    with pytest.raises(FinetuneError, match="(?s)64 has no unit.*64GiB"):
        finetune.plan({"model": "Qwen/Qwen3-8B"}, devices_per_node=8, device_memory=64)


def test_the_windows_of_token_files_are_counted(tmp_path, capsys):
    rows = [json.dumps({"text": "ab " * n}) + "\n" for n in range(1, 60)]
    (tmp_path / "texts.jsonl").write_text("".join(rows))
    settings = PrepareSettings(300, valid_fraction=0.0)
    prepared = prepare_tokens((str(tmp_path / "texts.jsonl"),), tmp_path / "tokens", settings)
    tokens = prepared.splits["train"][0].tokens
    words = f"pretrain --train-data-path {tmp_path / 'tokens'} --depth 1 --max-seq-len 20"
    words += f" --device-batch-size 1 --total-batch-size 320 {NODES} {HOSTS} --windows"
    frozen = next(line for line in FROZEN.read_text().splitlines() if line.startswith("data: "))
    for kind in ("stream", "document", "best-fit"):
        data = plan(capsys, f"{words} {kind}")["data"]
        size = 21 if kind == "best-fit" else 20  # no token of one is another's
        assert data["tokens"] == tokens and data["window_kind"] == kind
        assert data["windows"] * size + data["cut_tokens"] == tokens - (kind != "best-fit")
        assert data["steps_per_pass"] == data["windows"] / 16
        assert sorted(data) == sorted(frozen.split()[1:])
    text = printed(capsys, f"{words} best-fit --lang en")
    assert f"{data['windows']:,} windows (best-fit)" in text


@pytest.mark.frozen
def test_a_preset_on_two_nodes(capsys):
    found = plan(capsys, f"{PRESET} {NODES} {HOSTS}")
    assert found["fits"] is True and found["data"] is None
    assert found["sharding"] == "ZeRO-3 + offload of optimizer and weights"
    assert found["rows_per_step"] == 8 and found["step"]["tokens"] == 128 * 2048
    assert 0 < found["step"]["shortest_seconds"] <= found["step"]["longest_seconds"]
    fits = {choice["sharding"]: choice["fits"] for choice in found["choices"]}
    assert fits["none"] is False  # 61 GiB of weights and what goes with them
    assert fits["ZeRO-3"] is True
    assert any("sharding ZeRO-3 fits and moves less" in advice for advice in found["advice"])
    lines = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]
    frozen = {name: set(fields.split()) for name, fields in (line.split(": ") for line in lines)}
    for name in ("cluster", "model", "step"):
        assert set(found[name]) == frozen[name]
    assert {field for term in found["terms"] for field in term} == frozen["term"]
    assert {field for choice in found["choices"] for field in choice} == frozen["choice"]
    assert set(found) == frozen["plan"]
    small = plan(capsys, f"{PRESET} --model Qwen/Qwen2.5-7B {NODES} {HOSTS}")
    assert any("LoRA needs no ZeRO-3 here" in advice for advice in small["advice"])


def test_what_does_not_fit_is_said_with_what_would(capsys):
    small = "--devices-per-node 8 --device-name 910B3 --device-memory 64GiB --host-memory 2TiB"
    words = f"{PRESET} --finetuning full --deepspeed none {small}"
    found = plan(capsys, words, expect=1)
    assert found["fits"] is False and found["largest_micro_batch"] == 0
    assert any("does not fit" in advice for advice in found["advice"])
    assert "放不下" in printed(capsys, f"{words} --lang zh", 1)


def test_the_largest_microbatch_fits_and_the_next_does_not(capsys):
    words = f"{PRESET} {NODES} {HOSTS} --gradient-checkpointing"
    largest = plan(capsys, words)["largest_micro_batch"]
    assert largest > 1
    for size, fits in ((largest, True), (largest + 1, False)):
        batch = f"--micro-batch-size {size} --global-batch-size {16 * size}"
        assert plan(capsys, f"{words} {batch}", expect=int(not fits))["fits"] is fits


def test_what_a_preset_was_chosen_for_stands_beside_the_plans_own(capsys):
    words = f"--config {ROOT / 'ds_configs' / 'pretrain_gpu2_balanced.json'} --devices-per-node 2"
    memory = "--device-name A100 --device-memory 80GiB --host-memory 128GiB"
    found = plan(capsys, f"{words} {memory}")
    assert found["guide_memory"] == "20-22 GB" and found["device_bytes"] > 0
    assert found["choices"] == []
    text = printed(capsys, f"{words} --device-name H100 --lang en")
    assert "expected of each device with this preset: 20-22 GB" in text
    assert "each device:" in text and "not judged" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--device-memory lots", "'lots' is not a size"),
        ("--device-memory 0GiB", "is not a size above 0"),
        ("--nodes 0", "nodes is 0"),
        ("--efficiency 1.5", "at most 1"),
        ("--kind rlhf", "no kind of runs named 'rlhf'"),
        ("--model someone/else", KNOWN_MODELS[0]),
        ("--learning-rat 1", "learning"),
    ],
)
def test_wrong_input_is_refused_in_words(words: str, said: str):
    with pytest.raises(FinetuneError) as caught:
        main(f"{PRESET} {NODES} {words}".split())
    assert said in str(caught.value) and "fix:" in str(caught.value)


# ---------------------------------------------------------------- --check


def run_folder(folder: Path, peak_bytes: int) -> Path:
    """What a run of two CPU processes on the bundled model leaves."""
    run = folder / "run"
    run.mkdir()
    config = {"model": str(ROOT / "data_samples" / "tiny-qwen3"), "data": ["rows.jsonl"]}
    config |= {"output_dir": str(run), "cutoff_len": 256, "global_batch_size": 8}
    (run / "run.yaml").write_text(json.dumps(config))
    start = {"event": "start", "world_size": 2, "device_type": "cpu", "dtype": "float32"}
    start |= {"zero_stage": 0, "plan": {"heaviest_row_tokens": 200, "rows_per_rank": [4, 4.0, 4]}}
    end = {"event": "end", "state": "done", "peak_device_bytes": [1, peak_bytes]}
    end["peak_host_bytes"] = [1, peak_bytes]
    (run / "events.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    with open(run / "trainer_log.jsonl", "w") as log:
        for number, speed in enumerate((1.0, 2.0, 50.0, 70.0, 60.0), 1):
            log.write(json.dumps({"step": number, "tokens_per_second": speed}) + "\n")
    return run


@pytest.mark.frozen
def test_a_run_is_compared_with_its_plan(tmp_path, capsys):
    run = run_folder(tmp_path, 10**9)
    main(["--check", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)
    [compared] = found["compared"]
    right = compared["predicted_bytes"]
    assert compared["error"] == pytest.approx(right / 10**9 - 1)
    assert found["tokens_per_second"] == 60.0 and found["efficiency"] is None
    rows = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]
    frozen = dict(row.split(": ") for row in rows)
    assert sorted(found) == sorted(frozen["check"].split())
    assert sorted(compared) == sorted(frozen["compared"].split())
    start, end = (run / "events.jsonl").read_text().splitlines()
    for factor, code in ((1, 0), (1.1, 0), (1.3, 1), (1 / 1.3, 1)):
        measured = {**json.loads(end), "peak_host_bytes": [int(right * factor), 5]}
        (run / "events.jsonl").write_text(f"{start}\n{json.dumps(measured)}\n")
        text = printed(capsys, f"--check {run} --lang en", code)
        assert ("missed" in text) == (code == 1)


def test_a_run_without_figures_is_refused(tmp_path):
    run = run_folder(tmp_path, 10**9)
    events = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text(events[0] + "\n")
    for words, said in (
        ([str(run)], "did not log its peak memory"),
        ([str(tmp_path / "nowhere")], "no run is there"),
        ([str(run), "--cutoff-len", "5"], "takes the run's own settings"),
    ):
        with pytest.raises(FinetuneError, match=said):
            main(["--check", *words])
