"""`make pretrain-demo`, for a few steps: text, base model, adapter, samples."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from launching import BIN, ROOT, run_command, said
from run_helpers import events, status
from safetensors import safe_open


def test_from_sources_to_answers(tmp_path: Path):
    demo, library = tmp_path / "demo", Path(sysconfig.get_paths()["stdlib"]) / "asyncio"
    words = [BIN / "python", ROOT / "launchers" / "pretrain_demo.py", "--folder", demo]
    words += ["--steps", 3, "--tuning-steps", 2, "--library", library]
    # Without compiling: the commands are the same, a minute less.
    own = {"HF_HOME": str(tmp_path / "hf"), "TORCHDYNAMO_DISABLE": "1"}
    result = run_command([str(word) for word in words], env=own)
    assert result.returncode == 0, said(result)
    for run in (demo / "base", demo / "tuned"):
        assert status(run)["state"] == "done" and events(run, "start")[0]["world_size"] == 2
    assert (demo / "tokens" / "val-00000.bin").is_file()
    with safe_open(demo / "tuned" / "adapter_model.safetensors", "pt") as adapter:
        assert any("lm_head" in name for name in adapter.keys())  # noqa: SIM118 - not a dict
    assert re.search(r"the base model: \d\.\d\d -> \d\.\d\d bits per byte", result.stdout)
    parts = "the base model goes on,validation loss,with the adapter,explain,reasoning,topology"
    assert all(part in result.stdout for part in parts.split(","))
    assert "never trained in this base model" not in said(result)
