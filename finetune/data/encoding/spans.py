"""Find the trained text in a rendered conversation: by rendering, never by guessing at a template.

The rule: *what follows the generation prompt is trained, up to and with the end-of-turn token*,
because that is what the model must write when it answers. A template may add its own text at the
start of an answer (Qwen3's empty think block in the last turn). That text is trained too, because
at inference the same template's prompt ends before it.

1. Prefix rendering. With P = render(messages before the answer, generation prompt) and A =
   render(messages up to the answer), the trained text is A minus P. This requires that P begins
   both A and the whole rendering, and that the rest of A follows in the whole rendering too.
2. Otherwise the answer is rendered between two marks that occur nowhere else. If removing the marks
   gives the plain rendering, they show where the answer is (Qwen3: earlier answers of a
   conversation, whose think block is left out).
3. Otherwise each answer becomes a separate sample that ends with it, where 1 or 2 finds it. (Qwen3:
   an answer with reasoning, which the template keeps in the last turn only.)
4. Otherwise the record is reported as a problem.

An answer ends with its end-of-turn token. Some templates write none after the last turn, but begin
the next turn with a token at which the model stops (GLM-4.5: `<|user|>`, or `<|observation|>` after
a call). Then that token is trained as the end.

The newline that many templates write after the end-of-turn token is not trained: generation has
stopped before it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from finetune.data.formats import Message
from finetune.data.report import RecordProblem, first_line
from finetune.data.tools import Tools, arguments_text, squeezed, written_out

# Templates that print today's date would give other tokens tomorrow, and two nodes could disagree
# at midnight. Theirs is this date instead (the one that Llama 3.1's own template falls back to).
_PINNED_DATE = {
    "%Y": "2024",
    "%m": "07",
    "%d": "26",
    "%B": "July",
    "%b": "Jul",
    "%A": "Friday",
    "%a": "Fri",
}
_PINNED_CLOCK = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f"|replace('{code}','{text}')" for code, text in _PINNED_DATE.items())
    + " }}{%- endmacro -%}"
)

_LONGEST_OPENING = 64  # characters of an answer that a generation prompt may have written already


@dataclass(frozen=True)
class Turn:
    """One trained answer in a rendering: characters `start` to `end`."""

    start: int
    end: int  # one past its last character, the end-of-turn token included
    # whether it ends with a special token of the tokenizer, so that the model learns to stop
    ends: bool
    # whether the generation prompt that inference uses comes right before `start`
    follows_prompt: bool = True


@dataclass(frozen=True)
class Rendering:
    """A conversation as text, with the messages it was made of and its trained turns in order."""

    text: str
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]


def model_stop_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Tokens of the model's generation_config.json at which it stops; set by `load_tokenizer`."""
    return tuple(getattr(tokenizer, "model_stop_tokens", ()))


