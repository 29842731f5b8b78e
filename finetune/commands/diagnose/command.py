"""`python -m finetune diagnose LOG...`: why a run failed, with evidence and steps."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from finetune.commands.diagnose.evidence import LogEvidence
from finetune.commands.diagnose.findings import Finding, FindingByPlace, rank_findings
from finetune.commands.diagnose.knowledge import SURENESS, knowledge
from finetune.commands.diagnose.log_lines import BLOCK_BYTES, LogFile, rank_in_name
from finetune.commands.diagnose.log_prefixes import decode, year_in
from finetune.commands.diagnose.log_scan import scan_log
from finetune.commands.diagnose.run_evidence import RunFolder
from finetune.config.fields import Paths, setting
from finetune.config.options import SpokenOptions, read_options
from finetune.errors import DataError, ExitCode
from finetune.runtime.language import _, spoken
from finetune.runtime.terminal import write_filled

__all__ = [
    "Finding",
    "FindingByPlace",
    "diagnose_logs",
    "knowledge",
    "main",
    "render_findings",
]


def diagnose_logs(paths: Path | str | Sequence[Path | str]) -> list[Finding]:
    """Return the causes that logs of one run show, best first, in the spoken language.

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
    return _diagnosed([paths] if isinstance(paths, str | Path) else paths).findings


@dataclass(frozen=True)
class _Diagnosis:
    """What logs show.

    Attributes:
        stopped: without findings, who stopped the run, or what it got over.
        lines: that were read.
        of_a_run: they look like the log of a run.
    """

    findings: list[Finding]
    stopped: Finding | None
    lines: int
    of_a_run: bool


def _diagnosed(paths: Sequence[Path | str]) -> _Diagnosis:
    folders = [RunFolder(Path(path)) for path in paths if _is_folder(path)]
    files = list({Path(path).resolve(): path for path in paths if not _is_folder(path)}.values())
    files += [log for folder in folders for log in folder.logs()]
    # Lines that tell no year are of the year that another log of the run tells.
    year = next(filter(None, map(_year_of, files)), None)
    logs = [read_log(path, year) for path in files]
    logs += [folder.evidence() for folder in folders]
    facts = {name: value for folder in folders for name, value in folder.facts().items()}
    findings, stopped = rank_findings(logs, facts)
    of_a_run = bool(folders) or any(log.of_a_run for log in logs)
    return _Diagnosis(findings, stopped, sum(log.lines for log in logs), of_a_run)


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
            rank = rank_in_name(Path(path))
            return scan_log(LogFile(str(path), file, rank=rank, year=year))
    except OSError as error:
        raise DataError(
            f"the log cannot be read: {error.strerror or error}", str(path), "give a log file"
        ) from error


def render_findings(findings: Sequence[Finding]) -> str:
    """Return findings for people, a block each."""
    return "\n\n".join(_render(number, finding) for number, finding in enumerate(findings, 1))


def _render(number: int, finding: Finding) -> str:
    """Return a finding in lines; `line_kinds.toml` knows their form, and skips them in a log."""
    title = _("{number}. {title}  ({sure})").format(
        number=number, title=_title(finding.cause), sure=_sureness(finding.confidence)
    )
    return "\n".join([title, *_details(finding)])


def _title(cause: str) -> str:
    return knowledge().titles[cause][spoken()]


def _sureness(confidence: float) -> str:
    if confidence >= SURENESS["certain"]:
        return _("certain")
    return _("likely") if confidence >= SURENESS["likely"] else _("a guess")


def _details(finding: Finding) -> list[str]:
    lines = ["   " + _("why: {text}").format(text=finding.explanation)]
    lines.append("   " + _("what to do:"))
    steps = enumerate(finding.fix.splitlines(), 1)
    lines.extend(f"     {number}. {step}" for number, step in steps)
    lines.extend("   " + _("seen: {text}").format(text=line) for line in finding.evidence)
    if finding.consequences:
        titles = ", ".join(map(_title, finding.consequences))
        lines.append("   " + _("follows from it: {text}").format(text=titles))
    return lines


def _render_none(diagnosis: _Diagnosis) -> str:
    """Return that no failure was found in what was read, and who stopped the run if anyone did."""
    said = [_("No failure found (lines read: {lines}).").format(lines=diagnosis.lines)]
    if not diagnosis.of_a_run:
        said.append(
            _("They do not look like the log of a run: give the log of the process that failed.")
        )
    space = "" if spoken() == "zh" else " "
    return "\n".join(
        [space.join(said), *(_details(diagnosis.stopped) if diagnosis.stopped else ())]
    )


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
    diagnosis = _diagnosed(options.logs)
    findings, stopped = diagnosis.findings, diagnosis.stopped
    if options.as_json:
        shown: dict[str, object] = {"findings": [asdict(f) for f in findings]}
        name = "interrupted" if stopped and stopped.cause == "interrupted" else "got_over"
        shown |= {name: asdict(stopped)} if stopped else {}
        sys.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    else:
        write_filled(render_findings(findings) if findings else _render_none(diagnosis))
    return int(ExitCode.FAILED if findings else ExitCode.DONE)
