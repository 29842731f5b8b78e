"""What every HTTP request must pass before the application sees it, and the headers of every
response.

A server on loopback is reachable by every web page that its user visits: so the Host must be one of
ours (a page could have its own name point here), the Origin must be ours, and a body must say that
it is JSON, which no form can. There are no CORS headers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio

from finetune.commands.serve.protocol import ApiError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for"
    " 'script'; trusted-types 'none'"
)
RESPONSE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
OPEN_PATHS = frozenset(("/", "/app.js", "/markdown.js", "/style.css", "/icon.svg", "/health"))
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:/?#@\\]+))(?::[0-9]{0,5})?")
LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


@dataclass(frozen=True)
class Rules:
    """What a request may be.

    Attributes:
        hosts: names that the Host header may say.
        any_address: whether it may be any IP address too (a name of an attacker's can never be
            one).
        token: what `Authorization: Bearer` must say; None: nothing is asked.
        max_body_bytes: of one request.
        body_seconds: how long a body may take to arrive.
    """

    hosts: frozenset[str] = LOOPBACK_NAMES
    any_address: bool = False
    token: str | None = None
    max_body_bytes: int = 1 << 20
    body_seconds: float = 10.0


class Guard:
    """ASGI middleware with the rules."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], rules: Rules
    ) -> None:
        self.app = app
        self.rules = rules
        self._token_digest = (
            None if rules.token is None else hashlib.sha256(rules.token.encode()).digest()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        guarded_send = _with_headers(send)
        try:
            headers = _single_headers(scope)
            self._check_host(headers)
            self._check_origin(scope, headers)
            self._check_token(scope, headers)
            body = await self._body(scope, headers, receive)
        except ApiError as error:
            await _send_error(guarded_send, error)
            return
        if body is None:  # the client left
            return
        await self.app(scope, _replay(body, receive), guarded_send)

    def _check_host(self, headers: dict[str, str]) -> None:
        name = _host_name(headers.get("host", ""))
        if name is None:
            raise ApiError(400, "the Host header is missing or wrong", code="invalid_host")
        if name not in self.rules.hosts and not (self.rules.any_address and _is_address(name)):
            raise ApiError(421, "this server does not answer for that host", code="unknown_host")

    def _check_origin(self, scope: Scope, headers: dict[str, str]) -> None:
        origin = headers.get("origin")
        if origin is not None:
            try:
                parts = urlsplit(origin)
            except ValueError:
                parts = urlsplit("")
            if (
                parts.scheme not in ("http", "https")
                or parts.netloc.lower() != headers["host"].lower()
            ):
                raise ApiError(403, "requests from other origins are refused", code="cross_origin")
        navigating = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigating:
            raise ApiError(403, "requests from other sites are refused", code="cross_origin")

    def _check_token(self, scope: Scope, headers: dict[str, str]) -> None:
        if self._token_digest is None or (
            scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        ):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode(errors="surrogateescape")).digest()
        if not hmac.compare_digest(digest, self._token_digest) or kind.lower() != "bearer":
            raise ApiError(
                401,
                "the token is missing or wrong; send Authorization: Bearer TOKEN",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> bytes | None:
        """The whole body; None if the client left."""
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[
            0
        ].strip().lower() not in ("application/json",):
            raise ApiError(
                415, "send Content-Type: application/json", code="unsupported_media_type"
            )
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy might have taken the other.
            raise ApiError(400, "the body has two lengths", code="invalid_header")
        if not has_body:
            return b""
        limit = self.rules.max_body_bytes
        too_large = ApiError(
            413, f"the body is larger than {limit} bytes", code="request_too_large"
        )
        if (
            headers.get("content-length", "0").isdigit()
            and int(headers.get("content-length", "0")) > limit
        ):
            raise too_large
        body = bytearray()
        with anyio.move_on_after(self.rules.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
        seconds = self.rules.body_seconds
        raise ApiError(
            408, f"the body took longer than {seconds:g} seconds", code="request_timeout"
        )


def _single_headers(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name.

    Raises:
        ApiError: one that must be single comes twice, so that two readers could see two requests.
    """
    found: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").lower()
        if name in found and name in (
            "host",
            "origin",
            "authorization",
            "content-length",
            "content-type",
        ):
            raise ApiError(400, f"the header {name} comes twice", code="invalid_header")
        found[name] = raw_value.decode("latin-1")
    return found


def _host_name(host: str) -> str | None:
    """The name in `name:port` or `[address]:port`."""
    # Not by urlsplit: some Pythons' finds ::1 in [::1].evil.com.
    found = _HOST.fullmatch(host)
    if found is None or (found["address"] and not _is_address(found["address"])):
        return None
    return (found["address"] or found["name"]).rstrip(".").lower() or None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message.get("headers", [])}
            extra = [
                (name.encode(), value.encode())
                for name, value in RESPONSE_HEADERS.items()
                if name.encode() not in there
            ]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes: the client's leaving."""
    given = False

    async def receiving() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

    return receiving


async def _send_error(send: Send, error: ApiError) -> None:
    """The error, after which the connection ends: what was refused is not read."""
    body = json.dumps(error.body).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    headers |= error.headers
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
