"""Requests to a server, its errors, and what of its words may be shown: short, and never the
key.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from finetune.errors import ConfigError, FinetuneError
from finetune.runtime.language import N_

LARGEST_ANSWER_BYTES = 64 << 20
SHOWN_CHARACTERS = 200  # of a server's own message, or name of something
# characters; a shorter key ("EMPTY", "x") stands for none, and its letters are in every answer
LEAST_SECRET = 8
# Of a prompt or a setting: its template raises, it is too long, log-probabilities are not known.
# All other errors are of the server or the request.
PROMPT_REFUSED = (400, 413, 422, 500, 501)
_MENDS = {
    401: N_("put the server's key into the variable that --api-key-variable names"),
    403: N_("put the server's key into the variable that --api-key-variable names"),
    404: N_("correct the path of --endpoint, or the name in --served-model"),
    429: N_("the server limits requests: ask less (--prompts), later, or raise its limit"),
}


def mend_of(status: int) -> str:
    """What to do about an HTTP status."""
    if status >= 500 and status not in PROMPT_REFUSED:
        return N_("the server, or a proxy before it, does not work: read its log, and ask again")
    return _MENDS.get(
        status, N_("check the deployed chat template, --served-model and the server's log")
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Refused(Exception):
    """The server answered with an error: its HTTP status (200 where it was no JSON), and its own
    words.
    """

    def __init__(self, status: int, words: str) -> None:
        self.status = status
        self.words = words


class Wire:
    """A server under its address. The key is in memory and in the requests' headers only.

    Args:
        url: with or without the /v1 at its end.

    Raises:
        ConfigError: the key cannot be sent.
    """

    def __init__(self, url: str, *, key_variable: str, timeout_seconds: float) -> None:
        parts = urlsplit(url)
        self.root = urlunsplit(
            (parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"), "", "")
        )
        self._key = os.environ.get(key_variable, "").strip()
        self._seconds = timeout_seconds
        if not (self._key.isascii() and self._key.isprintable()):
            what = f"the key in {key_variable} has characters that cannot be sent"
            raise ConfigError(
                what, "--api-key-variable", "set the variable to the key alone, on one line"
            )
        # No proxy of the environment in between for a server on this machine or network.
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))

    def json(self, path: str, body: Any = None) -> Any:
        """What a request gives.

        Raises:
            Refused: the server answered with an error, or with no JSON.
            FinetuneError: none answers.
        """
        headers = {"accept": "application/json", "content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        read = self._read(path, urllib.request.Request(self.root + path, data, headers))
        if len(read) > LARGEST_ANSWER_BYTES:
            raise FinetuneError(
                "the server's answer is too large", f"{self.root}{path}", "check --endpoint"
            )
        try:
            return json.loads(read)
        except (ValueError, RecursionError):
            raise Refused(200, "its answer is no JSON") from None

    def _read(self, path: str, request: urllib.request.Request) -> bytes:
        try:
            with self._opener.open(request, timeout=self._seconds) as response:
                return bytes(response.read(LARGEST_ANSWER_BYTES + 1))
        except urllib.error.HTTPError as error:
            with error:
                try:
                    words = _words(error.read(1 << 16))
                except (OSError, http.client.HTTPException):
                    words = ""
                raise Refused(error.code, self.shown(words)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = self.shown(
                str(getattr(error, "reason", None) or error or type(error).__name__)
            )
            fix = (
                "start the server, or correct --endpoint; --timeout-seconds is the longest silence"
            )
            raise FinetuneError(f"no server answers: {reason}", self.root, fix) from None

    def foreign(self, path: str) -> FinetuneError:
        """The error for an answer that is of another protocol."""
        fix = "check --endpoint: is it a server of that protocol?"
        return FinetuneError(
            "the server's answer is not of the OpenAI protocol", f"{self.root}{path}", fix
        )

    def shown(self, words: str) -> str:
        """A name or message of the server, short and without the key: it may write the request back
        into it.
        """
        return _encodable(words.replace(self._key, "***") if self._key else words)[
            :SHOWN_CHARACTERS
        ]

    def text(self, text: str) -> str:
        """An answer or a prompt, whole."""
        return _encodable(
            text.replace(self._key, "***") if len(self._key) >= LEAST_SECRET else text
        )


def _encodable(text: str) -> str:
    """Without lone surrogates, which no tokenizer takes and no terminal."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _words(body: bytes) -> str:
    """The message of an error."""
    try:
        found = json.loads(body)
        error = found.get("error", found.get("detail", "")) if isinstance(found, dict) else ""
        return str(error.get("message", "") if isinstance(error, dict) else error)
    except (ValueError, RecursionError):
        return ""