class ChatTemplate:
    """A tokenizer's chat template as a function from messages to text."""

    tools: Tools = ()  # that may be called in the conversation that is rendered

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        source = tokenizer.get_chat_template()
        self.source = _PINNED_CLOCK + source if "strftime_now" in source else source
        flagged = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials = flagged | {str(token) for token in tokenizer.all_special_tokens}
        self.specials = tuple(
            sorted((token for token in specials if token.strip()), key=len, reverse=True)
        )
        self._special = re.compile("|".join(map(re.escape, self.specials)) or r"(?!)")
        # at which the model stops by its own settings
        self.stop_tokens = tuple(
            token for token in map(str, model_stop_tokens(tokenizer)) if token in self.specials
        )
        self._takes_parts = False
        if not self._writes_content():
            # Templates of processors (Idefics 3, LLaVA-NeXT) loop over the parts of a content.
            self._takes_parts = True
            self._takes_parts = self._writes_content()

    def _writes_content(self) -> bool:
        """Return whether a question comes out in the form that contents are given in."""
        probe = "a7f3 probe"
        try:
            text = self._render([Message("user", probe)], False, text_arguments=False)
        except RecordProblem:
            return False
        return probe in text and f"'text': '{probe}" not in text  # as Python writes a part

    def with_tools(self, tools: Tools) -> ChatTemplate:
        """Return the same template for a conversation in which these tools may be called."""
        if not tools and not self.tools:
            return self
        bound = copy.copy(self)
        bound.tools = tools
        return bound

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Render these messages.

        Arguments of calls are given as objects, which is transformers' convention. A template that
        joins them to a text (DeepSeek-V3), or would write Python's form of them, gets them as JSON.

        Raises:
            RecordProblem: the template refuses them or fails on them.
        """
        arguments = [dict(call.arguments) for message in messages for call in message.calls]
        try:
            text = self._render(messages, generation_prompt, text_arguments=False)
        except RecordProblem as problem:
            if not arguments:
                raise
            with contextlib.suppress(RecordProblem):
                return self._render(messages, generation_prompt, text_arguments=True)
            raise problem  # what is wrong with objects is the reason to report
        if any(given and str(given) in text for given in arguments):
            # A template that takes objects only wrote that text of the record itself.
            with contextlib.suppress(RecordProblem):
                with_texts = self._render(messages, generation_prompt, text_arguments=True)
                if all(arguments_text(given) in with_texts for given in arguments):
                    return with_texts
        return text

    def _render(
        self, messages: Sequence[Message], generation_prompt: bool, *, text_arguments: bool
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [self._for_template(message, text_arguments) for message in messages],
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                tools=[dict(tool) for tool in self.tools] or None,
            )
            return str(text)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RecordProblem("refused by the chat template", first_line(error)[:200]) from error

    def _for_template(self, message: Message, text_arguments: bool) -> dict[str, Any]:
        """Return a message as transformers' chat templates read it."""
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if self._takes_parts:
            turn["content"] = [{"type": "text", "text": message.content}]
        if message.reasoning:
            # Most templates read the first name, gpt-oss's own the second.
            turn["reasoning_content"] = turn["thinking"] = message.reasoning
        if message.calls:
            turn["tool_calls"] = [
                call.for_template(as_text=text_arguments) for call in message.calls
            ]
        if message.call_id:
            turn["tool_call_id"] = message.call_id
        if message.name:
            turn["name"] = message.name
        return turn

    def has_special(self, text: str) -> bool:
        """Return whether the text spells one of the tokenizer's special tokens."""
        return self._special.search(text) is not None

    def begins_with_special(self, text: str) -> bool:
        return text.startswith(self.specials)

    def ends_with_special(self, text: str) -> bool:
        return text.endswith(self.specials)

    def stops(self, text: str) -> Iterator[int]:
        """Yield where a trained text may end, longest first: without white space, then without each
        special token.
        """
        stop = len(text.rstrip())
        while True:
            yield stop
            token = next((token for token in self.specials if text.endswith(token, 0, stop)), None)
            if token is None:
                return
            stop = len(text[: stop - len(token)].rstrip())


def find_turns(template: ChatTemplate, messages: Sequence[Message]) -> list[Rendering]:
    """Render a conversation and find its trained turns; one rendering, or one per answer (see the
    module's text).

    Raises:
        RecordProblem: the template refuses the record, or writes its answers so that they cannot be
            found for certain.
    """
    messages = tuple(messages)
    answers = [
        number
        for number, message in enumerate(messages)
        if message.role == "assistant" and message.trained
    ]
    text = template.render(messages)
    _check_tools(template, messages)
    turns = [_find(template, text, messages, answer) for answer in answers]
    found = tuple(turn for turn in turns if turn is not None)
    in_order = all(before.end <= after.start for before, after in itertools.pairwise(found))
    if len(found) == len(answers) and in_order:
        return [_with_stop_token(template, Rendering(text, messages, found))]
    return [_alone(template, messages[: answer + 1]) for answer in answers]


def _check_tools(template: ChatTemplate, messages: tuple[Message, ...]) -> None:
    """Refuse a template that leaves tools, calls or results out: answers would refer to what is
    missing.
    """
    names = [str(tool["function"]["name"]) for tool in template.tools]
    if names:
        prompt = tuple(itertools.takewhile(lambda turn: turn.role != "assistant", messages))
        with_tools = template.render(prompt)
        without = template.with_tools(()).render(prompt)
        if any(with_tools.count(name) <= without.count(name) for name in names):
            raise RecordProblem(
                "tools left out by the chat template",
                "it does not write the 'tools' of a record; use one that does",
            )
    for number, message in enumerate(messages):
        if not message.calls:
            continue
        before = template.render(messages[:number])
        after = template.render(messages[: number + 1])
        written = squeezed(after[len(os.path.commonprefix([before, after])) :])
        if not all(written_out(call, written) for call in message.calls):
            raise RecordProblem(
                "calls left out by the chat template",
                f"it does not write the 'tool_calls' of turn {number + 1}; use one that does",
            )


