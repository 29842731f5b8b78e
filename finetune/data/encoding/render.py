"""Conversation -> samples: tokens with the mask of what is trained, no longer than the cutoff."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.spans import ChatTemplate, Rendering, Turn, content_span, find_turns
from finetune.data.formats import Conversation, Message
from finetune.data.report import RecordProblem
from finetune.errors import DataError

# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Encoded:
    """T tokens of a text. `starts` and `ends` are character offsets, int64 (T,); `ids` int32
    (T,).
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Encoder:
    """A tokenizer as a function from text to tokens, special tokens in the text included and none
    added.

    The whole text is tokenized once. If a token would straddle the beginning of a trained span, the
    text is cut there and both sides are tokenized separately. At inference the prompt is tokenized
    separately too, so the model reads exactly the prompt's tokens, and every target is a whole
    token of the answer.

    A token may run past the *end* of a trained span with white space only. Examples are an
    end-of-turn token that includes the newline after it, or a "." fused with a newline. Such a
    token is the answer's last token and stays whole. A token that includes other text is cut as at
    the beginning.

    For some tokenizers cutting changes the text (those that write a space before every piece).
    There the straddling token stays part of the prompt and is not trained.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} gives no character offsets: answers cannot be told"
                " from prompts exactly",
                where=str(tokenizer.name_or_path),
                fix="use the model's tokenizer.json (a tokenizer of the 'tokenizers' library)",
            )
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        # Post-processing adds special tokens, which templates write themselves; some tokenizers
        # also trim spaces off the offsets there.
        backend.post_processor = None
        self._backend = backend

    def encode(self, text: str, turns: Sequence[Turn] = (), cut_at: int | None = None) -> Encoded:
        """Tokenize `text` so that no token straddles a trained turn's boundary (see the class's
        text).

        Args:
            cut_at: a character to cut at in any case: what is behind it has no part in the tokens
                before it.
        """
        whole = self._piece(text, 0)
        cuts = _straddled(text, whole, turns)
        if cut_at is not None:
            cuts = sorted({*cuts, cut_at})
        if not cuts:
            return whole
        pieces = [
            self._piece(text[start:end], start)
            for start, end in itertools.pairwise([0, *cuts, len(text)])
        ]
        cut = Encoded(
            np.concatenate([piece.ids for piece in pieces]),
            np.concatenate([piece.starts for piece in pieces]),
            np.concatenate([piece.ends for piece in pieces]),
        )
        return cut if self._text(cut.ids) == self._text(whole.ids) else whole

    def _piece(self, text: str, offset: int) -> Encoded:
        encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + offset
        return Encoded(np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])

    def _text(self, ids: np.ndarray) -> str:
        return self._backend.decode(ids.tolist(), skip_special_tokens=False)


def _straddled(text: str, encoded: Encoded, turns: Sequence[Turn]) -> list[int]:
    """Return the boundaries of turns that are inside a token and must be cut at, in order."""
    cuts = set()
    for turn in turns:
        if ((encoded.starts < turn.start) & (turn.start < encoded.ends)).any():
            cuts.add(turn.start)
        over = (encoded.starts < turn.end) & (encoded.ends > _past_space(text, turn.end))
        if over.any():
            cuts.add(turn.end)
    return sorted(cuts)


def trained_tokens(text: str, encoded: Encoded, turns: Sequence[Turn]) -> list[np.ndarray]:
    """Return, for each turn, the indices of its tokens, int64, in order."""
    spans = []
    for turn in turns:
        starts_inside = (encoded.starts >= turn.start) & (encoded.starts < turn.end)
        ends_inside = encoded.ends <= _past_space(text, turn.end)
        is_text = encoded.starts < encoded.ends
        spans.append(np.flatnonzero(starts_inside & ends_inside & is_text))
    return spans


def _past_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


# ---------------------------------------------------------------- truncation
#
# What is left out of a sample that is too long, so that the answer survives and nothing is
# invented.
# In this order, each step only if the one before was not enough:
#
# 1. tokens after the last target: nothing is predicted from them;
# 2. the middles of prompt contents (system, user, tool, untrained answers), the longest content
#    first, down to `PROMPT_FLOOR_TOKENS` each; headers, separators and generation prompts stay;
# 3. the last turns of the conversation, one by one, down to the first trained one;
# 4. that turn's prompt contents below the floor, so that the answer stays whole;
# 5. if the answer itself does not fit: its end, with the end-of-turn token, so that the model
#    never learns to stop in the middle. Up to a quarter of the room is then kept for the prompt: an
#    answer to nothing teaches nothing.

PROMPT_FLOOR_TOKENS = 32  # of each prompt content, before whole turns are left out


@dataclass(frozen=True)
class Kept:
    """Which tokens of a sample stay."""

    tokens: np.ndarray  # int64, their indices in order
    trimmed_tokens: int = 0  # taken out of prompt contents
    dropped_turns: int = 0  # trained answers left out from the end
    cut_answer: bool = False  # whether the last answer that stays lost its end


def fit(
    encoded: Encoded, contents: Sequence[np.ndarray], answers: Sequence[np.ndarray], cutoff_len: int
) -> Kept:
    """Choose at most `cutoff_len` of the T tokens of one sample.

    Args:
        contents: for each prompt content the indices of its tokens, contiguous and in order.
        answers: for each trained turn the indices of its tokens, in order; none empty.

    Returns:
        the tokens that stay; no target among them if the first answer's header alone is too long.
    """
    if len(encoded.ids) <= cutoff_len:
        return Kept(np.arange(len(encoded.ids)))
    for turns in range(len(answers), 0, -1):
        end = int(answers[turns - 1][-1]) + 1
        inside, lengths = _before(end, contents)
        room = cutoff_len - (end - int(lengths.sum()))
        floor = int(np.minimum(lengths, PROMPT_FLOOR_TOKENS).sum())
        if room >= floor or (turns == 1 and room >= 0):
            gone = _middles(encoded, inside, lengths, room)
            return Kept(np.delete(np.arange(end), gone), len(gone), len(answers) - turns)
    return _cut(encoded, contents, answers, cutoff_len)


def _cut(
    encoded: Encoded, contents: Sequence[np.ndarray], answers: Sequence[np.ndarray], cutoff_len: int
) -> Kept:
    """Step 5: the first answer, cut at the end."""
    start = int(answers[0][0])
    inside, lengths = _before(start, contents)
    room = cutoff_len - (start - int(lengths.sum()))
    if room < 1:
        return Kept(np.arange(0), 0, len(answers))
    gone = _middles(encoded, inside, lengths, room // 4)
    prompt = np.delete(np.arange(start), gone)
    # The answer alone is longer than the room (else `fit` had returned), so its last token is never
    # reached.
    answer = np.arange(start, start + cutoff_len - len(prompt))
    return Kept(np.concatenate([prompt, answer]), len(gone), len(answers) - 1, True)


def _before(end: int, contents: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the contents before token `end`, and their lengths, int64."""
    inside = [content for content in contents if len(content) and content[-1] < end]
    return inside, np.array([len(content) for content in inside], dtype=np.int64)


