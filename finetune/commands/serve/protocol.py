"""The OpenAI protocol: accepted requests, and the form of answers and errors. Needs no torch.

A setting that would have no effect is refused, so that no client relies on it. A few names without
a meaning here (`user`, `metadata`, ...) are accepted. Every number, string and list has bounds, and
the first error ends the check: a body with a million errors must not produce a million messages.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json
from starlette.responses import JSONResponse

from finetune.inference.sampling import (
    MAX_PENALTY,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOKENS,
    MIN_PENALTY,
)

MAX_MESSAGES = 1000
MAX_PARTS = 1000  # of one message
MAX_TOOLS = MAX_CALLS = 128  # of one request, of one message: the protocol's own limit
MAX_NAMES = 64  # of one object: several times those that there are
MAX_PROMPT_CHARACTERS = MAX_PROMPT_IDS = (
    4 << 20
)  # far beyond any context; what the model reads is checked by its worker
# A socket that is closed with unread bytes is reset, and the reset may overtake the answer. So what
# still arrives after a refusal is discarded for a moment before the connection is closed.
LINGER_SECONDS = 1.0
LINGER_BYTES = 4 << 20
_HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
# Settings of the protocol that are not offered, and the values of them that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class ApiError(Exception):
    """An error in the protocol's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {
            "error": {
                "message": message,
                "type": kind,
                "param": param,
                "code": code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def unavailable(message: str, code: str, *, status: int = 503) -> ApiError:
    """Return an error after which the client may try again."""
    return ApiError(
        status,
        message,
        kind="server_error",
        code=code,
        headers={"retry-after": "1"},
    )


Name = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Leave out what is null: clients send answers back with all their fields."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_NAMES:
            raise PydanticCustomError(
                "too_many_names", f"an object has {len(value)} names; at most {MAX_NAMES} are read"
            )
        return {
            name: given for name, given in value.items() if given is not None or name == "content"
        }


class TextPart(_Request):
    """A part of a message. Images, sounds and files are refused: nothing is fetched for a
    request.
    """

    type: Literal["text"]
    text: Text


class CalledFunction(_Request):
    name: Name
    arguments: Text


class ToolCall(_Request):
    """A call that the assistant made in an earlier answer."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(_Request):
    """A function that may be called. `strict` is refused: decoding is not constrained."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Request):
    type: Literal["function"]
    function: ToolFunction


class ChatMessage(_Request):
    """One message; `content` becomes a text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
    name: Name | None = None
    reasoning_content: Text | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_alone(cls, value: Any) -> Any:
        """Calls may stand without a text."""
        if isinstance(value, dict) and value.get("tool_calls") and value.get("content") is None:
            return {**value, "content": ""}
        return value

    @model_validator(mode="after")
    def _calls_of_the_assistant(self) -> ChatMessage:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise PydanticCustomError(
                "calls_of_another", "only the assistant has tool_calls and reasoning_content"
            )
        return self

    def plain(self) -> dict[str, Any]:
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        for name in ("tool_call_id", "name", "reasoning_content"):
            if value := getattr(self, name):
                plain[name] = value
        return plain


class StreamOptions(_Request):
    include_usage: bool = False
    include_obfuscation: bool = False


class AnswerRequest(_Request):
    """Fields of both endpoints. `top_k` and `repetition_penalty` are additions to the protocol."""

    model: Name
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY)] | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None
    ) = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_changes(self, max_tokens: int) -> dict[str, Any]:
        """Return the settings that differ from the model's own, as fields of `Sampling`."""
        own = {"temperature", "top_p", "top_k", "repetition_penalty", "seed"}
        changes = self.model_dump(include=own, exclude_none=True)
        if self.stop:
            changes["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        requested = self.max_completion_tokens or self.max_tokens or max_tokens
        changes["max_new_tokens"] = min(requested, max_tokens)
        return changes


class ChatRequest(AnswerRequest):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    def prompt(self) -> list[dict[str, Any]]:
        return [message.plain() for message in self.messages]

    def callable_tools(self) -> list[dict[str, Any]]:
        """Return the tools that may be called: none if `tool_choice` is none."""
        offered = () if self.tool_choice == "none" else self.tools or ()
        return [tool.model_dump(exclude_none=True) for tool in offered]


class CompletionRequest(AnswerRequest):
    """POST /v1/completions: one prompt, as text or token ids."""

    prompt_: Text | Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)] = (
        Field(alias="prompt")
    )

    @field_validator("prompt_", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
            return value[0]
        return value

    def prompt(self) -> str | list[int]:
        return self.prompt_

    def callable_tools(self) -> list[dict[str, Any]]:
        return []


def parse(kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> Any:
    """Parse a request. Raises ApiError: 400, naming the parameter and the rule."""
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(
            400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json"
        ) from error
    if not isinstance(given, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    for name in list(given):
        if name in _HARMLESS:
            del given[name]
        elif name in _NEUTRAL and name not in kind.model_fields:
            value = given.pop(name)
            if value is not None and value not in _NEUTRAL[name]:
                raise ApiError(
                    400,
                    f"{name} is not offered by this server",
                    param=name,
                    code="unsupported_parameter",
                )
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _as_api_error(error) from error


def _as_api_error(error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    # For a string or a list, the error of the branch that was meant comes second.
    first = next(
        (one for one in errors if one["type"] not in ("string_type", "list_type")), errors[0]
    )
    # Of a union, pydantic names the branch too: list[...], str, constrained-str.
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif "[" not in part and not part.endswith("str"):
            path += f".{part}"
    param = path.lstrip(".")
    kind = first["type"]
    message, code = f"{param or 'the body'}: {first['msg']}", "invalid_value"
    if kind == "extra_forbidden":
        param = param[:100]
        message, code = f"unknown parameter: {param}", "unknown_parameter"
    elif param == "messages" and kind == "too_short":
        message, code = "messages is empty: send at least one message", "empty_array"
    elif kind == "literal_error" and param.startswith("messages") and param.endswith(".type"):
        message = "a content part must have type text; nothing is fetched"
        code = "unsupported_content"
    return ApiError(400, message, param=param or None, code=code)


# ---------------------------------------------------------------- answers


class Shape:
    """Bodies of one answer: `chat` for chat.completion, else text_completion."""

    def __init__(self, *, chat: bool, model: str) -> None:
        self.chat = chat
        identity = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {
            "id": identity,
            "created": int(time.time()),
            "model": model,
        }

    def whole(
        self,
        text: str,
        reason: str,
        counts: Mapping[str, int],
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Return the whole body. `calls`: tool calls in the form of the protocol."""
        said: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            said["tool_calls"] = list(calls)
        message = {"message": said} if self.chat else {"text": text}
        choice = {
            "index": 0,
            **message,
            "logprobs": None,
            "finish_reason": reason,
        }
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            **self._head,
            "object": kind,
            "choices": [choice],
            "usage": dict(counts),
        }

    def first(self) -> dict[str, Any] | None:
        """Return the chunk before any text."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text} if self.chat else text, None)

    def calls(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the chunk with all calls, each complete."""
        return self._chunk(
            {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}, None
        )

    def last(self, reason: str) -> dict[str, Any]:
        return self._chunk({} if self.chat else "", reason)

    def counts(self, counts: Mapping[str, int]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._object,
            "choices": [],
            "usage": dict(counts),
        }

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, content: Any, reason: str | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta" if self.chat else "text": content,
            "logprobs": None,
            "finish_reason": reason,
        }
        return {
            **self._head,
            "object": self._object,
            "choices": [choice],
        }
