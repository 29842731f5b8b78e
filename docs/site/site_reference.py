"""Pages of the reference, made from what the code itself goes by: schemas, events, exit codes,
symptoms, docstrings.
"""

from __future__ import annotations

import inspect
import io
import re
from contextlib import redirect_stdout, suppress
from importlib import import_module

import finetune
from finetune.__main__ import COMMANDS
from finetune.commands.diagnose.document import renewed
from finetune.config.fields import GROUPS, Strict, flag
from finetune.config.options import flags_of
from finetune.config.preference_config import PreferenceConfig
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.run_config import RunConfig
from finetune.errors import ExitCode
from finetune.runs import event_texts
from finetune.runtime.language import speak
from finetune.runtime.launch_environment import import_bitsandbytes
from finetune.storage import run_log

CAUSES = "## Causes\n"
# Of the page about symptoms, whose texts come in Chinese from the package itself.
_CHINESE = {
    "| cause | what it is | a restart can cure it |": "| 原因 | 说明 | 重启能否解决 |",
    " | yes |": " | 能 |",
    " | no |": " | 否 |",
    "(certain;": "（确定；",
    "(likely;": "（很可能；",
    "(guess;": "（猜测；",
}


def reference_pages(language: str) -> dict[str, str]:
    """File name -> Markdown. English but for the symptoms, which the package itself says in both
    languages.
    """
    pages = {
        "settings": _settings(RunConfig, "Settings of fine-tuning", "sft"),
        "settings_preferences": _settings(
            PreferenceConfig, "Settings of training on preferences", "dpo"
        ),
        "settings_pretraining": _settings(PretrainConfig, "Settings of pretraining", "pretrain"),
        "commands": _commands(),
        "events": _events(),
        "exit_codes": _exit_codes(),
        "symptoms": _symptoms(language),
        "python": _python(),
    }
    return {f"reference/{name}.md": text for name, text in pages.items()}


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells
        )
        + "\n"
    )


def _settings(model_class: type[Strict], title: str, kind: str) -> str:
    """A table for each group of the help: every name is also a flag and a key of a run file."""
    required = {name for name, info in model_class.model_fields.items() if info.is_required()}
    text = f"# {title}\n\n"
    text += (
        f"Names are keys of a run file; `python -m finetune {kind}` takes each as a flag, `_`"
        " written as `-`. "
    )
    text += "Where values come from, and which wins: [configuration](configuration.md).\n"
    found = flags_of(model_class)
    for group in GROUPS:
        rows = [
            (
                f"`{one.name}`",
                one.description,
                "required" if one.name in required else f"`{one.default}`",
                one.expected + (f" (`{one.unit}`)" if one.unit else ""),
            )
            for one in found.values()
            if one.group == group
        ]
        if rows:
            text += f"\n## {group}\n\n" + _table(("name", "what it does", "default", "value"), rows)
    if aliases := getattr(model_class, "aliases", {}):
        rows = [(f"`{flag(other)}`", f"`{flag(name)}`") for other, name in sorted(aliases.items())]
        text += "\n## Other spellings\n\n" + _table(("flag", "is"), rows)
    return text


def _commands() -> str:
    """The help of every command, as it is printed."""
    text = "# Commands\n\n`finetune COMMAND` and `python -m finetune COMMAND` are the same.\n"
    for name, (module, what) in COMMANDS.items():
        said = io.StringIO()
        with redirect_stdout(said), suppress(SystemExit):
            import_module(module).main(["--help"])
        text += (
            "\n##"
            f" {name}\n\n{what[0].upper()}{what[1:]}.\n\n```text\n{said.getvalue().rstrip()}\n```\n"
        )
    return text


def _comments(source: str, pattern: str) -> dict[str, str]:
    """What the comments behind lines say: name -> text."""
    return {found[1]: found[2] for found in re.finditer(pattern, source, re.MULTILINE)}


def _events() -> str:
    said = _comments(inspect.getsource(run_log), r'^    "(\w+)",  # (.+)$')
    assert set(said) == set(run_log.EVENTS), "an event without a comment that says what it is"
    rows = [(f"`{name}`", said[name], f"`{event_texts.EVENTS[name]}`") for name in run_log.EVENTS]
    head = (
        "# Events\n\nLines of `events.jsonl` in the [run folder](run_folder.md), where their"
        " fields are listed; "
    )
    head += "[`finetune.follow`](../guides/python.md) gives them to a program as they come.\n\n"
    return head + _table(("event", "what happened", "how it is shown"), rows)


def _exit_codes() -> str:
    said = _comments(inspect.getsource(ExitCode), r"^    (\w+) = \d+  # (.+)$")
    rows = [(str(int(code)), f"`{code.name}`", said[code.name]) for code in ExitCode]
    return "# Exit codes\n\nOf every command.\n\n" + _table(("code", "name", "meaning"), rows)


def _symptoms(language: str) -> str:
    speak(language)
    try:
        causes = renewed(CAUSES).partition(CAUSES)[2]
    finally:
        speak("en")
    heads = {
        "en": (
            "# Symptoms\n\nWhat `diagnose` knows, by cause ([how it finds it](diagnosis.md)).\n"
        ),
        "zh": "# 症状\n\n`diagnose` 所认识的原因（[它如何判断](diagnosis.md)）。\n",
    }
    if language == "zh":
        for words, chinese in _CHINESE.items():
            causes = causes.replace(words, chinese)
    return heads[language] + causes.replace("\n### ", "\n## ")


def _python() -> str:
    """Docstrings of the public names; the settings have pages of their own."""
    text = (
        "# Python\n\n`import finetune` loads none of these; each comes with its first use, and all"
        " have types.\n"
    )
    import_bitsandbytes()  # trainers import peft, which would have it complain
    for name in (
        name for name in finetune.__all__ if name[0] != "_" and not name.endswith("Config")
    ):
        directive = "autoclass" if inspect.isclass(getattr(finetune, name)) else "autofunction"
        text += f"\n## {name}\n\n```{{eval-rst}}\n.. {directive}:: finetune.{name}\n```\n"
    return text
