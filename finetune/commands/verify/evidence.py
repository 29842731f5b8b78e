"""What is exchanged with a deployment: conversations and answers. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Messages = Sequence[Mapping[str, str]]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class EngineResponse:
    """One answer of a deployment, and what the engine shows of how it was made; None where it does
    not show it.
    """

    answer: str
    finish: str  # "stop", "length", "refused", or what else the engine calls it
    reasoning: str = ""  # what the server's reasoning parser took out of the answer
    status: int | None = None  # HTTP status of a refusal
    words: str = ""  # the deployment's own message of a refusal
    answer_tokens: int | None = None
    logprobs: tuple[float, ...] | None = None  # natural logarithms, one per token of the answer
    prompt_ids: Ids | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Prompt:
    """A conversation, and how training renders it up to the answer."""

    messages: Messages
    text: str
    ids: Ids


@dataclass(frozen=True)
class ScoredAnswer:
    """How likely a model finds an answer of n tokens.

    Attributes:
        logprobs: of each token.
        gaps: by how much the logit of the most likely token is above the answer's, at each
            position; all 0 for a greedy answer.
        end_gap: the same for the best end token after the answer.
    """

    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    end_gap: float


@dataclass
class Replay:
    """One prompt with the deployment's answers; and once the trained model was asked, its own."""

    number: int  # from 1
    prompt: Prompt
    response: EngineResponse
    again: str | None = None  # the second answer to the same conversation, where it was asked
    own_answer: str = ""
    own_ids: Ids = ()  # without the end token
    own_finish: str = ""
    scored: ScoredAnswer | None = None  # the deployment's answer, by the trained model
