"""The prompts through both: the trained model's own answers, and those of the deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from finetune.commands.verify.evidence import Deployment, Prompt, Replay, Seen
from finetune.commands.verify.reference import Reference
from finetune.errors import FinetuneError
from finetune.inference.greedy import answering

ASKED_TWICE = 4  # prompts, of which a server that draws its answers would hardly draw all alike


def replay(
    reference: Reference, deployment: Deployment, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Replay]:
    """Ask both everything.

    Raises:
        FinetuneError: the deployment refuses every conversation, or ends.
    """
    model = reference.model()
    with answering(model, model):
        own = reference.answers(prompts, max_new_tokens)
    found: list[Replay] = []
    for prompt, ids in zip(prompts, own, strict=True):
        seen = _whole(deployment.chat(prompt.messages, max_new_tokens), reference.tokenizer)
        again = deployment.chat(prompt.messages, max_new_tokens).answer if len(found) < ASKED_TWICE else None
        ended = bool(ids) and ids[-1] in reference.stop_ids
        text = reference.tokenizer.decode(list(ids[:-1] if ended else ids), skip_special_tokens=True)
        raw = deployment.complete(prompt.ids, prompt.text, max_new_tokens)
        raw = None if raw is None else _whole(raw, reference.tokenizer)
        found.append(Replay(prompt, text, ids, "stop" if ended else "length", seen, again, raw))
    if found and all(one.seen.finish == "refused" for one in found):
        what = f"the deployment refuses every conversation: {deployment.facts.get('refused', '')}"
        raise FinetuneError(what, deployment.name, "check its chat template, --served-model and its log")
    return found


def _whole(seen: Seen, tokenizer: Any) -> Seen:
    """Without ids and log-probabilities where some are missing: llama.cpp leaves out those of half a character.

    So too where an id is none of this vocabulary; the text is then read with it.
    """
    if seen.answer_ids is None:
        return seen
    if any(token >= len(tokenizer) for token in seen.answer_ids):
        return replace(seen, answer_ids=None, logprobs=None)
    shown = tokenizer.decode(list(seen.answer_ids), skip_special_tokens=True)
    return seen if shown.strip() == seen.answer.strip() else replace(seen, answer_ids=None, logprobs=None)
