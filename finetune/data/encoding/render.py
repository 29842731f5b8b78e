"""Conversation -> samples: tokens with the mask of what is trained, no longer than the cutoff."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.encode import Encoded, Encoder, trained_tokens
from finetune.data.encoding.spans import ChatTemplate, Rendering, content_span, find_turns
from finetune.data.encoding.thinking import behind_thinking
from finetune.data.encoding.truncate import Kept, fit
from finetune.data.formats import Conversation, Message
from finetune.data.problems import RecordProblem
from finetune.errors import DataError

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
        begins = (
            tokenizer.bos_token_id is not None
            and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
        )
        self._begin_id = (
            tokenizer.bos_token_id if begins else None
        )  # where the tokenizer itself writes it before a text
        self._end_id = tokenizer.eos_token_id
        self._check_cutoff(str(tokenizer.name_or_path))

    def __call__(self, conversation: Conversation) -> list[Rendered]:
        """The samples of one conversation: one, or one per answer where the template asks for it
        (see spans.py).

        Raises:
            RecordProblem: the template refuses the record or rewrites its answer; nothing or all
                would be trained.
        """
        if conversation.plain_text is not None:
            return [self._text(conversation.plain_text)]
        template = self.template.with_tools(conversation.tools)
        renderings = find_turns(template, conversation.messages)
        if not self.train_thinking:
            renderings = list(map(behind_thinking, renderings))
        return [self._sample(template, rendering) for rendering in renderings]

    def has_control_tokens(self, conversation: Conversation) -> bool:
        """Whether a text of the record spells a special token, which the tokenizer will read as
        one.
        """
        texts = [message.content for message in conversation.messages]
        texts += [
            json.dumps(call.arguments)
            for message in conversation.messages
            for call in message.calls
        ]
        return any(map(self.template.has_special, texts))

    def _text(self, text: str) -> Rendered:
        """A plain text between the tokens that begin and end one; every token but the first is a
        target.
        """
        if self._end_id is None:
            raise RecordProblem(
                "no end token", "a plain text ends with the tokenizer's eos_token, and it has none"
            )
        begin = [] if self._begin_id is None else [self._begin_id]
        ids = np.array([*begin, *self._encoder.encode(text).ids.tolist()], dtype=np.int32)
        if not len(ids) or ids[-1] != self._end_id:  # a text may spell it
            ids = np.append(ids, np.int32(self._end_id))
        kept = ids[: self.cutoff_len]
        supervised = np.ones(len(kept), dtype=bool)
        supervised[0] = False
        return Rendered(kept, supervised, cut_text_tokens=len(ids) - len(kept))

    def _sample(self, template: ChatTemplate, rendering: Rendering) -> Rendered:
        encoded = self._encoder.encode(rendering.text, rendering.turns)
        answers, supervised = self._targets(rendering, encoded)
        kept = fit(
            encoded,
            self._prompt_contents(template, rendering, encoded, supervised),
            answers,
            self.cutoff_len,
        )
        return self._rendered(rendering, encoded, supervised, kept)

    def _targets(
        self, rendering: Rendering, encoded: Encoded
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The tokens of each answer, and which of all T are targets, bool (T,)."""
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
        """Tokens that lie wholly inside contents that are not trained; found only for samples that
        are too long.
        """
        if len(encoded.ids) <= self.cutoff_len:
            return []
        contents = []
        for number, message in enumerate(rendering.messages):
            if message.role == "assistant" and message.trained:
                continue
            span = content_span(template, rendering.text, rendering.messages, number)
            # else the template rewrites it, and it is kept like the template's own text
            if span is not None:
                inside = (
                    (encoded.starts >= span[0])
                    & (encoded.ends <= span[1])
                    & (encoded.starts < encoded.ends)
                )
                contents.append(np.flatnonzero(inside & ~supervised))
        return sorted(
            (content for content in contents if len(content)), key=lambda content: content[0]
        )

    def _check_cutoff(self, where: str) -> None:
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
    """The special tokens that the chat template ends an answer with, which a model must learn to
    write.

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


def render(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, cutoff_len: int
) -> list[Rendered]:
    """Render one conversation; for many, make one `Renderer` and call it."""
    return Renderer(tokenizer, cutoff_len)(conversation)
