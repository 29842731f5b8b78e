"""How the next token is chosen: settings of one request, checked. Needs no torch."""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass, replace
from typing import Any

from finetune.errors import ConfigError

MAX_STOPS = 8
MAX_STOP_CHARACTERS = 256
# of what counts tokens: beyond any vocabulary or context, and a number that every tensor holds
MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 10
MIN_PENALTY, MAX_PENALTY = 0.01, 10


@dataclass(frozen=True)
class Sampling:
    """Settings of one answer.

    Attributes:
        max_new_tokens: maximum tokens of the answer, its end included; None: as many as the context
            leaves room for.
        temperature: 0 is greedy: always the most likely token. Otherwise logits are divided by it
            and a token is drawn.
        top_p: draw from the smallest set of tokens with this total probability; 1 for all.
        top_k: draw from this many most likely tokens; 0 for all.
        repetition_penalty: above 1, tokens of the prompt and the answer so far become less likely;
            1 for none.
        seed: the same seed gives the same answer, alone or in a batch; None draws a seed.
        stop: strings that end the answer; they are not part of it.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = (
            (
                "max_new_tokens",
                self.max_new_tokens is None or 1 <= self.max_new_tokens <= MAX_TOKENS,
                f"from 1 to {MAX_TOKENS}",
            ),
            (
                "temperature",
                0 <= self.temperature <= MAX_TEMPERATURE,
                f"from 0 to {MAX_TEMPERATURE}",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k <= MAX_TOKENS, f"from 0 (all tokens) to {MAX_TOKENS}"),
            (
                "repetition_penalty",
                MIN_PENALTY <= self.repetition_penalty <= MAX_PENALTY,
                f"from {MIN_PENALTY} to {MAX_PENALTY}; 1 is none",
            ),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            (
                "stop",
                len(self.stop) <= MAX_STOPS
                and all(0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop),
                f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters",
            ),
        )
        for name, fine, rule in checks:
            if not fine:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; it must be {rule}",
                    name,
                    f"set {name} {rule}",
                )

    def changed(self, **changes: Any) -> Sampling:
        """These settings with those that are given and not None."""
        return replace(
            self, **{name: value for name, value in changes.items() if value is not None}
        )


def default_sampling(settings: Any) -> Sampling:
    """Return the sampling that a model's generation_config.json requests."""
    penalty = float(settings.repetition_penalty or 1)
    if not settings.do_sample:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=float(1 if settings.temperature is None else settings.temperature),
        top_p=float(settings.top_p or 1),
        top_k=int(50 if settings.top_k is None else settings.top_k),
        repetition_penalty=penalty,
    )


class Draws:
    """The random numbers of one answer: a pure function of (seed, position), so no batch or device
    changes them.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = secrets.randbits(63) if seed is None else seed

    def key(self, position: int) -> tuple[int, int]:
        """Two 32-bit numbers for the answer's token at this position."""
        digest = hashlib.blake2b(struct.pack("<qq", self.seed, position), digest_size=8).digest()
        return struct.unpack("<II", digest)
