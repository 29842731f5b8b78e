"""Preference -> one sample: both answers, each a document behind the same prompt, or the one that
has a label.

Each document is rendered, tokenized and cut as fine-tuning does it. Their prompts are then the same
tokens, always:

- The tokens before the answers are equal, because no token straddles their beginning. Where they
  are not (some tokenizers split the white space at a prompt's end by what follows it), both texts
  are cut there.
- Where a document is longer than the cutoff, its prompt loses its middle (see
  encoding/truncate.py); of two prompts that lose different tokens both documents take the shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetune.data.encoding.render import Encoded, Kept, Rendered, Renderer, fit, without_reasoning
from finetune.data.encoding.spans import ChatTemplate, Rendering, find_turns
from finetune.data.formats import Conversation, Message
from finetune.data.preference.reader import Preference
from finetune.data.report import RecordProblem


@dataclass(frozen=True)
class _Side:
    """One document of a pair, before it is cut: T tokens."""

    rendering: Rendering
    encoded: Encoded
    contents: list[np.ndarray]  # see `fit`
    answers: list[np.ndarray]
    supervised: np.ndarray  # bool (T,)


class PreferenceRenderer(Renderer):
    """Renders preferences to samples whose documents have at most `cutoff_len` tokens each; errors
    are `Renderer`'s.
    """

    def __call__(self, conversation: Conversation) -> list[Rendered]:
        """One sample; none where the answers differ only behind the cutoff, and one without targets
        where one has none.

        Raises:
            RecordProblem: as `Renderer`; or the documents are equal, or their prompts are not.
        """
        assert isinstance(conversation, Preference)
        template = self.template.with_tools(conversation.tools)
        chosen = _one_rendering(template, conversation.messages)
        if conversation.label is not None:
            sample = self._sample(template, self._trained(chosen))
            return [replace(sample, label=int(conversation.label))]
        rejected = _one_rendering(template, conversation.rejected)
        first, second = self._documents(template, chosen, rejected)
        if not (first.supervised.any() and second.supervised.any()):
            return [replace(first, supervised=np.zeros_like(first.supervised))]
        if np.array_equal(first.input_ids, second.input_ids):
            return []
        return [_joined(first, second)]

    def has_control_tokens(self, conversation: Conversation) -> bool:
        """Return whether a text of either side spells a special token, which the tokenizer will
        read as one.
        """
        assert isinstance(conversation, Preference)
        other = Conversation(conversation.rejected)
        return super().has_control_tokens(conversation) or super().has_control_tokens(other)

    def _trained(self, rendering: Rendering) -> Rendering:
        return rendering if self.train_thinking else without_reasoning(rendering)

    def _documents(
        self, template: ChatTemplate, chosen: Rendering, rejected: Rendering
    ) -> list[Rendered]:
        """Render both sides as documents that begin with the same prompt tokens.

        Raises:
            RecordProblem: their prompts differ, or they are equal.
        """
        begin = chosen.turns[0].start
        if begin != rejected.turns[0].start or chosen.text[:begin] != rejected.text[:begin]:
            raise RecordProblem(
                "prompts differ in the chat template's text",
                "the template writes the turns before the answers by what comes after them; "
                "let 'chosen' and 'rejected' be one answer each, or use another --template",
            )
        renderings = [self._trained(chosen), self._trained(rejected)]
        encodings, prompt_tokens = self._with_one_prompt(renderings, begin)
        if np.array_equal(encodings[0].ids, encodings[1].ids):
            raise RecordProblem(
                "equal answers", "'chosen' and 'rejected' are the same text in the chat template"
            )
        sides = []
        for rendering, encoded in zip(renderings, encodings, strict=True):
            answers, supervised = self._targets(rendering, encoded)
            contents = self._prompt_contents(template, rendering, encoded, supervised)
            sides.append(_Side(rendering, encoded, contents, answers, supervised))
        kept = _fit_both(sides, prompt_tokens, self.cutoff_len)
        return [
            self._rendered(side.rendering, side.encoded, side.supervised, tokens)
            for side, tokens in zip(sides, kept, strict=True)
        ]

    def _with_one_prompt(
        self, renderings: list[Rendering], begin: int
    ) -> tuple[list[Encoded], int]:
        """Return the tokens of both, and how many of them are before the answers, which begin at
        character `begin`.
        """
        for cut_at in (None, begin):
            encodings = [self._encoder.encode(one.text, one.turns, cut_at) for one in renderings]
            prompts = [encoded.ids[encoded.starts < begin] for encoded in encodings]
            if np.array_equal(prompts[0], prompts[1]):
                return encodings, len(prompts[0])
        raise RecordProblem(
            "prompts differ in tokens",
            "this tokenizer joins the end of the prompt with the answers; use the model's own"
            " tokenizer and template",
        )


def _one_rendering(template: ChatTemplate, messages: Sequence[Message]) -> Rendering:
    """Render one side, which must be one document."""
    renderings = find_turns(template, messages)
    if len(renderings) > 1:
        raise RecordProblem(
            "several samples of one side",
            "the chat template rewrites earlier answers, so that each would be a sample of its own;"
            " let the side be one answer, or use another --template",
        )
    return renderings[0]


def _fit_both(sides: list[_Side], prompt_tokens: int, cutoff_len: int) -> list[Kept]:
    """Of each side at most `cutoff_len` tokens, and the same of the first `prompt_tokens`, which
    both begin with.

    The document that leaves its prompt less room decides: the other has room for that prompt too.
    """
    kept = [fit(side.encoded, side.contents, side.answers, cutoff_len) for side in sides]
    prompts = [one.tokens[one.tokens < prompt_tokens] for one in kept]
    shortest = min(prompts, key=len)
    for number, prompt in enumerate(prompts):
        if not np.array_equal(prompt, shortest):
            kept[number] = _refitted(sides[number], shortest, prompt_tokens, cutoff_len)
    return kept


def _refitted(side: _Side, prompt: np.ndarray, prompt_tokens: int, cutoff_len: int) -> Kept:
    """Cut a side again, with these tokens as its prompt."""
    left = np.concatenate([prompt, np.arange(prompt_tokens, len(side.encoded.ids))])
    gone = prompt_tokens - len(prompt)
    encoded = Encoded(side.encoded.ids[left], side.encoded.starts[left], side.encoded.ends[left])
    contents = [content - gone for content in side.contents if content[0] >= prompt_tokens]
    kept = fit(encoded, contents, [answer - gone for answer in side.answers], cutoff_len)
    return replace(kept, tokens=left[kept.tokens], trimmed_tokens=kept.trimmed_tokens + gone)


def _joined(chosen: Rendered, rejected: Rendered) -> Rendered:
    """Both documents as one sample, the chosen one first."""
    return Rendered(
        np.concatenate([chosen.input_ids, rejected.input_ids]),
        np.concatenate([chosen.supervised, rejected.supervised]),
        chosen.trimmed_tokens + rejected.trimmed_tokens,
        chosen.dropped_turns + rejected.dropped_turns,
        chosen.cut_answer or rejected.cut_answer,
        ends=chosen.ends and rejected.ends,
        follows_prompt=chosen.follows_prompt and rejected.follows_prompt,
        first_length=len(chosen.input_ids),
        first_targets=int(chosen.supervised.sum()),
    )
