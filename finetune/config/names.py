"""Names that people type: the nearest known one for a slip, and what replaces the names that other
packages use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from finetune.errors import ConfigError


def normal(name: str) -> str:
    """`--Learning-Rate`, `learning-rate` and `learning_rate` are one name."""
    return name.lstrip("-").replace("-", "_").lower()


def flag(name: str) -> str:
    """The flag of a field: `--learning-rate`."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most probably is a slip of, None where there is none near.

    A name that begins or ends with what was typed (`zero` for `zero_optimization`) counts as near.
    """
    by_normal = {normal(candidate): candidate for candidate in known}
    typed = normal(name)
    close = get_close_matches(typed, by_normal, n=1, cutoff=0.6)
    if not close and len(typed) >= 3:
        close = [
            candidate
            for candidate in by_normal
            if candidate.startswith(typed) or candidate.endswith(typed)
        ][:1]
    return by_normal[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` to end a message with, or nothing where no known name is near."""
    guess = nearest(name, known)
    return f"; did you mean {guess!r}?" if guess else ""


_ELSEWHERE = json.loads(Path(__file__).with_name("names_elsewhere.json").read_text("utf-8"))
# Name in transformers, LLaMA-Factory, nanochat and training scripts in use -> our name for it.
FOREIGN: dict[str, str] = {
    name: ours for ours, names in _ELSEWHERE["same"].items() for name in names.split()
}
# Name -> (why it is not a setting here, what to do instead).
OTHERWISE: dict[str, tuple[str, str]] = {
    name: (entry["why"], entry["fix"])
    for entry in _ELSEWHERE["otherwise"]
    for name in entry["names"].split()
}


class UnknownName(ConfigError):
    """A name that is not a setting; `guess` is the setting that was probably meant, None where
    nobody can tell.
    """

    def __init__(self, what: str, where: str, fix: str, guess: str | None = None) -> None:
        super().__init__(what, where, fix)
        self.guess = guess


def unknown_name(name: str, where: str, known: Iterable[str], *, flags: bool) -> UnknownName:
    """The error for a name that is not a setting: what replaces it, or the nearest that is one.

    Args:
        known: names of the settings that exist there.
        flags: whether to write names as flags in the remedy.
    """
    known, typed = list(known), normal(name)
    kind, shown = ("flag", flag) if flags else ("setting", str)
    if FOREIGN.get(typed) in known:
        ours = FOREIGN[typed]
        return UnknownName(
            f"{name} is called {shown(ours)} here", where, f"write {shown(ours)}", ours
        )
    why, fix = OTHERWISE.get(typed, ("", ""))
    if (typed == "quantization" or "--quantization" in fix) and "quantization" not in known:
        what = (
            f"{name} is not a {kind} here: only fine-tuning trains an adapter on a base in few bits"
        )
        return UnknownName(what, where, "remove it; finetune.sft has --quantization nf4 and int8")
    if typed in OTHERWISE:
        return UnknownName(f"{name} is not a {kind} here: {why}", where, fix)
    if typed.startswith("no_") and typed[3:] in known:
        return UnknownName(
            f"unknown {kind} {name}", where, f"write {shown(typed[3:])} false", typed[3:]
        )
    guess = nearest(name, known)
    fix = f"did you mean {shown(guess)}?" if guess else "see --help for the names"
    return UnknownName(f"unknown {kind} {name}", where, fix, guess)
