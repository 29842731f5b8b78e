"""The READMEs say the same in both languages, and what the documents name exists.

Their commands are run by tests/project/test_pages.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from launching import ROOT
from shell_blocks import blocks, shell_lines

from finetune.__main__ import COMMANDS
from finetune.config.run_config import RunConfig

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES_ON_TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
DOCUMENTS = [
    ENGLISH,
    CHINESE,
    *(ROOT / name for name in PAGES_ON_TOP),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINES = shell_lines(ENGLISH)
# Flags in the documents that are not ours but of torchrun, accelerate launch and other programs.
LAUNCHER_FLAGS = {
    "--standalone",
    "--nproc_per_node",
    "--nnodes",
    "--node_rank",
    "--master_addr",
    "--master_port",
}
LAUNCHER_FLAGS |= {
    "--max-restarts",
    "--local-rank",
    "--config_file",
    "--multi_gpu",
    "--num_processes",
    "--signal",
}
# Of docker, kubectl, sacct, nvidia-smi, systemctl, pip and hf, in the remedies of diagnose; of
# nanochat
LAUNCHER_FLAGS |= {
    "--format",
    "--shm-size",
    "--ipc",
    "--gpus",
    "--gpus-per-node",
    "--local-dir",
    "--build-arg",
}
LAUNCHER_FLAGS |= {"--no-build-isolation", "--no-deps", "--window-pattern"}
LAUNCHER_FLAGS |= {
    "--gpu-reset",
    "--ulimit",
    "--cap-add",
    "--now",
    "--pids-limit",
    "--use-checkpoint-args",
    "--lora-rank",
    "--custom_dataset_info",
    "--no-binary",
    "--pid",
    "--watchdog-timeout",
    "--user",
    "--version",
}
# of other tools
LAUNCHER_FLAGS |= {
    "--dataset",
    "--dataset_name",
    "--model_name_or_path",
    "--use_peft",
    "--rlhf_type",
}
# that these pass on
LAUNCHER_FLAGS |= {"--accelerate_config", "--zero_stage", "--deepspeed_config_file"}
# of vLLM and SGLang
LAUNCHER_FLAGS |= {"--max-model-len", "--mem-fraction-static", "--context-length"}
LAUNCHER_FLAGS |= {"--attention-backend", "--gpu-memory-utilization", "--max-num-seqs"}
LAUNCHER_FLAGS |= {"--cuda-graph-max-bs", "--enforce-eager", "--tensor-parallel-size"}
LAUNCHER_FLAGS |= {"--kv-cache-dtype", "--data-parallel-size-local", "--compilation-config"}
# of Ray, mpirun, DeepSpeed, pip, docker, CANN and Megatron's builds
LAUNCHER_FLAGS |= {"--resources", "--temp-dir", "--allow-run-as-root", "--hostfile", "--upgrade"}
LAUNCHER_FLAGS |= {
    "--index-url",
    "--force-reinstall",
    "--group-add",
    "--net",
    "--cxx_abi",
    "--build",
}
LAUNCHER_FLAGS |= {"--runtime", "--rm"}  # of nvidia-ctk and docker
LAUNCHER_FLAGS |= {"--jobs", "--every"}  # of exhaustive/grid.py
LAUNCHER_FLAGS |= {
    "--machine_rank",
    "--main_process_ip",
    "--main_process_port",
    "--use_deepspeed",
    "--flag",
}


def test_both_languages_show_the_same() -> None:
    assert shell_lines(CHINESE) == LINES
    assert blocks(CHINESE, "python") == blocks(ENGLISH, "python")
    assert blocks(CHINESE, "json") == blocks(ENGLISH, "json")

    def facts(document: Path) -> list[str]:
        """Code spans but for links, headings by rank, and rows of tables by their number."""
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        return sorted(re.findall(r"`([^`]+)`", text)) + re.findall(
            r"^(#+) ", text, flags=re.MULTILINE
        )

    assert facts(CHINESE) == facts(ENGLISH)


def test_the_two_commands_come_first() -> None:
    assert LINES[:2] == ["make demo", "make test"]


def test_the_data_example_is_a_record() -> None:
    from finetune.data.formats import detect_format, to_conversation

    (record,) = map(json.loads, blocks(ENGLISH, "json"))
    assert detect_format(record) == "alpaca"
    assert (
        to_conversation(record, "alpaca", ("explain", "reasoning", "topology")).messages[-1].content
        == "TCP port 179."
    )


def test_the_curriculum_example_is_a_configuration() -> None:
    curriculum, sources = map(
        yaml.safe_load, blocks(ROOT / "docs" / "guides" / "curriculum.md", "yaml")
    )
    settings = {"model": "m", "data": "d", "output_dir": "o", **curriculum}
    assert RunConfig.model_validate(settings).curriculum.levels == ("easy", "hard")
    assert [source.weight for source in RunConfig.model_validate(settings | sources).sources] == [
        3.0,
        1.0,
    ]


@cache
def known_flags() -> frozenset[str]:
    """What the help of every command names."""
    said = io.StringIO()
    for module, _ in COMMANDS.values():
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            import_module(module).main(["--help"])
    ours = re.findall(r"--[a-z][\w-]+", said.getvalue())
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").rglob("*.py")]
    return frozenset(ours + re.findall(r'"(--[a-z][a-z-]+)"', "\n".join(scripts)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_what_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    # In the table of the guides only the right column is ours, and what it refuses it names.
    ours = "\n".join(line.split(" | ")[-1] for line in text.splitlines() if "refused" not in line)
    for name in re.findall(
        r"(?<![\w-])--([a-z][\w-]+)", ours if document.name == "from_the_guides.md" else text
    ):
        assert f"--{name}".replace("_", "-") in known_flags() or f"--{name}" in LAUNCHER_FLAGS, (
            f"--{name}"
        )
    for path in re.findall(
        r"\b(?:tests|docs|ds_configs|accelerate_configs|launchers|data_samples)/[\w/.*-]*\w", text
    ):
        assert list(ROOT.glob(path)), path
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (document.parent / target).exists(), target
    for command in re.findall(r"python -m finetune (\w+)", text):
        assert command in COMMANDS, command