def _alone(template: ChatTemplate, messages: tuple[Message, ...]) -> Rendering:
    """Step 3. Render a conversation that ends with a trained answer, and find that answer alone."""
    text = template.render(messages)
    turn = _find(template, text, messages, len(messages) - 1)
    if turn is None:
        raise RecordProblem(
            "answer not found in the chat template's text",
            f"the template rewrites or leaves out part of the answer in turn {len(messages)}"
            " (reasoning between <think> and </think>, for instance); use --template with one that"
            " keeps it",
        )
    return _with_stop_token(template, Rendering(text, messages, (turn,)))


def _with_stop_token(template: ChatTemplate, rendering: Rendering) -> Rendering:
    """Append the token at which the model stops, if the template writes no end of the last turn.

    It is the token that begins the next turn: of the user, or of a tool if there are calls.
    """
    *turns, last = rendering.turns
    messages = rendering.messages
    if last.ends or rendering.text[last.end :].strip() or messages[-1].role != "assistant":
        return rendering
    following = [Message("user", "q")]
    if messages[-1].calls:
        following = [
            Message("tool", "r", call_id=call.id, name=call.name) for call in messages[-1].calls
        ]
    try:
        text = template.render([*messages, *following])
    except RecordProblem:
        return rendering
    for token in template.stop_tokens:
        if text.startswith(token, last.end):
            ended = dataclasses.replace(last, end=last.end + len(token), ends=True)
            return Rendering(rendering.text[: last.end] + token, messages, (*turns, ended))
    return rendering


def _find(
    template: ChatTemplate, text: str, messages: tuple[Message, ...], answer: int
) -> Turn | None:
    """Find one answer by step 1 or 2; None if it is not certain.

    Args:
        text: the rendering of all messages.
        answer: number of the answer's message.
    """
    prompt = template.render(messages[:answer], generation_prompt=True)
    last = answer == len(messages) - 1
    alone = text if last else template.render(messages[: answer + 1])
    _check_reasoning(template, alone, messages, answer)
    turn = _by_prefix(template, text, prompt, alone, messages, answer)
    return turn or _by_marks(template, text, prompt, alone, messages, answer)


def _by_prefix(
    template: ChatTemplate,
    text: str,
    prompt: str,
    alone: str,
    messages: tuple[Message, ...],
    answer: int,
) -> Turn | None:
    """Step 1. Texts of this record are compared, and the answer must come out whole (white space
    may differ).
    """
    if not (alone.startswith(prompt) and text.startswith(prompt)):
        return None
    written = alone[len(prompt) :]
    if not _holds(written, messages[answer]) and not _continues(prompt, written, messages[answer]):
        return None
    for stop in template.stops(written):
        if stop and text.startswith(written[:stop], len(prompt)):
            end = len(prompt) + stop
            ends = template.ends_with_special(written[:stop])
            token = next((t for t in template.stop_tokens if text.startswith(t, end)), "")
            if token and not ends:
                return Turn(len(prompt), end + len(token), True)
            return Turn(len(prompt), end, ends)
    return None


def _holds(text: str, message: Message) -> bool:
    """Return whether the text has the message's reasoning, and then its content and calls, ignoring
    white space.
    """
    text, reasoning = squeezed(text), squeezed(message.reasoning)
    found = text.find(reasoning)
    rest = text[found + len(reasoning) :]
    return (
        found >= 0
        and squeezed(message.content) in rest
        and all(written_out(call, rest) for call in message.calls)
    )


def _continues(prompt: str, written: str, message: Message) -> bool:
    """Return whether the content begins at the prompt's end: Qwen3.5's prompt ends with the <think>
    of the answer.
    """
    prompt, written, content = squeezed(prompt), squeezed(written), squeezed(message.content)
    if not all(written_out(call, written) for call in message.calls):
        return False
    return any(
        prompt.endswith(content[:length]) and written.startswith(content[length:])
        for length in range(1, min(len(content), _LONGEST_OPENING) + 1)
    )


