"""The causes in docs/reference/diagnosis.md, made from the entries.

`python -m finetune.commands.diagnose.document FILE` renews them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.diagnose.knowledge import Symptom, knowledge
from finetune.runtime.language import spoken

_HEADING = "## Causes\n"


def renewed(text: str) -> str:
    """Return the document with everything from the heading of the causes on made anew."""
    entries: dict[str, list[Symptom]] = {}
    for entry in knowledge().symptoms:
        entries.setdefault(entry.cause, []).append(entry)
    causes = [cause for cause in knowledge().titles if cause != "interrupted"]
    sections = [_section(cause, entries[cause]) for cause in causes]
    return text.partition(_HEADING)[0] + "\n".join([_HEADING, _table(causes), *sections])


def _table(causes: Sequence[str]) -> str:
    lines = ["| cause | what it is | a restart can cure it |", "|---|---|---|"]
    for name in causes:
        cures = "yes" if name in knowledge().restart_cures else "no"
        lines.append(f"| [{name}](#{name}) | {knowledge().titles[name][spoken()]} | {cures} |")
    return "\n".join(lines) + "\n"


def _section(cause: str, entries: Sequence[Symptom]) -> str:
    lines = [f"### {cause}\n", f"{knowledge().titles[cause][spoken()]}.\n"]
    for entry in entries:
        why, do = entry.texts()
        lines.append(f"- {_open(why)} ({entry.sure}; {entry.source})")
        lines += [f"  {number}. {_open(step)}" for number, step in enumerate(do, 1)]
    return "\n".join(lines) + "\n"


def _open(template: str) -> str:
    """Return a template for readers: optional parts shown, placeholders as NAMES."""
    text = template.replace("[[", "").replace("]]", "")
    text = re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), text)
    return text.replace("{{", "{").replace("}}", "}").strip()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
