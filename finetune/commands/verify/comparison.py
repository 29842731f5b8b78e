"""Compare what a deployment read and answered with the trained model, and report the first
difference.

Prompts are compared as ids or by their lengths, as far as the engine shows them. A greedy answer
takes the most likely token at every position, so an answer is scored by the trained model as it
came: each token must be its most likely one, and log-probabilities that the engine gives must be
its own, both up to the rounding of the deployed dtype.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from finetune.commands.verify.endpoint import PROMPT_REFUSED, fix_for_status
from finetune.commands.verify.evidence import (
    EngineResponse,
    Ids,
    Prompt,
    Replay,
    ScoredAnswer,
)
from finetune.data.tools import squeezed
from finetune.runtime.language import N_, _
from finetune.runtime.progress import ProgressLine

if TYPE_CHECKING:
    from finetune.commands.verify.endpoint import Endpoint
    from finetune.commands.verify.merged import MergedFolder
    from finetune.commands.verify.reference import Reference

# Name of a finding -> what is wrong, and how to fix it.
FINDINGS = {
    "refused": (
        N_("the deployment refuses conversations"),
        N_(
            "use the run's chat_template.jinja: the deployed one refuses what training has rendered"
        ),
    ),
    "template": (
        N_("the engine reads another prompt than the one of training"),
        N_(
            "see the first difference: use chat_template.jinja, tokenizer.json and"
            " tokenizer_config.json of the run, add BOS once, pass all turns, and raise the context"
            " if prompts are cut"
        ),
    ),
    "adapter_left_out": (
        N_("the base model answers: the adapter is not applied"),
        N_(
            "name the adapter in the request (vLLM: --lora-modules), or serve the folder that merge"
            " wrote"
        ),
    ),
    "reasoning_parser": (
        N_("a reasoning parser takes text out of the answers that training has in them"),
        N_(
            "serve without it: no --reasoning-parser (vLLM, SGLang), --reasoning-format none"
            " (llama.cpp), think false (Ollama)"
        ),
    ),
    "not_greedy": (
        N_("the answer to the same prompt changes: the server draws it, in spite of temperature 0"),
        N_("let the server take temperature 0: no sampling defaults that override the request"),
    ),
    "unknown": (
        N_("the answers are not the trained model's"),
        N_(
            "see the first difference: compare weights, adapter, rope parameters, dtype,"
            " quantization, end tokens, limits and penalties; --merged FOLDER tells files from"
            " engine"
        ),
    ),
}

# Prompts; a server that samples its answers would hardly sample all of them alike.
ASKED_TWICE = 4
# What the kernels of another engine change in float32, with room, in natural logarithms.
MIN_LOGPROB_TOLERANCE, MIN_GAP_TOLERANCE = 0.005, 0.02
# Times the simulated rounding error: the engine's own is as large as that, and which of its results
# are rounded depends on the layers that it fuses. A gap is the difference of two logits, each with
# the error of its own, and the largest error of another computation may be twice as large.
MEAN_FACTOR, PEAK_FACTOR = 3.0, 4.0
CUT_TOKENS = 3  # at the end of a text that was cut: it may be cut within a token


@dataclass(frozen=True)
class Tolerance:
    """Differences that a right deployment may have, in natural logarithms."""

    logprob: float  # mean over an answer
    gap: float  # of any token


def ask(
    deployment: Endpoint | MergedFolder, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Replay]:
    """Return the deployment's answers.

    Raises:
        FinetuneError: the deployment ends, or is no such server.
    """
    replays: list[Replay] = []
    line, start = ProgressLine(len(prompts), counted="prompt"), time.monotonic()
    try:
        for number, prompt in enumerate(prompts, 1):
            status = replays[-1].response.status if replays else None
            if status is not None and status not in PROMPT_REFUSED:
                # It refuses requests, not this prompt: the next ones will fare no better.
                replays.append(replace(replays[-1], number=number, prompt=prompt))
                continue
            replay = Replay(number, prompt, deployment.chat(prompt.messages, max_new_tokens))
            if replay.response.finish != "refused" and number <= ASKED_TWICE:
                second = deployment.chat(prompt.messages, max_new_tokens)
                # A limit of requests may refuse it.
                replay.again = None if second.finish == "refused" else second.answer
            replays.append(replay)
            left = (time.monotonic() - start) / number * (len(prompts) - number)
            line.update(
                number,
                stage="",
                facts="",
                eta_seconds=left,
            )
    finally:
        line.close()
    return replays


def refusals(refused: Sequence[Replay]) -> list[dict[str, Any]]:
    """Return the findings for conversations that the deployment does not answer, one per fix."""
    by_fix = dict[str, list[Replay]]()
    for replay in refused:
        status = replay.response.status
        fix = FINDINGS["refused"][1] if status is None else fix_for_status(status)
        by_fix.setdefault(fix, []).append(replay)
    return [
        _finding("refused", same, detail=same[0].response.words) | {"mend": _(fix)}
        for fix, same in by_fix.items()
    ]


def _finding(
    name: str, replays: Sequence[Replay], detail: str = "", evidence: Sequence[str] = ()
) -> dict[str, Any]:
    what, fix = FINDINGS[name]
    return {
        "name": name,
        "what": _(what),
        "detail": detail,
        "mend": _(fix),
        "evidence": list(evidence),
        "prompts": [replay.number for replay in replays],
    }


def compare(
    reference: Reference, replays: Sequence[Replay], max_new_tokens: int, dtype: str
) -> dict[str, Any]:
    """Compare the answers; return what was compared and found, as plain JSON.

    Args:
        dtype: that the deployment is to have.
    """
    for replay in replays:
        _add_own_answer(reference, replay, max_new_tokens)
    own = [(replay.prompt.ids, replay.own_ids) for replay in replays]
    given = [(replay.prompt.ids, _answer_ids(reference, replay)) for replay in replays]
    exact, scores = reference.scores(own), reference.scores(given)
    base_scores = reference.scores(given, base=True)
    tolerance = _tolerance(exact, reference.rounded_scores(own, dtype))
    other_prompts, others, parsed, by_base = [], [], [], []
    for replay, scored, base in zip(replays, scores, base_scores, strict=True):
        replay.scored = scored
        if not _reads_prompt(replay):
            other_prompts.append(replay)
            continue
        by_base.append(_passes(replay, base, tolerance, max_new_tokens))
        if not _passes(replay, scored, tolerance, max_new_tokens):
            others.append(replay)
        elif replay.response.reasoning and "think>" not in replay.prompt.text + replay.own_answer:
            parsed.append(replay)
    is_base = reference.source.adapter is not None and all(by_base)
    name = "adapter_left_out" if is_base else "unknown"
    twice = [replay.again != replay.response.answer for replay in others if replay.again]
    if 2 * sum(twice) > len(twice):
        name = "not_greedy"
    shown = {
        "token_ids": "prompt_ids",
        "prompt_lengths": "prompt_tokens",
        "answers": "answer",
        "logprobs": "logprobs",
    }
    found = {
        "reasoning_parser": parsed,
        "template": other_prompts,
        name: others,
    }
    return {
        "same": len(replays) - len(other_prompts) - len(others),
        "compared": {
            name: sum(getattr(replay.response, field) is not None for replay in replays)
            for name, field in shown.items()
        },
        "deployed_dtype": dtype,
        "tolerance": asdict(tolerance),
        "shows_adapter": not is_base,
        "findings": [
            _finding(name, wrong, evidence=_evidence(wrong[0], tolerance, reference.tokenizer))
            for name, wrong in found.items()
            if wrong
        ],
    }


def _add_own_answer(reference: Reference, replay: Replay, max_new_tokens: int) -> None:
    """Let the trained model answer, and put the deployment's reasoning back into its answer."""
    response = replay.response
    ids = reference.answer(replay.prompt.ids, max_new_tokens)
    ended = ids[-1] in reference.stop_ids
    replay.own_ids = ids[:-1] if ended else ids
    replay.own_finish = "stop" if ended else "length"
    replay.own_answer = reference.tokenizer.decode(replay.own_ids, skip_special_tokens=True)
    if response.reasoning:
        whole = with_reasoning(response, replay.own_answer)
        replay.again = whole if replay.again == response.answer else replay.again
        replay.response = replace(response, answer=whole)