def _check_reasoning(
    template: ChatTemplate, alone: str, messages: tuple[Message, ...], answer: int
) -> None:
    """Raise RecordProblem if the template ignores reasoning, or opens a second think block.

    A block of the template before the answer's would teach the model to write two.
    """
    content = messages[answer].content
    if messages[answer].reasoning:
        without = (*messages[:answer], dataclasses.replace(messages[answer], reasoning=""))
        if template.render(without) == alone:
            raise RecordProblem(
                "reasoning left out by the chat template",
                f"it does not read the 'reasoning_content' of turn {answer + 1}; "
                "write it into the content, or use --template with one that reads it",
            )
    if "<think>" not in content:
        return
    shown = alone.count("<think>") - template.render(messages[:answer]).count("<think>")
    if shown > content.count("<think>"):
        raise RecordProblem(
            "two think blocks",
            f"the chat template writes its own before the one in turn {answer + 1}; "
            "give the reasoning as 'reasoning_content' beside 'content' (messages form)",
        )


def _by_marks(
    template: ChatTemplate,
    text: str,
    prompt: str,
    alone: str,
    messages: tuple[Message, ...],
    answer: int,
) -> Turn | None:
    """Step 2. What the template writes between prompt and answer, and after it, is taken from the
    answer's own end.
    """
    # the marks would show only where the content is
    if messages[answer].reasoning or messages[answer].calls:
        return None
    # Mistral's tools stand before the last question: an earlier answer would be trained without
    # them.
    if template.tools and answer < len(messages) - 1 and not text.startswith(prompt):
        return None
    span = content_span(template, text, messages, answer)
    span_alone = content_span(template, alone, messages[: answer + 1], answer)
    if span is None or span_alone is None:
        return None
    (start, end), (start_alone, end_alone) = span, span_alone
    turn_end = _end_of_turn(template, text, end, alone[end_alone:])
    if turn_end is None:
        return None
    follows_alone = alone.startswith(prompt) and len(prompt) <= start_alone
    opening = alone[len(prompt) : start_alone] if follows_alone else ""
    if text.startswith(prompt) and not text[len(prompt) : start].strip():
        start = len(prompt)
    elif text.endswith(opening, 0, start):
        start -= len(opening)
    follows_prompt = text[:start] == prompt
    if follows_alone and not follows_prompt:
        return None  # a separate sample follows the prompt that serving writes
    ends = template.ends_with_special(text[start:turn_end])
    return Turn(start, turn_end, ends, follows_prompt)


def _end_of_turn(template: ChatTemplate, text: str, end: int, tail: str) -> int | None:
    """Find where a turn of `text` ends, given what follows its content when it is the last one.

    A template may strip another amount of white space from its last turn than from earlier ones,
    so white space before the end-of-turn token is not compared.

    Args:
        end: one past the last character of the content, without its trailing white space.
        tail: what follows the same content where it ends the conversation.

    Returns:
        One past the end-of-turn token; None if the last turn has one and this turn has none.
        `end` if neither has one, or if this turn ends with another token than the last, at which
        the model does not stop (gpt-oss: <|end|> instead of <|return|>).
    """
    tail = tail.lstrip()
    after_space = end + len(text[end:]) - len(text[end:].lstrip())
    for stop in template.stops(tail):
        if stop and text.startswith(tail[:stop], after_space):
            return after_space + stop
    for token in template.stop_tokens:
        if text.startswith(token, after_space):
            return after_space + len(token)
    if not template.has_special(tail) or template.begins_with_special(text[after_space:]):
        return end
    return None


def content_span(
    template: ChatTemplate, text: str, messages: Sequence[Message], number: int
) -> tuple[int, int] | None:
    """Find the content of message `number` in `text`, the plain rendering of `messages`.

    The content is rendered between marks inside its outer white space, which templates may strip.

    Returns:
        Where the content begins and ends, without its outer white space; None if that is not
        certain: a mark comes out twice, or the text without the marks is not the plain one.
    """
    content = messages[number].content
    opening, closing = _unused_characters(text + content)
    core = content.strip()
    leading = content[: len(content) - len(content.lstrip())]
    trailing = content[len(leading) + len(core) :]
    turns = list(messages)
    marked = leading + opening + core + closing + trailing
    turns[number] = dataclasses.replace(messages[number], content=marked)
    try:
        shown = template.render(turns)
    # a template that looks into the content, and not at this one with marks
    except RecordProblem:
        return None
    if shown.count(opening) != 1 or shown.count(closing) != 1:
        return None
    start, end = shown.index(opening), shown.index(closing) - 1
    if start > end or shown.replace(opening, "").replace(closing, "") != text:
        return None
    return start, end


def _unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that the text does not hold: no template strips, splits at or
    escapes them.
    """
    private = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
    unused = (mark for mark in map(chr, private) if mark not in text)
    return next(unused), next(unused)
