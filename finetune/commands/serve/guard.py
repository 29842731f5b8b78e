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
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.commands.serve.protocol import ApiError

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
# Headers of which a second one would let two readers see two requests.
_SINGLE = ("host", "origin", "authorization", "content-length", "content-type")
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

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self.rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        try:
            for name in _SINGLE:
                if len(headers.getlist(name)) > 1:
                    raise ApiError(400, f"the header {name} comes twice", code="invalid_header")
            self._check_host(headers)
            self._check_origin(scope, headers)
            self._check_token(scope, headers)
            body = await self._body(scope, headers, receive)
        except ApiError as error:
            # The connection ends after it: what was refused is not read.
            error.headers["connection"] = "close"
            await error.response()(scope, receive, guarded_send)
        except ClientDisconnect:
            pass
        else:
            await self.app(scope, _replay(body, receive), guarded_send)

    def _check_host(self, headers: Headers) -> None:
        name = _host_name(headers.get("host", ""))
        if name is None:
            raise ApiError(400, "the Host header is missing or wrong", code="invalid_host")
        if name not in self.rules.hosts and not (self.rules.any_address and _is_address(name)):
            raise ApiError(421, "this server does not answer for that host", code="unknown_host")

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
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

    def _check_token(self, scope: Scope, headers: Headers) -> None:
        is_open = scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        if self.rules.token is None or is_open:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if not _same(given.strip(), self.rules.token) or kind.lower() != "bearer":
            raise ApiError(
                401,
                "the token is missing or wrong; send Authorization: Bearer TOKEN",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body.

        Raises:
            ClientDisconnect: the client left.
        """
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise ApiError(
                415, "send Content-Type: application/json", code="unsupported_media_type"
            )
        length = headers.get("content-length", "0")
        if "transfer-encoding" not in headers:
            if length == "0":
                return b""
        elif "content-length" in headers:
            # A proxy might have taken the other.
            raise ApiError(400, "the body has two lengths", code="invalid_header")
        limit = self.rules.max_body_bytes
        too_large = ApiError(
            413, f"the body is larger than {limit} bytes", code="request_too_large"
        )
        if length.isdigit() and int(length) > limit:
            raise too_large
        body = bytearray()
        seconds = self.rules.body_seconds
        with anyio.move_on_after(seconds):
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > limit:
                    raise too_large
            return bytes(body)
        raise ApiError(
            408, f"the body took longer than {seconds:g} seconds", code="request_timeout"
        )


def _same(given: str, token: str) -> bool:
    """Compare in a time that says nothing about the token."""
    given_digest, digest = (
        hashlib.sha256(text.encode(errors="surrogateescape")).digest() for text in (given, token)
    )
    return hmac.compare_digest(given_digest, digest)


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


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body as one message, then waits for the client to leave."""
    parts = [body]

    async def receiving() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

    return receiving
