"""Completion, as a real bash does it; fish and zsh where they are installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from launching import run_cli

from finetune.__main__ import COMMANDS


@pytest.fixture(scope="module")
def script() -> str:
    return run_cli(["completion", "bash"], module="finetune", check=True).stdout


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last word of a command line."""
    line = f"""{script}
complete -p finetune >/dev/null || exit 1
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}) COMP_CWORD={len(words) - 1}
_finetune
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    result = subprocess.run(["bash", "-uc", line], capture_output=True, text=True, check=True)
    assert not result.stderr
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("", " ".join(COMMANDS)),
        ("pre", "prepare pretrain"),
        ("sft --lora-alp", "--lora-alpha"),
        ("sft --dtype b", "bfloat16"),
        ("chat --lora-alp", ""),
        # these take the flags of a run too
        ("plan --lora-alp", "--lora-alpha"),
        ("plan --devices-p", "--devices-per-node"),
        ("sft --config ds", ""),  # files are left to the shell
    ],
)
def test_what_bash_offers(script: str, words: str, offered: str):
    assert completed(script, "finetune", *words.split(" ")) == offered.split()
    assert "complete -o default" in script


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(shell: str):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    script = run_cli(["completion", shell], module="finetune", check=True).stdout
    subprocess.run([program, "-n", "/dev/stdin"], input=script, text=True, check=True)
