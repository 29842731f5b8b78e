"""Errors that state what happened, where, and how to fix it.

Policy: wrong input or state raises. What works but is probably wrong warns once, with the fix.
Correct input is silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from finetune.plain_text import mask_passwords, plain_lines


class ExitCode(IntEnum):
    """Exit codes of every command. `status.json` in the run folder has their names."""

    DONE = 0  # finished, or was already finished
    FAILED = 1  # failed while running
    REFUSED = 2  # refused before running; nothing was written
    STOPPED = 3  # stopped by a signal, with a checkpoint saved
    OUT_OF_MEMORY = 4  # a sharded run ran out of device memory; a restart shrinks microbatches


INTERRUPTED = 130  # by Ctrl-C, before or next to a run: the exit code that shells give it


class FinetuneError(Exception):
    """An error with its fix.

    Args:
        what: what is wrong, with the offending value and the rule that it breaks.
        where: the file, line, flag, key or rank; empty if there is none.
        fix: an instruction.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        # Libraries' messages name addresses whole, and a file or a log may hold what a terminal
        # would obey.
        self.what, self.where, self.fix = (
            mask_passwords(plain_lines(str(text))) for text in (what, where, fix)
        )
        super().__init__(self.what, self.where, self.fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class ConfigError(FinetuneError):
    """The configuration is wrong: refused before anything is written."""

    exit_code = ExitCode.REFUSED


class DataError(FinetuneError):
    """The data, tokenizer or chat template is wrong: refused before anything is written."""

    exit_code = ExitCode.REFUSED


class StateError(FinetuneError):
    """The run folder holds something that this run must not touch: refused before anything is
    written.
    """

    exit_code = ExitCode.REFUSED


class Problems(FinetuneError):
    """Several problems, reported together. Use `raise_problems`, which raises a single one as
    itself.
    """

    exit_code = ExitCode.REFUSED

    def __init__(self, problems: Sequence[FinetuneError]) -> None:
        self.problems = list(problems)
        super().__init__(f"{len(self.problems)} problems")
        self.exit_code = max(problem.exit_code for problem in self.problems)

    def __str__(self) -> str:
        return "\n".join(f"{number}. {problem}" for number, problem in enumerate(self.problems, 1))


def raise_problems(problems: Sequence[FinetuneError]) -> None:
    """Raise nothing for no problem, the problem itself for one, `Problems` for several."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)
