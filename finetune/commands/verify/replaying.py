"""The prompts through both: first all of the deployment's answers, then the trained model's own.

In this order a server that refuses is found before a model is loaded, and a folder's model is
dropped before the reference is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune.commands.verify.evidence import Deployment, Prompt, Replay, Seen
from finetune.commands.verify.wire import PROMPT_REFUSED
from finetune.data.tools import squeezed
from finetune.runtime.progress import ProgressLine

if TYPE_CHECKING:
    from finetune.commands.verify.reference import Reference

ASKED_TWICE = 4  # prompts, of which a server that draws its answers would hardly draw all alike
CLOSING = "</think>"


@contextmanager
def progress(counted: str, total: int) -> Iterator[Callable[[str], None]]:
    """A line on standard error that counts; what it gives is called after each."""
    line, began, done = ProgressLine(total, counted=counted), time.monotonic(), 0

    def advance(facts: str = "") -> None:
        nonlocal done
        done += 1
        left = (time.monotonic() - began) / done * (total - done)
        line.update(done, stage="", facts=facts, eta_seconds=left)

    try:
        yield advance
    finally:
        line.close()


def ask(deployment: Deployment, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Replay]:
    """What the deployment answers; the trained model's own answers are not there yet.

    Raises:
        FinetuneError: the deployment ends, or is no such server.
    """
    found: list[Replay] = []
    with progress("prompt", len(prompts)) as advance:
        for number, prompt in enumerate(prompts, 1):
            if found and _is_final(found[-1].seen):
                found.append(replace(found[-1], number=number, prompt=prompt))
                continue
            seen = deployment.chat(prompt.messages, max_new_tokens)
            twice = number <= ASKED_TWICE and seen.finish != "refused"
            second = deployment.chat(prompt.messages, max_new_tokens) if twice else None
            # as by a limit of requests
            again = None if second is None or second.finish == "refused" else second.answer
            raw = (
                None
                if _is_final(seen)
                else deployment.complete(prompt.ids, prompt.text, max_new_tokens)
            )
            found.append(Replay(number, prompt, "", (), "", seen, again, raw))
            advance("")
    return found


def _is_final(seen: Seen) -> bool:
    """Whether the server has refused the request, not this prompt: the next ones will fare no
    better.
    """
    return seen.status is not None and seen.status not in PROMPT_REFUSED


def with_own(reference: Reference, asked: Sequence[Replay], max_new_tokens: int) -> list[Replay]:
    """The same with the trained model's own answers, and the deployment's with their thoughts put
    back.
    """
    own = reference.answers([replay.prompt for replay in asked], max_new_tokens)
    ends = [bool(ids) and ids[-1] in reference.stop_ids for ids in own]
    texts = [
        reference.tokenizer.decode(list(ids[:-1] if ended else ids), skip_special_tokens=True)
        for ids, ended in zip(own, ends, strict=True)
    ]
    thinking = [
        _thinks(replay.prompt, ids, reference.tokenizer)
        for replay, ids in zip(asked, own, strict=True)
    ]
    misled = any(
        replay.seen.thoughts and not thinks and _says(replay.seen, text)
        for replay, text, thinks in zip(asked, texts, thinking, strict=True)
    )
    found = []
    for replay, ids, ended, text, thinks in zip(asked, own, ends, texts, thinking, strict=True):
        seen, parsed = put_back(replay.seen, text, thinks, misled)
        raw = None if replay.raw is None else _whole(replay.raw, reference.tokenizer)
        finish = "stop" if ended else "length"
        found.append(
            replace(
                replay,
                own_answer=text, own_ids=ids, own_finish=finish,
                seen=_whole(seen, reference.tokenizer), raw=raw, parsed=parsed,
                again=seen.answer if replay.again == replay.seen.answer else replay.again,
            )
        )  # fmt: skip
    return found


def _thinks(prompt: Prompt, own_ids: Sequence[int], tokenizer: Any) -> bool:
    """Whether the trained model marks thoughts in this answer."""
    return prompt.text.rstrip().endswith("<think>") or "think>" in tokenizer.decode(list(own_ids))


def _says(seen: Seen, own: str) -> bool:
    """Whether thoughts and answer together are the trained model's own answer."""
    return squeezed(seen.thoughts + seen.answer.strip()) == squeezed(
        own.replace("<think>", "").replace(CLOSING, "")
    )


def put_back(seen: Seen, own: str, thinks: bool, misled: bool = False) -> tuple[Seen, bool]:
    """The answer as the model wrote it, and whether the server's reasoning parser misled its
    readers.

    It does where it takes an answer without thoughts for thoughts, or keeps back those that were
    trained.

    Args:
        own: the trained model's answer to the same.
        thinks: whether that has thoughts.
        misled: whether the parser has taken another answer for thoughts: so it does with all that
            are cut.
    """
    answer = seen.answer.strip()
    if not seen.thoughts:
        hidden = (
            thinks
            and bool(answer)
            and CLOSING in own
            and own.rpartition(CLOSING)[2].strip() == answer
        )
        return (replace(seen, answer=own), True) if hidden else (seen, False)
    if _says(seen, own):
        return replace(seen, answer=own), not thinks
    # no mark ever ended these thoughts
    if not thinks and not answer and (misled or seen.finish == "stop"):
        return replace(seen, answer=seen.thoughts), True
    opened = "" if CLOSING in own and "<think>" not in own else "<think>\n"
    closed = f"\n{CLOSING}\n\n{seen.answer}" if answer else ""
    return replace(seen, answer=f"{opened}{seen.thoughts}{closed}"), False


def _whole(seen: Seen, tokenizer: Any) -> Seen:
    """Without ids and log-probabilities where some are missing: llama.cpp leaves out those of half
    a character.

    So too where an id is none of this vocabulary; the text is then read with it.
    """
    if seen.answer_ids is None:
        return seen
    if any(token >= len(tokenizer) for token in seen.answer_ids):
        return replace(seen, answer_ids=None, logprobs=None)
    shown = tokenizer.decode(list(seen.answer_ids), skip_special_tokens=True)
    return (
        seen
        if shown.strip() == seen.answer.strip()
        else replace(seen, answer_ids=None, logprobs=None)
    )
