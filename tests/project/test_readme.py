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
DOCUMENTS = [ENGLISH, CHINESE, *(ROOT / name for name in PAGES_ON_TOP)]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
LINES = shell_lines(ENGLISH)
# Flags in the documents that are not ours.
LAUNCHER_FLAGS = (
    # of torchrun, accelerate launch and Slurm
    " --standalone --nproc_per_node --nnodes --node_rank --master_addr --master_port --max-restarts"
    " --local-rank --config_file --multi_gpu --num_processes --signal --machine_rank --flag"
    " --main_process_ip --main_process_port --use_deepspeed"
    # of docker, kubectl, sacct, nvidia-smi, systemctl, pip and hf, in the remedies of diagnose; of
    # nanochat
    " --format --shm-size --ipc --gpus --gpus-per-node --local-dir --build-arg --no-build-isolation"
    " --no-deps --window-pattern --gpu-reset --ulimit --cap-add --now --pids-limit --lora-rank"
    " --use-checkpoint-args --custom_dataset_info --no-binary --pid --watchdog-timeout --user"
    " --version"
    # of other tools, and what these pass on
    " --dataset --dataset_name --model_name_or_path --use_peft --rlhf_type --accelerate_config"
    " --zero_stage --deepspeed_config_file"
    # of vLLM and SGLang
    " --max-model-len --mem-fraction-static --context-length --attention-backend --max-num-seqs"
    " --gpu-memory-utilization --cuda-graph-max-bs --enforce-eager --tensor-parallel-size"
    " --kv-cache-dtype --data-parallel-size-local --compilation-config"
    # of Ray, mpirun, DeepSpeed, pip, docker, CANN and Megatron's builds
    " --resources --temp-dir --allow-run-as-root --hostfile --upgrade --index-url --force-reinstall"
    " --group-add --net --cxx_abi --build --runtime --rm"
    # of exhaustive/grid.py
    " --jobs --every"
)


def test_both_languages_show_the_same() -> None:
    assert shell_lines(CHINESE) == LINES
    for language in ("python", "json"):
        assert blocks(CHINESE, language) == blocks(ENGLISH, language)

    def facts(document: Path) -> list[str]:
        """Code spans, and headings by rank."""
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        headings = re.findall(r"^(#+) ", text, flags=re.MULTILINE)
        return sorted(re.findall(r"`([^`]+)`", text)) + headings

    assert facts(CHINESE) == facts(ENGLISH)
    assert LINES[:2] == ["make demo", "make test"]


def test_the_examples_of_data_and_curriculum_can_be_used() -> None:
    from finetune.data.formats import detect_format, to_conversation

    (record,) = map(json.loads, blocks(ENGLISH, "json"))
    assert detect_format(record) == "alpaca"
    levels = ("explain", "reasoning", "topology")
    assert to_conversation(record, "alpaca", levels).messages[-1].content == "TCP port 179."
    texts = blocks(ROOT / "docs" / "guides" / "curriculum.md", "yaml")
    curriculum, sources = map(yaml.safe_load, texts)
    settings = {"model": "m", "data": "d", "output_dir": "o", **curriculum}
    assert RunConfig.model_validate(settings).curriculum.levels == ("easy", "hard")
    assert len(RunConfig.model_validate(settings | sources).sources) == 2


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
    named = ours if document.name == "from_the_guides.md" else text
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", named):
        assert flag.replace("_", "-") in known_flags() or flag in LAUNCHER_FLAGS.split(), flag
    folders = "tests|docs|ds_configs|accelerate_configs|launchers|data_samples"
    for path in re.findall(rf"\b(?:{folders})/[\w/.*-]*\w", text):
        assert list(ROOT.glob(path)), path
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (document.parent / target).exists(), target
    for command in re.findall(r"python -m finetune (\w+)", text):
        assert command in COMMANDS, command
