"""A server of the OpenAI protocol as a deployment, and what some engines show in addition.

| engine | recognized by | rendered prompt |
|---|---|---|
| vLLM, vllm-ascend | `version` at /version | ids from /tokenize, which takes messages |
| llama.cpp's server | `default_generation_settings` at /props | text from /apply-template, ids of
it from /tokenize |
| Ollama | `version` at /api/version | the number of its tokens only |
| any other | | the number of its tokens, where `usage` has it |
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from finetune.commands.verify.evidence import EngineResponse, Messages
from finetune.errors import ConfigError, FinetuneError
from finetune.runtime.language import N_

SHOWN_CHARACTERS = 200  # of a server's own message, or the name of something
SHOWN_MODELS = 8
# characters; a shorter key ("EMPTY", "x") is a placeholder, and its letters are in every answer
MIN_SECRET = 8
# Statuses about a prompt or a setting: its template raises, it is too long, log-probabilities are
# not supported. All other errors concern the server or the whole request.
PROMPT_REFUSED = (400, 413, 422, 500, 501)
_FIXES = {
    401: N_("put the server's key into the variable that --api-key-variable names"),
    403: N_("put the server's key into the variable that --api-key-variable names"),
    404: N_("correct the path of --endpoint, or the name in --served-model"),
    429: N_("the server limits requests: ask less (--prompts), later, or raise its limit"),
}
_ENGINE_FACTS = (
    "dtype",
    "ftype",
    "model_ftype",
    "n_ctx",
    "build_info",
)


def fix_for_status(status: int) -> str:
    """Return the fix for an HTTP status."""
    if status >= 500 and status not in PROMPT_REFUSED:
        return N_("the server, or a proxy before it, does not work: read its log, and ask again")
    return _FIXES.get(
        status, N_("check the deployed chat template, --served-model and the server's log")
    )


# ---------------------------------------------------------------- form of the answers


class _Form(BaseModel):
    """A part of the protocol; what it does not name is ignored."""

    model_config = ConfigDict(strict=True)


class _Token(_Form):
    token: str = ""
    logprob: float | None = None


class _Logprobs(_Form):
    content: list[_Token] | None = None


class _Message(_Form):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(_Form):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None

    @property
    def tokens(self) -> list[_Token]:
        """The tokens that have a log-probability."""
        return (self.logprobs or _Logprobs()).content or []


class _Usage(_Form):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(_Form):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class _Model(_Form):
    id: str
    parent: Any = None


class _Models(_Form):
    data: list[_Model]


class _Tokens(_Form):
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class _Rendered(_Form):
    prompt: str


# ---------------------------------------------------------------- requests


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Refused(Exception):
    """The server answered with an error: its HTTP status and its message."""

    def __init__(self, status: int, words: str) -> None:
        self.status = status
        self.words = words


class Endpoint:
    """A server that answers conversations. The key is in memory and in the requests' headers only.

    Args:
        url: with or without the /v1 at its end.
        model: the server's name of the model; None: the only one that it lists, or the only adapter
            among them.

    Raises:
        ConfigError: nothing answers there, or its model is not known, or the key cannot be sent.
    """

    def __init__(
        self, url: str, model: str | None, *, key_variable: str, timeout_seconds: float
    ) -> None:
        parts = urlsplit(url)
        path = parts.path.rstrip("/").removesuffix("/v1")
        self.name = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self._key = os.environ.get(key_variable, "").strip()
        self._timeout_seconds = timeout_seconds
        if not (self._key.isascii() and self._key.isprintable()):
            raise ConfigError(
                f"the key in {key_variable} has characters that cannot be sent",
                "--api-key-variable",
                "set the variable to the key alone, on one line",
            )
        # A server on this machine or network is not reached through a proxy of the environment.
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
        self.facts: dict[str, Any] = {}
        try:
            self.model = model or self._only_model()
            # A named model needs no list, but a server that answers.
            if model is not None:
                with contextlib.suppress(Refused):
                    self._json("/v1/models")
        except FinetuneError as error:  # nothing has been asked yet
            raise ConfigError(error.what, error.where, error.fix) from None
        self.engine = self._engine()
        self.facts |= {"engine": self.engine, "model": self._shown(self.model)}
        self._gives_logprobs = True

    def chat(self, messages: Messages, max_new_tokens: int) -> EngineResponse:
        """Return the greedy answer to a conversation, which the server renders."""
        path, turns = "/v1/chat/completions", [dict(message) for message in messages]
        body = {
            "model": self.model,
            "messages": turns,
            "temperature": 0,
        }
        body |= {"max_tokens": max_new_tokens}
        try:
            completion = self._completion(path, body)
        except Refused as refused:
            if refused.status < 400:  # another address
                raise self._failure(path, refused) from None
            words = f"{refused.status} {refused.words}".strip()
            self.facts.setdefault("refused", words)
            return EngineResponse("", "refused", status=refused.status, words=words)
        choice, usage = completion.choices[0], completion.usage or _Usage()
        message, tokens = choice.message, choice.tokens
        logprobs = tuple(token.logprob for token in tokens if token.logprob is not None)
        has_all = 0 < len(tokens) == len(logprobs) and all(map(math.isfinite, logprobs))
        has_all &= _is_one_per_token(choice, usage.completion_tokens)
        reasoning = message.reasoning_content or message.reasoning or ""
        if reasoning:
            self.facts["reasoning"] = "apart"
        return EngineResponse(
            answer=self._text(message.content or ""),
            finish=self._shown(str(choice.finish_reason)),
            reasoning=self._text(reasoning),
            answer_tokens=usage.completion_tokens,
            logprobs=logprobs if has_all else None,
            prompt_ids=self._rendered_ids(turns),
            # Ollama leaves out what it had in its cache.
            prompt_tokens=None if self.engine == "ollama" else usage.prompt_tokens or None,
        )

    def _completion(self, path: str, body: dict[str, Any]) -> _Completion:
        """Return the server's answer, with log-probabilities if it gives them."""
        if self._gives_logprobs:
            try:
                return self._json(path, body | {"logprobs": True}, _Completion)
            except Refused as refused:
                if refused.status not in PROMPT_REFUSED:
                    raise
        completion = self._json(path, body, _Completion)
        self._gives_logprobs = False
        return completion

    def _rendered_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
        """Return the prompt's ids, if the engine reports them."""
        if self.engine not in ("llama.cpp", "vllm"):
            return None
        body = {
            "model": self.model,
            "messages": messages,
            "add_generation_prompt": True,
        }
        try:
            if self.engine == "llama.cpp":
                content = self._json("/apply-template", {"messages": messages}, _Rendered).prompt
                body = {
                    "content": content,
                    "add_special": True,
                    "parse_special": True,
                }
            return tuple(self._json("/tokenize", body, _Tokens).tokens)
        except Refused:
            self.facts["prompt_hidden"] = True
            return None

    # ------------------------------------------------------------ the server

    def _only_model(self) -> str:
        fix = "name one with --served-model"
        try:
            listed = _Models.model_validate(self._json("/v1/models")).data
        except ValidationError:
            raise FinetuneError(
                "the server's list of models cannot be read", self.name, fix
            ) from None
        except Refused as refused:
            raise self._failure("/v1/models", refused) from None
        if not listed:
            raise FinetuneError(
                "the server has no model",
                self.name,
                "load one there, or name it with --served-model",
            )
        for candidates in (listed, [model for model in listed if model.parent]):
            if len(candidates) == 1:
                return candidates[0].id
        names = ", ".join(self._shown(model.id) for model in listed[:SHOWN_MODELS])
        names += ", ..." if len(listed) > SHOWN_MODELS else ""
        raise FinetuneError(f"the server has {len(listed)} models: {names}", self.name, fix)

    def _engine(self) -> str:
        for engine, path, key in (
            ("llama.cpp", "/props", "default_generation_settings"),
            ("ollama", "/api/version", "version"),
            ("vllm", "/version", "version"),
        ):
            with contextlib.suppress(Refused, FinetuneError):
                found = self._json(path)
                if isinstance(found, dict) and key in found:
                    self.facts |= {
                        name: self._shown(fact) if isinstance(fact, str) else fact
                        for name, fact in found.items()
                        if name in _ENGINE_FACTS and isinstance(fact, str | int)
                    }
                    return engine
        return "openai"

    def _failure(self, path: str, refused: Refused) -> FinetuneError:
        what = f"the server refused: {refused.status} {refused.words}"
        fix = fix_for_status(refused.status)
        if refused.status < 400:
            what = f"the server redirects: {refused.status}"
            fix = "give the final address to --endpoint"
        return FinetuneError(what, f"{self.name}{path}", fix)

    # ------------------------------------------------------------ requests

    def _json(self, path: str, body: Any = None, form: Any = Any) -> Any:
        """Send a request and return its result, in this form.

        Raises:
            Refused: the server answered with an error.
            FinetuneError: none answers, or not in this form.
        """
        headers = {"accept": "application/json", "content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.name + path, data, headers)
        try:
            return TypeAdapter(form).validate_python(json.loads(self._send(request)))
        except (ValueError, RecursionError):
            raise FinetuneError(
                "the server's answer is not of the OpenAI protocol",
                f"{self.name}{path}",
                "check --endpoint: is it a server of that protocol?",
            ) from None

    def _send(self, request: urllib.request.Request) -> bytes:
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            with error, contextlib.suppress(OSError, http.client.HTTPException):
                raise Refused(error.code, self._shown(_message(error.read(1 << 16)))) from None
            raise Refused(error.code, "") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(getattr(error, "reason", None) or error or type(error).__name__)
            raise FinetuneError(
                f"no server answers: {self._shown(reason)}",
                self.name,
                "start the server, or correct --endpoint; --timeout-seconds is the longest silence",
            ) from None

    def _shown(self, words: str) -> str:
        """Return a name or message of the server, short and without the key, which a server may
        echo.
        """
        return _without(self._key, words)[:SHOWN_CHARACTERS]

    def _text(self, text: str) -> str:
        """Return a whole answer."""
        return _without(self._key if len(self._key) >= MIN_SECRET else "", text)


def _without(key: str, text: str) -> str:
    """Remove the key, and lone surrogates, which no tokenizer or terminal accepts."""
    text = text.replace(key, "***") if key else text
    return text.encode("utf-8", "replace").decode("utf-8")


def _message(body: bytes) -> str:
    """Return the message of an error."""
    try:
        found = json.loads(body)
        error = found.get("error", found.get("detail", "")) if isinstance(found, dict) else ""
        return str(error.get("message", "") if isinstance(error, dict) else error)
    except (ValueError, RecursionError):
        return ""


def _is_one_per_token(choice: _Choice, completion_tokens: int | None) -> bool:
    """Return whether a choice with log-probabilities has one for each token of the answer.

    llama.cpp gives one for several tokens that make one character. Some engines give none for the
    end token.
    """
    missing = 0 if completion_tokens is None else completion_tokens - len(choice.tokens)
    last = choice.tokens[-1].token.strip() if choice.tokens else ""
    ends_before = bool(last) and (choice.message.content or "").rstrip().endswith(last)
    return missing == 0 or (missing == 1 and choice.finish_reason == "stop" and ends_before)
