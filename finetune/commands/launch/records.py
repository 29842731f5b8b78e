"""What nodes write into the store of their launch, checked before it is used: whoever reaches the
port can write there.

A record is JSON of one of the forms below. Where the launch has a secret
(FINETUNE_RENDEZVOUS_SECRET), each carries an HMAC-SHA256 over its key, the launch and attempt that
it belongs to, and its text, so that it can neither be made up nor be taken from elsewhere. Each
claim has a nonce of its own, which node 0 repeats when it gives out ranks: a record of an earlier
launch does not pass for an answer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

SECRET_NAME = "FINETUNE_RENDEZVOUS_SECRET"
# Shorter ones could be found by trying: what they sign can be read by whoever reaches the port.
SECRET_CHARACTERS = 16
LIMIT_BYTES = 1 << 20
_MOST_NODES, _MOST_PROCESSES = 1 << 16, 1 << 20

_Name = Annotated[str, StringConstraints(pattern=r"^[\w-]{1,64}$")]
_Host = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,255}$")]
_Rank = Annotated[int, Field(ge=0, lt=_MOST_PROCESSES)]


class Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class LaunchFacts(Record):
    """`launch`: which launch node 0 holds the store for."""

    id: _Name
    digest: _Name
    attempt: int = Field(ge=1, le=1 << 20)
    nodes: int = Field(ge=1, le=_MOST_NODES)
    host: _Host
    command: str = Field(max_length=1 << 16)


class Claim(Record):
    """`node/<n>`: a node is here."""

    host: _Host
    processes: int = Field(ge=1, le=1 << 16)
    pid: int = Field(ge=1)
    nonce: _Name


class Ranks(Record):
    """`ranks`: the first global rank of each node and, last, the world size; hosts and nonces of
    the claims by node.
    """

    first: list[_Rank] = Field(min_length=2, max_length=_MOST_NODES + 1)
    hosts: list[_Host] = Field(max_length=_MOST_NODES)
    nonces: list[_Name] = Field(max_length=_MOST_NODES)

    def answers(self, claim: Claim, rank: int, nodes: int) -> bool:
        """Whether these are ranks for so many nodes, given out after this node's claim was read."""
        if not len(self.first) - 1 == len(self.hosts) == len(self.nonces) == nodes:
            return False
        rising = self.first[0] == 0 and all(
            a < b for a, b in zip(self.first, self.first[1:], strict=False)
        )
        own = self.first[rank + 1] - self.first[rank]
        return rising and own == claim.processes and self.nonces[rank] == claim.nonce


class Missing(Record):
    """`ranks`, where there are none to be given out: nodes that did not come."""

    nodes: list[_Rank] = Field(min_length=1, max_length=_MOST_NODES)


class Ended(Record):
    """How a node's workers ended."""

    exit_code: int = Field(ge=-64, le=255)
    rank: _Rank  # the worker that ended first


class Decision(Record):
    """Whether a node wants another attempt."""

    restart: bool


class Alive(Record):
    """`alive/<n>`: a heartbeat, told from the one before by its number, with all that the node has
    to tell.
    """

    beat: int
    ended: Ended | None = None
    decision: Decision | None = None


class NotSigned(ValueError):
    """A record of the right form whose signature is not this launch's."""


R = TypeVar("R", bound=Record)


def seal(record: Record, *, key: str, launch: str, secret: str) -> str:
    """A record as it is written.

    Args:
        launch: what it belongs to: `<launch id>/<attempt>`; empty for `LaunchFacts`, which say it
            themselves.
        secret: empty for a launch without one.
    """
    text = record.model_dump_json()
    return json.dumps({"record": text, "mac": _mac(text, key, launch, secret)})


def unseal(raw: bytes, kind: type[R], *, key: str, launch: str, secret: str) -> R:
    """A record as it was written.

    Raises:
        ValueError: it does not have its form, or is too large; NotSigned for one that only lacks
            the right signature.
    """
    record, signed = read(raw, kind, key=key, launch=launch, secret=secret)
    if not signed:
        raise NotSigned(f"{key}: the signature is not of this launch")
    return record


def read(raw: bytes, kind: type[R], *, key: str, launch: str, secret: str) -> tuple[R, bool]:
    """The record, and whether its signature is right: without a secret, that it has none.

    Raises:
        ValueError: it does not have its form, or is too large.
    """
    if len(raw) > LIMIT_BYTES:
        raise ValueError(f"{key}: {len(raw)} bytes")
    try:
        content = json.loads(raw)
        text, mac = content["record"], content["mac"]
        if not isinstance(mac, str) or not mac.isascii():
            raise ValueError(f"{key}: no signature")
        record = kind.model_validate_json(text)
    except (KeyError, TypeError, RecursionError, ValidationError) as error:
        raise ValueError(f"{key}: not a record of this package") from error
    return record, hmac.compare_digest(mac, _mac(text, key, launch, secret))


def _mac(text: str, key: str, launch: str, secret: str) -> str:
    if not secret:
        return ""
    message = json.dumps([key, launch, text]).encode()
    return hmac.new(secret.encode(errors="surrogateescape"), message, hashlib.sha256).hexdigest()