def _middles(
    encoded: Encoded, contents: Sequence[np.ndarray], lengths: np.ndarray, room: int
) -> np.ndarray:
    """Return the indices of tokens to remove from the contents' middles, so that at most `room`
    tokens stay in the contents.
    """
    shares = zip(contents, _share(lengths, room), strict=True)
    gone = [_middle(encoded, content, keep) for content, keep in shares if keep < len(content)]
    return np.concatenate(gone) if gone else np.arange(0)


def _share(lengths: np.ndarray, room: int) -> list[int]:
    """Return how many tokens each content keeps: short ones all, and longer ones the same number
    one.
    """
    if int(lengths.sum()) <= room:
        return lengths.tolist()
    kept = np.zeros(len(lengths), dtype=np.int64)
    left = room
    by_length = np.argsort(lengths, kind="stable")
    for done, content in enumerate(by_length):
        kept[content] = min(int(lengths[content]), left // (len(lengths) - done))
        left -= int(kept[content])
    return kept.tolist()


def _middle(encoded: Encoded, content: np.ndarray, keep: int) -> np.ndarray:
    """Return the tokens between the first half and the second half of what is kept; no character is
    torn apart.
    """
    first = (keep + 1) // 2
    last = len(content) - keep // 2
    while 0 < first < len(content) and _same_character(encoded, content[first - 1], content[first]):
        first -= 1
    while 0 < last < len(content) and _same_character(encoded, content[last - 1], content[last]):
        last += 1
    return content[first:last]


def _same_character(encoded: Encoded, left: int, right: int) -> bool:
    """Return whether two neighboring tokens hold parts of one character."""
    return bool(encoded.starts[right] < encoded.ends[left])


# ---------------------------------------------------------------- reasoning
#
# Trained turns without the reasoning that begins them, for --train-thinking false. Reasoning is the
# text between the generation prompt and the answer. It is a think block, from the template (even an
# empty one) or from the record's own text, or `reasoning_content` in any form that the template
# gives it.

_OPEN, _CLOSE = "<think>", "</think>"


def without_reasoning(rendering: Rendering) -> Rendering:
    """Return the rendering with turns that begin after their reasoning.

    Raises:
        RecordProblem: the template gives reasoning in a form in which its end is not found.
    """
    answers = [
        message for message in rendering.messages if message.role == "assistant" and message.trained
    ]
    # A rendering for one answer of several has the turn of the last.
    answers = answers[-len(rendering.turns) :]
    turns = [
        _behind(rendering.text, turn, answer)
        for turn, answer in zip(rendering.turns, answers, strict=True)
    ]
    return replace(rendering, turns=tuple(turns))


def _behind(text: str, turn: Turn, answer: Message) -> Turn:
    """Return a turn that begins after the reasoning of its answer.

    Args:
        text: the whole rendering.
    """
    written = text[turn.start : turn.end]
    reasoning, content = (answer.reasoning or "").strip(), answer.content.strip()
    by_prompt = text[: turn.start].rstrip().endswith(_OPEN)
    if _CLOSE in written and (by_prompt or written.lstrip().startswith(_OPEN)):
        rest = _behind_block(written, reasoning, content, by_prompt)
        return replace(turn, start=turn.end - len(rest))
    if not reasoning:
        return turn
    at = written.find(reasoning)
    found = written.find(content, at + len(reasoning))
    if at < 0 or found < 0 or not content:
        raise _reasoning_not_separable()
    return replace(turn, start=turn.start + found)


def _behind_block(written: str, reasoning: str, content: str, by_prompt: bool) -> str:
    """Return what follows the think block at the start of an answer."""
    rests = [written[found.end() :].lstrip() for found in re.finditer(_CLOSE, written)]
    if reasoning and _CLOSE in reasoning + content:  # the first tag may be a quoted one
        _, found, behind = written.partition(reasoning)
        if not found or not behind.lstrip().startswith(_CLOSE):
            raise _reasoning_not_separable()
        return behind.lstrip().removeprefix(_CLOSE).lstrip()
    if by_prompt and _CLOSE in content:
        # Either the template closes the block and then comes the content, or the content closes it.
        for begins in (content, content.partition(_CLOSE)[2].strip()):
            for rest in rests:
                if rest.startswith(begins):
                    return rest
        raise _reasoning_not_separable()
    return rests[0]


def _reasoning_not_separable() -> RecordProblem:
    return RecordProblem(
        "thinking not told from the answer",
        "the chat template writes 'reasoning_content' in a form of its own; leave out"
        " --train-thinking false",
    )


_PROBE_QUESTION = "What does a router do?"
_PROBE = (Message("user", _PROBE_QUESTION), Message("assistant", "It forwards packets."))


@dataclass(frozen=True)
class Rendered:
    """One sample of T tokens."""

    input_ids: np.ndarray  # int32 (T,)
    # bool (T,): the token is a target, predicted from those before it; never position 0
    supervised: np.ndarray
    trimmed_tokens: int = 0  # taken out of the prompt's contents
    dropped_turns: int = 0  # answers left out from the end of the conversation
    # the last answer lost its end, and no end-of-turn token is trained for it
    cut_answer: bool = False
    cut_text_tokens: int = 0  # taken off the end of a plain text
    # a whole answer ends with a special token: the model learns to stop (True if none is whole)
    ends: bool = True
    # every answer comes right after the generation prompt that inference uses
    follows_prompt: bool = True
    # Of preferences (data/preference):
    first_length: int = 0  # tokens of the first document of two
    first_targets: int = 0  # targets among them
    label: int = -1  # 1: a good answer, 0: a bad one


class Renderer:
    """Renders conversations to samples of at most `cutoff_len` tokens; may be sent to other
    processes.

    Raises:
        DataError: no chat template, a broken one, a tokenizer without offsets, or a cutoff that
            leaves no room for an answer after the template's own tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, cutoff_len: int, *, train_thinking: bool = True
    ) -> None:
        self.template = ChatTemplate(tokenizer)
        self.cutoff_len = cutoff_len
        self.train_thinking = train_thinking  # else think blocks are context
        self._encoder = Encoder(tokenizer)
        begin_id = tokenizer.bos_token_id
        # the tokens with which the tokenizer itself begins a text
        self._begin = [begin_id] if tokenizer("x")["input_ids"][:1] == [begin_id] else []
        self._end_id = tokenizer.eos_token_id
        self._check_cutoff(str(tokenizer.name_or_path))

    def __call__(self, conversation: Conversation) -> list[Rendered]:
        """Return the samples of one conversation: one, or one per answer if the template requires
        it (see spans.py).

        Raises:
            RecordProblem: the template refuses the record or rewrites its answer; nothing or all
                would be trained.
        """
        if conversation.plain_text is not None:
            return [self._text(conversation.plain_text)]
        template = self.template.with_tools(conversation.tools)
        renderings = find_turns(template, conversation.messages)
        if not self.train_thinking:
            renderings = list(map(without_reasoning, renderings))
        return [self._sample(template, rendering) for rendering in renderings]

    def has_control_tokens(self, conversation: Conversation) -> bool:
        """Return whether a text of the record spells a special token, which the tokenizer will read
        as one.
        """
        texts = []
        for message in conversation.messages:
            texts.append(message.content)
            texts += [json.dumps(call.arguments) for call in message.calls]
        return any(map(self.template.has_special, texts))

    def _text(self, text: str) -> Rendered:
        """Render a plain text between the tokens that begin and end one; every token but the first
        is a target.
        """
        if self._end_id is None:
            raise RecordProblem(
                "no end token", "a plain text ends with the tokenizer's eos_token, and it has none"
            )
        ids = np.array([*self._begin, *self._encoder.encode(text).ids.tolist()], dtype=np.int32)
        if not len(ids) or ids[-1] != self._end_id:  # a text may spell it
            ids = np.append(ids, np.int32(self._end_id))
        kept = ids[: self.cutoff_len]
        supervised = np.ones(len(kept), dtype=bool)
        supervised[0] = False
        return Rendered(kept, supervised, cut_text_tokens=len(ids) - len(kept))

    def _sample(self, template: ChatTemplate, rendering: Rendering) -> Rendered:
        """Tokenize a rendering, and cut it to `cutoff_len`."""
        encoded = self._encoder.encode(rendering.text, rendering.turns)
        answers, supervised = self._targets(rendering, encoded)
        contents = self._prompt_contents(template, rendering, encoded, supervised)
        kept = fit(encoded, contents, answers, self.cutoff_len)
        return self._rendered(rendering, encoded, supervised, kept)

    def _targets(
        self, rendering: Rendering, encoded: Encoded
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the tokens of each answer, and which of all T are targets, bool (T,)."""
        answers = trained_tokens(rendering.text, encoded, rendering.turns)
        supervised = np.zeros(len(encoded.ids), dtype=bool)
        for answer in answers:
            supervised[answer] = True
        supervised[:1] = False  # nothing comes before position 0 to predict it from
        if not all(map(len, answers)) or not supervised.any():
            raise RecordProblem(
                "nothing to train", "an answer has no token of its own under this tokenizer"
            )
        if supervised[1:].all():
            raise RecordProblem(
                "everything would be trained",
                "the chat template writes no prompt before the answer",
            )
        return answers, supervised

    def _rendered(
        self, rendering: Rendering, encoded: Encoded, supervised: np.ndarray, kept: Kept
    ) -> Rendered:
        """Make the sample of the tokens that are kept."""
        whole = rendering.turns[: len(rendering.turns) - kept.dropped_turns - kept.cut_answer]
        return Rendered(
            encoded.ids[kept.tokens],
            supervised[kept.tokens],
            kept.trimmed_tokens,
            kept.dropped_turns,
            kept.cut_answer,
            ends=not whole or any(turn.ends for turn in whole),
            follows_prompt=all(turn.follows_prompt for turn in rendering.turns),
        )

    def _prompt_contents(
        self, template: ChatTemplate, rendering: Rendering, encoded: Encoded, supervised: np.ndarray
    ) -> list[np.ndarray]:
        """Tokens that are wholly inside contents that are not trained; found only for samples that
        are too long.
        """
        if len(encoded.ids) <= self.cutoff_len:
            return []
        contents = []
        untrained = ~supervised & (encoded.starts < encoded.ends)
        for number, message in enumerate(rendering.messages):
            if message.role == "assistant" and message.trained:
                continue
            span = content_span(template, rendering.text, rendering.messages, number)
            if span is None:
                continue  # the template rewrites it, and it is kept like the template's own text
            start, end = span
            inside = (encoded.starts >= start) & (encoded.ends <= end)
            content = np.flatnonzero(inside & untrained)
            if len(content):
                contents.append(content)
        return sorted(contents, key=lambda content: content[0])

    def _check_cutoff(self, where: str) -> None:
        """Refuse a cutoff that leaves no room for an answer after the template's own tokens.

        Args:
            where: the tokenizer, for messages.
        """
        try:
            rendering = find_turns(self.template, _PROBE)[0]
        except RecordProblem as problem:
            raise DataError(
                f"the chat template cannot write a question and its answer: {problem}",
                where=where,
                fix="pass --template with a working one",
            ) from problem
        prompt = rendering.text[: rendering.turns[0].start]
        question_tokens = len(self._encoder.encode(_PROBE_QUESTION).ids)
        header_tokens = len(self._encoder.encode(prompt).ids) - question_tokens
        if self.cutoff_len < header_tokens + 2:
            raise DataError(
                f"cutoff_len {self.cutoff_len} is too short: the chat template alone takes"
                f" {header_tokens} tokens, and a question and an answer need at least one each",
                where=f"--cutoff-len, {where}",
                fix=(
                    f"set --cutoff-len to at least {header_tokens + 2}; hundreds or thousands are"
                    " usual"
                ),
            )


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end an answer: the special tokens that the chat template ends one with, and the
    tokenizer's own end.

    Generation must stop at each of them: a base model's own settings know only the last. Errors are
    `Renderer`'s.
    """
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return tuple(sorted({*trained_end_ids(tokenizer), *own}))


def trained_end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special tokens that the chat template ends an answer with, which a model must
    learn to write.

    Errors are `Renderer`'s.
    """
    renderer = Renderer(tokenizer, cutoff_len=1 << 30)
    (sample,) = renderer(Conversation(_PROBE))
    specials = {tokenizer.convert_tokens_to_ids(token) for token in renderer.template.specials}
    ends = set()
    for token in reversed(sample.input_ids[sample.supervised].tolist()):
        if token in specials:
            ends.add(token)
        # the answer itself; white space may stand between two ends
        elif str(tokenizer.decode([token])).strip():
            break
    return tuple(sorted(ends))
