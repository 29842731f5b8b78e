"""The prompts through both: the trained model's own answers, and those of the deployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from finetune.commands.verify.evidence import Deployment, Prompt, Replay
from finetune.commands.verify.reference import Reference
from finetune.inference.greedy import answering


def replay(
    reference: Reference,
    deployment: Deployment,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    on_progress: Callable[[int], None] = lambda count: None,
) -> list[Replay]:
    """Ask both everything.

    Raises:
        FinetuneError: the deployment refuses a conversation, or ends.
    """
    model = reference.model()
    with answering(model, model):
        own = reference.answers(prompts, max_new_tokens)
    found = []
    for prompt, ids in zip(prompts, own, strict=True):
        seen = deployment.chat(prompt.messages, max_new_tokens)
        again = deployment.chat(prompt.messages, max_new_tokens)
        ended = bool(ids) and ids[-1] in reference.stop_ids
        text = reference.tokenizer.decode(list(ids[:-1] if ended else ids), skip_special_tokens=True)
        raw = deployment.complete(prompt.ids, prompt.text, max_new_tokens)
        found.append(Replay(prompt, text, ids, "stop" if ended else "length", seen, again.answer, raw))
        on_progress(1)
    return found
