"""The conversations that are replayed: single records, with a system turn, and several joined."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.commands.verify.evidence import Prompt
from finetune.config.fields import DataSource, as_sources
from finetune.data.encoding.spans import ChatTemplate
from finetune.data.formats import Conversation, Message
from finetune.data.reading.files import expand_sources
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError
from finetune.inference.loading import Source, find_run

SYSTEM = "You answer questions about computer networks. 用提问的语言回答。"
# Some templates and engines strip contents.
OUTER_SPACE = "  {}\n"
MAX_RECORDS = 10_000  # that are read


def validation_files(source: Source) -> list[str]:
    """Return the validation data of the run that made a model, as far as it is on this machine.

    Raises:
        DataError: there is none.
    """
    run = find_run(source.adapter or Path(source.base))
    entries = (
        (run.settings.get("valid_data") or run.settings.get("data") or [])
        if run is not None
        else []
    )
    paths = [entry if isinstance(entry, str) else entry["path"] for entry in entries]
    found = [path for path in paths if Path(path).is_file()]
    if not found:
        raise DataError(
            "no validation data of the model's run is here",
            "--data",
            "name a file with records: --data FILE",
        )
    return found


def choose(
    files: Sequence[str], template: ChatTemplate, count: int, max_tokens: int | None = None
) -> list[Prompt]:
    """Conversations of all forms that the template takes, the same ones every time; each with its
    rendering.

    Args:
        max_tokens: of a prompt; a conversation that is longer is taken in a simpler form, or left
            out.

    Raises:
        DataError: the data cannot be read, or no record of it makes a prompt.
    """
    records = _records(as_sources(list(files)))
    step = max(1, len(records) // max(1, count))
    spread = (records[::step] + records)[: max(count, 4)]
    prompts: list[Prompt] = []
    for number in range(count):
        for turns in _forms(spread, number):
            try:
                text = template.render(turns, generation_prompt=True)
            except RecordProblem:  # no system turn, say: the next form
                continue
            ids = tuple(template.tokenizer(text, add_special_tokens=False)["input_ids"])
            if max_tokens is not None and len(ids) > max_tokens:
                continue
            messages = [{"role": turn.role, "content": turn.content} for turn in turns]
            if ids not in [prompt.ids for prompt in prompts]:
                prompts.append(Prompt(messages, text, ids))
            break
    if not prompts:
        raise DataError(
            "the chat template takes none of the records, or all are longer than the context",
            ", ".join(files),
            "name other data with --data, or raise --context-tokens",
        )
    return prompts


def _records(sources: Sequence[DataSource]) -> list[list[Message]]:
    """Turns of the records that are plain conversations without tools, each ending with its
    answer.
    """
    found = []
    for file in expand_sources(sources):
        for _, _, conversation in RecordReader(source=file.source).file(file.path):
            if isinstance(conversation, Conversation) and _is_plain(conversation):
                found.append(list(conversation.messages))
            if len(found) >= MAX_RECORDS:
                break
    if not found:
        raise DataError(
            "no record is a conversation",
            ", ".join(source.path for source in sources),
            "name other data with --data",
        )
    return found


def _is_plain(conversation: Conversation) -> bool:
    with_tools = any(turn.role == "tool" or turn.calls for turn in conversation.messages)
    return conversation.plain_text is None and not conversation.tools and not with_tools


def _forms(records: Sequence[list[Message]], number: int) -> list[list[Message]]:
    """Return the turns before the answer that prompt `number` requests, in the requested form and
    in simpler ones.
    """
    plain = [[turn for turn in record if turn.role != "system"] for record in records]
    alone = plain[number % len(plain)][:-1]
    before = [
        *plain[(number + 1) % len(plain)],
        *(plain[(number + 2) % len(plain)] if number % 8 == 7 else []),
    ]
    system = Message("system", SYSTEM)
    spaced = [*alone[:-1], Message(alone[-1].role, OUTER_SPACE.format(alone[-1].content))]
    forms = {
        0: [records[number % len(records)][:-1]],
        1: [[*before, *alone]],
        2: [[system, *alone]],
        3: [[system, *before, *alone], [*before, *alone]],
    }[number % 4]
    return ([spaced] if number % 8 == 4 else []) + [*forms, alone]
