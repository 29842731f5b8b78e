"""`make pretrain-demo`, for a few steps: text, base model, adapter, samples."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from launching import BIN, ROOT, run_command, said
from run_helpers import events, status
from safetensors import safe_open


def test_from_sources_to_answers(tmp_path: Path):
    words = [BIN / "python", ROOT / "launchers" / "pretrain_demo.py", "--folder", tmp_path / "demo"]
    words += [
        "--steps",
        3,
        "--tuning-steps",
        2,
        "--library",
        Path(sysconfig.get_paths()["stdlib"]) / "asyncio",
    ]
    # Without compiling: the commands are the same, a minute less.
    own = {"HF_HOME": str(tmp_path / "hf"), "TORCHDYNAMO_DISABLE": "1"}
    result = run_command([str(word) for word in words], env=own)
    assert result.returncode == 0, said(result)
    base, tuned = tmp_path / "demo" / "base", tmp_path / "demo" / "tuned"
    assert status(base)["state"] == status(tuned)["state"] == "done"
    assert [events(run, "start")[0]["world_size"] for run in (base, tuned)] == [2, 2]
    assert (tmp_path / "demo" / "tokens" / "val-00000.bin").is_file()
    with safe_open(tuned / "adapter_model.safetensors", "pt") as adapter:
        assert any("lm_head" in name for name in adapter.keys())  # noqa: SIM118 - not a dict
    assert re.search(r"the base model: \d\.\d\d -> \d\.\d\d bits per byte", result.stdout)
    for part in (
        "the base model goes on",
        "validation loss",
        "with the adapter",
        "explain",
        "reasoning",
        "topology",
    ):
        assert part in result.stdout
    assert "never trained in this base model" not in said(result)
