from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.commands.diagnose.command import diagnose_logs
from finetune.commands.diagnose.findings import Finding


@pytest.fixture
def diagnose(tmp_path: Path) -> Callable[..., list[Finding]]:
    """What texts show, each the log of a process of one run."""

    def found(*texts: str) -> list[Finding]:
        logs = [tmp_path / f"log-{number}.log" for number in range(len(texts))]
        for log, text in zip(logs, texts, strict=True):
            log.write_text(text, encoding="utf-8")
        return diagnose_logs(logs)

    return found


@pytest.fixture
def causes(diagnose: Callable[..., list[Finding]]) -> Callable[..., list[str]]:
    return lambda *texts: [finding.cause for finding in diagnose(*texts)]