def _answer_ids(reference: Reference, replay: Replay) -> Ids:
    """Return the tokens of the deployment's answer; without the last ones if the text was cut."""
    response = replay.response
    if response.answer.strip() == replay.own_answer.strip():
        return replay.own_ids
    text = response.answer.rstrip("\ufffd")
    ids = tuple(reference.tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids[:-2] if response.finish == "length" and len(ids) > 2 else ids


def _passes(
    replay: Replay, scored: ScoredAnswer, tolerance: Tolerance, max_new_tokens: int
) -> bool:
    """Return whether the deployment's answer is the greedy one of the model that scored it."""
    response, count = replay.response, len(scored.gaps)
    if not response.answer.strip() and replay.own_answer.strip():
        return False
    if response.finish == "stop":
        ends = scored.end_gap <= tolerance.gap
    elif response.finish == "length":
        # A text may have fewer tokens than it was made of.
        is_whole = count + CUT_TOKENS >= max_new_tokens
        length = response.answer_tokens or count + CUT_TOKENS
        ends = length >= max_new_tokens and (is_whole or scored.end_gap > 0)
    else:  # a filter, a failure
        return False
    apart = _apart(response, scored)
    return (
        ends
        and max(scored.gaps, default=0.0) <= tolerance.gap
        and sum(apart) <= tolerance.logprob * len(apart)
    )


def _evidence(replay: Replay, tolerance: Tolerance, tokenizer: Any) -> list[str]:
    """Return the first difference of a conversation, one line for each kind of evidence."""
    response, prompt_ids, lines = replay.response, replay.prompt.ids, list[str]()
    prompt, answer = f"prompt {replay.number}", f"answer {replay.number}"
    if response.prompt_ids is not None and response.prompt_ids != prompt_ids:
        place = len(commonprefix([response.prompt_ids, prompt_ids]))
        there, ours = (
            tokenizer.decode(list(ids[place : place + 8]))
            for ids in (response.prompt_ids, prompt_ids)
        )
        lines.append(f"{prompt}, token {place + 1}: {there!r} there, {ours!r} in training")
    elif response.prompt_tokens not in (None, len(prompt_ids)):
        lengths = f"{response.prompt_tokens} tokens there, {len(prompt_ids)} in training"
        lines.append(f"{prompt}: {lengths}")
    if response.answer.strip() != replay.own_answer.strip():
        place = len(commonprefix([response.answer, replay.own_answer]))
        part = slice(max(0, place - 20), place + 40)
        there, ours = response.answer[part], replay.own_answer[part]
        lines.append(f"{answer}, character {place + 1}: {there!r} there, {ours!r} trained")
    if response.finish != replay.own_finish:
        lines.append(f"{answer} ends by {response.finish!r}, as trained by {replay.own_finish!r}")
    assert replay.scored is not None
    apart = _apart(response, replay.scored)
    if sum(apart) > tolerance.logprob * len(apart):
        place = next(at for at, value in enumerate(apart) if value > tolerance.logprob)
        lines.append(
            f"{answer}, token {place + 1}: log-probability {response.logprobs[place]:.3f} there,"  # type: ignore[index]
            f" {replay.scored.logprobs[place]:.3f} trained; on average they differ by"
            f" {sum(apart) / len(apart):.3f}, {tolerance.logprob:.3f} is allowed"
        )
    return lines


def _tolerance(exact: Sequence[ScoredAnswer], rounded: Sequence[ScoredAnswer]) -> Tolerance:
    """Return what rounding changes in the trained model's answers, plus a margin for another
    engine's rounding.
    """
    mean, peak = 0.0, 0.0
    for one, other in zip(exact, rounded, strict=True):
        apart = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        mean = max(mean, sum(apart) / max(1, len(apart)))
        peak = max(peak, *apart, 0.0)
    return Tolerance(
        max(MIN_LOGPROB_TOLERANCE, MEAN_FACTOR * mean), max(MIN_GAP_TOLERANCE, PEAK_FACTOR * peak)
    )


def with_reasoning(response: EngineResponse, own: str) -> str:
    """Return the answer as the model wrote it, given the trained model's own answer."""
    reasoning, answer = response.reasoning, response.answer.strip()
    if squeezed(reasoning + answer) == squeezed(own.replace("<think>", "").replace("</think>", "")):
        return own
    opening = "<think>\n" if own.startswith("<think>") else ""
    return opening + reasoning + (f"\n</think>\n\n{answer}" if answer else "")


def _reads_prompt(replay: Replay) -> bool:
    """Return whether the engine has read the prompt of training, given what it reports."""
    response, ids = replay.response, replay.prompt.ids
    if response.prompt_ids is not None:
        return response.prompt_ids == ids
    return response.prompt_tokens in (None, len(ids))


def _apart(response: EngineResponse, scored: ScoredAnswer) -> list[float]:
    """Return the differences of log-probabilities, token by token; empty if the deployment reports
    none for these tokens.
    """
    # The end token may have one too.
    if response.logprobs is None or len(response.logprobs) - len(scored.logprobs) not in (0, 1):
        return []
    return [abs(a - b) for a, b in zip(response.logprobs, scored.logprobs, strict=False)]
