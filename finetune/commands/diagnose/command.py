"""`python -m finetune diagnose LOG...`: why a run failed, from its logs: causes with evidence and
remedy.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from finetune.commands.diagnose.evidence import LogEvidence
from finetune.commands.diagnose.findings import Finding, FindingByPlace, rank_findings
from finetune.commands.diagnose.log_scan import scan_log
from finetune.commands.diagnose.log_lines import BLOCK_BYTES, LogFile, rank_in_name
from finetune.commands.diagnose.log_prefixes import decode, year_in
from finetune.commands.diagnose.run_evidence import RunFolder
from finetune.commands.diagnose.knowledge import knowledge
from finetune.config.fields import Paths, setting
from finetune.config.options import SpokenOptions, read_options
from finetune.errors import DataError, ExitCode
from finetune.runtime.language import _
from finetune.runtime.terminal import write_filled

__all__ = ["Finding", "FindingByPlace", "diagnose_logs", "main", "render_findings", "restart_cures"]


def restart_cures() -> frozenset[str]:
    """Return the causes that starting the same command again can cure."""
    causes = knowledge().causes
    return frozenset(name for name, cause in causes.items() if cause.restart_cures)


def diagnose_logs(paths: Path | str | Sequence[Path | str]) -> list[Finding]:
    """The causes that logs of one run show, best first, in the spoken language; none where nothing
    failed.

    Args:
        paths: logs of any launcher and rank, in any order, and run folders, or one of them; `-` is
            standard input.

    Raises:
        DataError: a log is not there or cannot be read, or a folder is no run.

    >>> import finetune
    >>> from pathlib import Path
    >>> _ = Path("run.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    >>> for finding in finetune.diagnose("run.log"):
    ...     print(finding.cause, finding.evidence[0][:39])
    device_oom run.log:1: torch.OutOfMemoryError: CUDA
    >>> finetune.diagnose("runs/example")
    []
    """
    return _diagnosed([paths] if isinstance(paths, str | Path) else paths)[0]


def _diagnosed(paths: Sequence[Path | str]) -> tuple[list[Finding], Finding | None]:
    """The findings, and where there are none who stopped the run, or what it got over."""
    folders = [RunFolder(Path(path)) for path in paths if _is_folder(path)]
    files = [path for path in paths if not _is_folder(path)]
    files += [log for folder in folders for log in folder.logs()]
    # Lines that tell no year are of the year that another log of the run tells.
    year = next(filter(None, map(_year_of, files)), None)
    logs = [read_log(path, year) for path in files]
    logs += [folder.evidence() for folder in folders]
    facts = {name: value for folder in folders for name, value in folder.facts().items()}
    return rank_findings(logs, facts)


def _is_folder(path: Path | str) -> bool:
    return str(path) != "-" and Path(path).is_dir()


def _year_of(path: Path | str) -> int | None:
    if not Path(path).is_file():
        return None
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        return year_in(decode(file.read(BLOCK_BYTES)))
    return None


def read_log(path: Path | str, year: int | None = None) -> LogEvidence:
    """What one log tells. Raises DataError where it is not there or cannot be read."""
    if str(path) == "-":
        return scan_log(LogFile("-", sys.stdin.buffer, year=year))
    try:
        with Path(path).open("rb") as file:
            return scan_log(LogFile(str(path), file, rank=rank_in_name(Path(path)), year=year))
    except OSError as error:
        raise DataError(
            f"the log cannot be read: {error.strerror or error}", str(path), "give a log file"
        ) from error


def render_findings(findings: Sequence[Finding], stopped: Finding | None = None) -> str:
    """Findings for people, a block each; without any a sentence, and who stopped the run or what it
    got over.
    """
    if not findings:
        return "\n".join([_("No failure found."), *(_details(stopped) if stopped else ())])
    return "\n\n".join(_render(number, finding) for number, finding in enumerate(findings, 1))


def _render(number: int, finding: Finding) -> str:
    """A finding in lines; `log_evidence` knows their form, and skips them in a log."""
    title = _("{number}. {cause}  (confidence {confidence:.2f})")
    filled = title.format(number=number, cause=finding.cause, confidence=finding.confidence)
    return "\n".join([filled, *_details(finding)])


def _details(finding: Finding) -> list[str]:
    lines = ["   " + _("why: {text}").format(text=finding.explanation)]
    lines.append("   " + _("fix: {text}").format(text=finding.fix))
    lines.extend("   " + _("seen: {text}").format(text=line) for line in finding.evidence)
    if finding.consequences:
        lines.append(
            "   " + _("follows from it: {text}").format(text=", ".join(finding.consequences))
        )
    return lines


class DiagnoseOptions(SpokenOptions):
    """The command line."""

    usage: ClassVar[str] = "python -m finetune diagnose LOG... [--json] [--lang en|zh]"
    summary: ClassVar[str] = (
        "Explain why a run failed, from its logs (all ranks and nodes together) or its run folder."
    )
    epilog: ClassVar[str] = (
        "Exit code: 0 no failure found; 1 findings; 2 wrong usage, or a log that cannot be read."
    )
    positional: ClassVar[tuple[str, ...]] = ("logs",)

    logs: Paths = setting(
        group="options", unit="LOG...", description="Logs, run folders, or - for standard input."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. 0: none; 1: some; 2: wrong usage, or a log that cannot be read."""
    options = read_options(DiagnoseOptions, argv)
    findings, stopped = _diagnosed(options.logs)
    if options.as_json:
        shown: dict[str, object] = {"findings": [asdict(f) for f in findings]}
        name = "interrupted" if stopped and stopped.cause == "interrupted" else "got_over"
        shown |= {name: asdict(stopped)} if stopped else {}
        sys.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    else:
        write_filled(render_findings(findings, stopped))
    return int(ExitCode.FAILED if findings else ExitCode.DONE)
