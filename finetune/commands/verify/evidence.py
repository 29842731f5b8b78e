"""What a deployment shows of one prompt, and what a model of ours says of the same. Needs no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Seen:
    """One answer of a deployment, and what it lets see of how it came to it; None where it does not
    say.
    """

    answer: str
    finish: str  # "stop", "length", "refused", or what else the engine calls it
    thoughts: str = ""  # what the server's reasoning parser took out of the answer
    status: int | None = None  # of HTTP, where it refused
    words: str = ""  # the deployment's own, where it refused
    answer_tokens: int | None = None
    answer_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None  # natural logarithms, of the tokens of the answer
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None


class Deployment(Protocol):
    """Another engine with a model in it.

    Attributes:
        name: for people, without keys.
        facts: what it says of itself, as plain JSON.
    """

    name: str
    facts: dict[str, Any]

    def chat(self, messages: Messages, max_new_tokens: int) -> Seen:
        """The greedy answer to a conversation, rendered there."""

    def complete(self, ids: Sequence[int], text: str, max_new_tokens: int) -> Seen | None:
        """The greedy continuation of a prompt that is rendered here; None where it takes none."""


@dataclass(frozen=True)
class Prompt:
    """A conversation, and how training renders it up to the answer."""

    messages: Messages
    text: str
    ids: tuple[int, ...]


@dataclass
class Replay:
    """What one prompt gave: the trained model's own answer, and what the deployment answered."""

    number: int  # from 1
    prompt: Prompt
    own_answer: str
    own_ids: tuple[int, ...]  # with the end token where there is one
    own_finish: str
    seen: Seen
    again: str | None  # the deployment's answer to the same a second time, where it was asked
    raw: Seen | None  # its continuation of our own rendering
    # whether a reasoning parser took what is no thought, or kept thoughts back
    parsed: bool = False


@dataclass(frozen=True)
class Said:
    """How a model of ours takes an answer of n tokens.

    Attributes:
        logprobs: of each token.
        gaps: by how much the likeliest token is likelier at each place; all 0 for a greedy answer.
        end_gap: the same of the best end token behind the answer.
    """

    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    end_gap: float


@dataclass(frozen=True)
class Finding:
    """A difference with its cause.

    Attributes:
        name: of the cause, one of `causes.CAUSES`.
        what: what is wrong, and `detail` which of its forms; `evidence` what was seen; `mend` how
            to end it.
        prompts: numbers of the prompts that differ, from 1.
        explained: how many of all prompts the deployment answers as it would with this fault.
    """

    name: str
    what: str
    mend: str
    detail: str = ""
    evidence: tuple[str, ...] = ()
    prompts: tuple[int, ...] = ()
    explained: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
