"""`python -m finetune diagnose LOG...`: why a run failed, from its logs: causes with evidence and remedy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from finetune.commands.diagnose.findings import Finding, rank_findings
from finetune.commands.diagnose.log_evidence import LogEvidence, LogScan
from finetune.commands.diagnose.log_reading import LogFile, rank_in_name
from finetune.commands.diagnose.run_evidence import RunFolder
from finetune.commands.diagnose.symptoms.rules import RESTART_CURES
from finetune.errors import DataError, ExitCode
from finetune.runtime.language import Language, pick_language

__all__ = ["RESTART_CURES", "Finding", "diagnose_logs", "main", "render_findings"]


def diagnose_logs(paths: Sequence[Path | str], language: Language) -> list[Finding]:
    """The causes that logs of one run show, best first; none where nothing failed.

    Args:
        paths: logs of any launcher and rank, in any order, and run folders; `-` is standard input.

    Raises:
        DataError: a log is not there or cannot be read, or a folder is no run.
    """
    logs: list[LogEvidence] = []
    facts: dict[str, str] = {}
    for path in paths:
        if str(path) != "-" and Path(path).is_dir():
            folder = RunFolder(Path(path))
            logs.extend(read_log(log) for log in folder.logs())
            logs.append(folder.evidence())
            facts |= folder.facts()
        else:
            logs.append(read_log(path))
    return rank_findings(logs, language, facts)


def read_log(path: Path | str) -> LogEvidence:
    """What one log tells. Raises DataError where it is not there or cannot be read."""
    if str(path) == "-":
        return LogScan().read(LogFile("-", sys.stdin.buffer))
    try:
        with Path(path).open("rb") as file:
            return LogScan().read(LogFile(str(path), file, rank=rank_in_name(Path(path))))
    except OSError as error:
        raise DataError(f"the log cannot be read: {error.strerror or error}", str(path), "give a log file") from error


def render_findings(findings: Sequence[Finding], language: Language) -> str:
    """Findings for people, a block each; a sentence where there are none."""
    if not findings:
        return {"en": "No failure found.", "zh": "没有发现失败。"}[language]
    return "\n\n".join(_render(number, finding, language) for number, finding in enumerate(findings, 1))


_WORDS = {
    "en": {"sure": "confidence", "why": "why", "fix": "fix", "seen": "seen", "after": "follows from it"},
    "zh": {"sure": "置信度", "why": "原因", "fix": "解决", "seen": "证据", "after": "由此引起"},
}


def _render(number: int, finding: Finding, language: Language) -> str:
    words = _WORDS[language]
    lines = [f"{number}. {finding.cause}  ({words['sure']} {finding.confidence:.2f})"]
    lines.append(f"   {words['why']}: {finding.explanation}")
    lines.append(f"   {words['fix']}: {finding.fix}")
    lines.extend(f"   {words['seen']}: {line}" for line in finding.evidence)
    if finding.consequences:
        lines.append(f"   {words['after']}: {', '.join(finding.consequences)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. 0: none; 1: some; 2: wrong usage, or a log that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune diagnose",
        description="Say why a run failed, from its logs (of all ranks and nodes together) or from its run folder.",
        epilog="Exit code: 0 no failure found; 1 findings; 2 wrong usage, or a log that cannot be read.",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log files, run folders, or - for standard input")
    parser.add_argument("--json", action="store_true", help='one JSON object, {"findings": [...]}, best first')
    parser.add_argument("--lang", choices=("en", "zh"), help="language; otherwise the locale's")
    options = parser.parse_args(argv)
    language = pick_language(options.lang)
    findings = diagnose_logs(options.logs, language)
    if options.json:
        sys.stdout.write(json.dumps({"findings": [asdict(f) for f in findings]}, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(render_findings(findings, language) + "\n")
    return int(ExitCode.FAILED if findings else ExitCode.DONE)
