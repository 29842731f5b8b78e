"""docs/diagnosis.md, made from the rules: `python -m finetune.commands.diagnose.document > docs/diagnosis.md`."""

from __future__ import annotations

import re
import sys

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.commands.diagnose.symptoms.rules import EXPLAINED_BY_RUN, RESTART_CURES, SYMPTOMS, UNEXPLAINED

_INTRODUCTION = """\
# Why a run failed

```
python -m finetune diagnose LOG...               # logs of any launcher, all ranks and nodes together
python -m finetune diagnose runs/a               # a run folder: its logs, status.json, events.jsonl, oom.json
python -m finetune diagnose --json train.log     # for machines
python -m finetune diagnose --lang zh train.log  # English or Chinese; otherwise by the locale
```

Exit code: 0 no failure was found, 1 findings, 2 wrong usage or a log that cannot be read. `-` reads standard input.

```
{"findings": [{"cause": "device_oom", "confidence": 0.95, "evidence": ["train.log:812 (rank 3): ..."],
               "explanation": "...", "fix": "...", "rank": 3, "consequences": ["collective_timeout"]}]}
```

Best first. Give it the logs of **all** ranks and nodes at once: when one process dies, the others time out minutes
later, and why it died is in its own log only. Lines are put in order by their times (as they stand: clocks of nodes
should agree within 10 s, offsets from UTC are not looked at), by line number where there are none.

How the root is told from what follows from it:

- Each symptom is a root, a lost peer, a wait that ran out, or the mere end of a process. A nearer kind that came no
  later, on any rank, explains a farther one away; the explained ones are named under `consequences`.
- An exception that no rule knows, in a process that did not wait for another, is a root as well: `unknown`.
- torchrun's "Root Cause (first observed failure)" is one line among others: it has been seen to name the wrong rank.
- Advice that is the same in every log (CANN's `Possible Cause:` and `Solution:`, our own `fix:`) and quoted source
  code are not matched.
- Lines that call themselves a warning or information do not count, but for the few rules whose cause comes that way.
- What a run got over is no failure: an error after which it logged three more steps, or said that it was done. After
  a restart by the launcher only what came since counts, unless that is a mere wait.

Tokens, keys and passwords in evidence lines are replaced by `***`. A log of any size is read in bounded memory; a line
longer than 20 KiB is looked at at its beginning and its end.

What is not seen: a hang whose log simply stops, anything that was only printed on a screen, and faults of the machine
that left no line (see `dmesg`). A cause is a reading of words: look at the evidence line before acting on it.
"""


def describe_rules() -> str:
    """The whole document, in Markdown."""
    causes: dict[str, list[Symptom]] = {}
    for symptom in (*SYMPTOMS, EXPLAINED_BY_RUN, UNEXPLAINED):
        causes.setdefault(symptom.cause, []).append(symptom)
    parts = [_INTRODUCTION, "## Causes\n", _table(causes)]
    parts.extend(_section(cause, symptoms) for cause, symptoms in causes.items())
    return "\n".join(parts)


def _table(causes: dict[str, list[Symptom]]) -> str:
    lines = ["| cause | a restart can cure it | known from |", "|---|---|---|"]
    for cause, symptoms in causes.items():
        sources = dict.fromkeys(symptom.source for symptom in symptoms if symptom.source)
        cure = "yes" if cause in RESTART_CURES else "no"
        lines.append(f"| [{cause}](#{cause}) | {cure} | {'; '.join(sources) or '-'} |")
    return "\n".join(lines) + "\n"


_KIND_WORDS = {
    Kind.ROOT: "root",
    Kind.UNEXPLAINED: "a failure of its own",
    Kind.PEER_LOST: "another process was lost",
    Kind.TIMEOUT: "a wait ran out",
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
    return re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), text).replace("{{", "{").replace("}}", "}")


if __name__ == "__main__":
    sys.stdout.write(describe_rules())
