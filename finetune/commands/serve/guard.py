"""Checks of every HTTP request before the application receives it, and headers of every response.

Every web page that the user visits can reach a server on loopback. So the Host must be one of the
server's own, because a page could resolve its own name to this address. The Origin must be the
server's. A body must be declared as JSON, which a form cannot do. There are no CORS headers.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import re

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.commands.serve.options import ServeOptions
from finetune.commands.serve.protocol import LINGER_BYTES, LINGER_SECONDS, ApiError

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
# If one of these came twice, a proxy and this server could read two different requests.
_SINGLE = ("host", "origin", "authorization", "content-length", "content-type")
LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


class Guard:
    """ASGI middleware with these rules.

    Args:
        token: required as `Authorization: Bearer`; None: no request needs one.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, token: str | None) -> None:
        self.app = app
        self.options = options
        self.token = token
        self.hosts = LOOPBACK_NAMES | {name.lower() for name in (options.host, *options.allow_host)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            await _refuse(error, scope, receive, guarded_send)
        except ClientDisconnect:
            pass
        else:
            await self.app(scope, _replay(body, receive), guarded_send)

    def _check_host(self, headers: Headers) -> None:
        name = _host_name(headers.get("host", ""))
        if name is None:
            raise ApiError(400, "the Host header is missing or wrong", code="invalid_host")
        # A name that an attacker controls is never an IP address.
        is_ours = name in self.hosts or (not self.options.is_loopback and _is_address(name))
        if not is_ours:
            raise ApiError(421, "this server does not answer for that host", code="unknown_host")

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        own_origins = [f"{scheme}://{headers['host']}".lower() for scheme in ("http", "https")]
        if headers.get("origin", own_origins[0]).lower() not in own_origins:
            raise ApiError(403, "requests from other origins are refused", code="cross_origin")
        navigating = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigating:
            raise ApiError(403, "requests from other sites are refused", code="cross_origin")

    def _check_token(self, scope: Scope, headers: Headers) -> None:
        is_open = scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        if self.token is None or is_open:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # in a time that does not depend on the token's characters
        is_same = hmac.compare_digest(given.strip().encode(), self.token.encode())
        if scheme.lower() != "bearer" or not is_same:
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
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy might have used the other.
            raise ApiError(400, "the body has two lengths", code="invalid_header")
        limit = self.options.max_body_bytes
        too_large = ApiError(
            413, f"the body is larger than {limit} bytes", code="request_too_large"
        )
        if int(headers.get("content-length", "0")) > limit:
            raise too_large
        body = bytearray()
        seconds = self.options.body_seconds
        with anyio.move_on_after(seconds):
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > limit:
                    raise too_large
            return bytes(body)
        raise ApiError(
            408, f"the body took longer than {seconds:g} seconds", code="request_timeout"
        )


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error, and close the connection once the client has had time to read it."""
    error.headers["connection"] = "close"
    response = error.response()
    start = {"type": "http.response.start", "status": error.status}
    await send({**start, "headers": response.raw_headers})
    await send(
        {
            "type": "http.response.body",
            "body": response.body,
            "more_body": True,
        }
    )
    discarded = 0
    with anyio.move_on_after(LINGER_SECONDS), contextlib.suppress(ClientDisconnect):
        async for part in Request(scope, receive).stream():
            discarded += len(part)
            if discarded > LINGER_BYTES:
                break
    await send(
        {
            "type": "http.response.body",
            "body": b"",
            "more_body": False,
        }
    )


def _host_name(host: str) -> str | None:
    """Return the name in `name:port` or `[address]:port`, None if it is neither."""
    # Not urlsplit: in some versions of Python it finds ::1 in [::1].evil.com.
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
    messages = [
        {
            "type": "http.request",
            "body": body,
            "more_body": False,
        }
    ]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
