"""The causes in docs/reference/diagnosis.md, renewed from the rules: `python -m
finetune.commands.diagnose.document FILE`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.commands.diagnose.symptoms.network import UNEQUAL_BATCHES, WAITED_FOR_DATA
from finetune.commands.diagnose.symptoms.places import PLACES
from finetune.commands.diagnose.symptoms.rules import (
    EXPLAINED_BY_RUN,
    RESTART_CURES,
    SYMPTOMS,
    UNEXPLAINED,
)
from finetune.commands.diagnose.symptoms.trainers import BAD_RECORD

_HEADING = "## Causes\n"


def renewed(text: str) -> str:
    """The document with everything from the heading of the causes on made anew."""
    causes: dict[str, list[Symptom]] = {}
    for symptom in (
        *SYMPTOMS,
        WAITED_FOR_DATA,
        UNEQUAL_BATCHES,
        BAD_RECORD,
        *PLACES,
        EXPLAINED_BY_RUN,
        UNEXPLAINED,
    ):
        causes.setdefault(symptom.cause, []).append(symptom)
    sections = [_section(cause, symptoms) for cause, symptoms in causes.items()]
    return text.partition(_HEADING)[0] + "\n".join([_HEADING, _table(causes), *sections])


def _table(causes: dict[str, list[Symptom]]) -> str:
    lines = ["| cause | a restart can cure it | known from |", "|---|---|---|"]
    for cause, symptoms in causes.items():
        sources = dict.fromkeys(symptom.source for symptom in symptoms if symptom.source)
        cure = "yes" if cause in RESTART_CURES else "no"
        lines.append(f"| [{cause}](#{cause}) | {cure} | {'; '.join(sources) or '-'} |")
    return "\n".join(lines) + "\n"


_KIND_WORDS = {
    Kind.MACHINE: "root, said by the machine or the scheduler",
    Kind.ROOT: "root",
    Kind.KILLED: "killed from outside",
    Kind.VAGUE: "says what failed, not why",
    Kind.UNEXPLAINED: "a failure of its own",
    Kind.PEER_LOST: "another process was lost",
    Kind.TIMEOUT: "a timeout",
    Kind.CASCADE: "the end of a process",
}


def _section(cause: str, symptoms: list[Symptom]) -> str:
    lines = [f"### {cause}\n"]
    for symptom in symptoms:
        explanation, fix = map(_open, symptom.texts())
        lines.append(f"{explanation} ({_KIND_WORDS[symptom.kind]}, {symptom.confidence:.2f})\n")
        lines.append(f"**Fix.** {fix}\n")
    return "\n".join(lines)


def _open(template: str) -> str:
    """A template for readers: optional parts shown, placeholders as NAMES."""
    text = template.replace("[[", "").replace("]]", "")
    return (
        re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), text)
        .replace("{{", "{")
        .replace("}}", "}")
    )


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
