"""A server of the OpenAI protocol as a deployment, and what some engines let see besides.

| engine | known by | rendered prompt |
|---|---|---|
| vLLM, vllm-ascend | `version` at /version | ids from /tokenize, which takes messages |
| llama.cpp's server | `default_generation_settings` at /props | text from /apply-template, ids of
it from /tokenize |
| Ollama | `version` at /api/version | the number of its tokens only |
| any other | | the number of its tokens, where `usage` has it |
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.commands.verify.evidence import Messages, Seen
from finetune.commands.verify.wire import PROMPT_REFUSED, Refused, Wire, mend_of
from finetune.errors import ConfigError, FinetuneError

SHOWN_MODELS = 8
LARGEST_ID = 2**31 - 1
_ENGINE_FACTS = (
    "dtype",
    "quantization_level",
    "parameter_size",
    "ftype",
    "model_ftype",
    "n_ctx",
    "build_info",
)


class Endpoint:
    """A server that answers conversations.

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
        self._wire = Wire(url, key_variable=key_variable, timeout_seconds=timeout_seconds)
        self.name = self._wire.root
        self.facts: dict[str, Any] = {}
        try:
            self.model = self._model(model)
        except FinetuneError as error:  # nothing has been asked yet
            raise ConfigError(error.what, error.where, error.fix) from None
        self.engine = self._engine()
        self.facts |= {"engine": self.engine, "model": self._wire.shown(self.model)}
        self._takes_ids = True
        self._without_logprobs = set[str]()

    # ------------------------------------------------------------ answers

    def chat(self, messages: Messages, max_new_tokens: int) -> Seen:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
        }
        path = "/v1/chat/completions"
        try:
            answer = self._asked(path, body, max_new_tokens)
        except Refused as refused:
            if refused.status < 400:  # another address, or no JSON
                raise self._failure(path, refused) from None
            words = f"{refused.status} {refused.words}".strip()
            self.facts.setdefault("refused", words)
            return Seen("", "refused", prompt_tokens=0, status=refused.status, words=words)
        return self._seen(path, answer, prompt_ids=self._rendered(body["messages"]))

    def complete(self, ids: Sequence[int], text: str, max_new_tokens: int) -> Seen | None:
        if self.engine == "ollama":  # puts a template of its own around it
            return None
        for prompt in [list(ids), text] if self._takes_ids else [text]:
            try:
                answer = self._asked(
                    "/v1/completions", {"model": self.model, "prompt": prompt}, max_new_tokens
                )
                return self._seen("/v1/completions", answer)
            except Refused:  # of ids: it takes texts only; of a text: it has no such path
                self._takes_ids = False
        return None

    def _asked(self, path: str, body: dict[str, Any], max_new_tokens: int) -> Any:
        """A greedy answer, not checked; with log-probabilities where the server gives them."""
        body = {**body, "temperature": 0, "max_tokens": max_new_tokens}
        if path not in self._without_logprobs:
            wanted = {"logprobs": True} if "messages" in body else {"logprobs": 1}
            try:
                return self._wire.json(path, body | wanted)
            except Refused as refused:
                if refused.status not in PROMPT_REFUSED:
                    raise
        answer = self._wire.json(path, body)
        self._without_logprobs.add(path)
        return answer

    def _seen(self, path: str, answer: Any, **more: Any) -> Seen:
        """What an answer of either path says. Raises FinetuneError where it is not of the
        protocol.
        """
        try:
            choice = _of(_of(_of(answer, dict)["choices"], list)[0], dict)
            message = (
                _of(choice["message"], dict) if "chat" in path else {"content": choice.get("text")}
            )
            text = _of(message.get("content"), str, _NONE) or ""
            thoughts = (
                _of(message.get("reasoning_content") or message.get("reasoning"), str, _NONE) or ""
            )
            usage = _of(answer.get("usage"), dict, _NONE) or {}
            tokens, made = (
                _of(usage.get(name), int, _NONE) for name in ("prompt_tokens", "completion_tokens")
            )
            finish = _of(choice.get("finish_reason"), str, _NONE)
            ids, logprobs = _token_logprobs(_of(choice.get("logprobs"), dict, _NONE) or {})
        except (TypeError, LookupError, ValueError, OverflowError):
            raise self._wire.foreign(path) from None
        if thoughts:
            self.facts["reasoning"] = "apart"
        return Seen(
            answer=self._wire.text(text),
            finish=self._wire.shown(str(finish)),
            thoughts=self._wire.text(thoughts),
            answer_tokens=made,
            answer_ids=ids,
            logprobs=logprobs,
            # Ollama leaves out what it had in its cache.
            prompt_tokens=tokens if tokens and tokens > 0 and self.engine != "ollama" else None,
            **more,
        )

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
        """The prompt's ids, where the engine shows them."""
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "add_generation_prompt": True,
        }
        try:
            if self.engine == "llama.cpp":
                given = _of(
                    _of(self._wire.json("/apply-template", {"messages": messages}), dict)["prompt"],
                    str,
                )
                asked = {"content": given, "add_special": True, "parse_special": True}
            if self.engine in ("llama.cpp", "vllm"):
                tokens = _of(_of(self._wire.json("/tokenize", asked), dict)["tokens"], list)
                return tuple(map(_id, tokens))
        except Refused:
            self.facts["prompt_hidden"] = True
        except (TypeError, LookupError, ValueError):
            raise self._wire.foreign("/tokenize") from None
        return None

    # ------------------------------------------------------------ who answers

    def _model(self, wanted: str | None) -> str:
        fix = "name one with --served-model"
        try:
            data = _of(_of(self._wire.json("/v1/models"), dict)["data"], list)
            listed = {_of(_of(model, dict)["id"], str): model.get("parent") for model in data}
        except (Refused, TypeError, LookupError) as error:
            if wanted is not None:
                return wanted
            if not isinstance(error, Refused):
                raise FinetuneError(
                    "the server's list of models cannot be read", self.name, fix
                ) from None
            failure = self._failure("/v1/models", error)
            # Other than a key or a redirect: it has no list.
            of_access = error.status in (401, 403) or 300 <= error.status < 400
            raise FinetuneError(
                failure.what, failure.where, failure.fix if of_access else fix
            ) from None
        if wanted is not None:
            return wanted
        if not listed:
            raise FinetuneError(
                "the server has no model",
                self.name,
                "load one there, or name it with --served-model",
            )
        adapters = [name for name, parent in listed.items() if parent]
        for only in (list(listed), adapters):
            if len(only) == 1:
                return only[0]
        names = ", ".join(self._wire.shown(name) for name in [*listed][:SHOWN_MODELS])
        names += ", ..." if len(listed) > SHOWN_MODELS else ""
        raise FinetuneError(f"the server has {len(listed)} models: {names}", self.name, fix)

    def _failure(self, path: str, refused: Refused) -> FinetuneError:
        if refused.status == 200:
            return self._wire.foreign(path)
        what, fix = f"the server refused: {refused.status} {refused.words}", mend_of(refused.status)
        if refused.status < 400:
            what, fix = (
                f"the server redirects: {refused.status}",
                "give the final address to --endpoint",
            )
        return FinetuneError(what, f"{self.name}{path}", fix)

    def _engine(self) -> str:
        probes = (
            ("llama.cpp", "/props", "default_generation_settings"),
            ("ollama", "/api/version", "version"),
        )
        for engine, path, key in (*probes, ("vllm", "/version", "version")):
            with contextlib.suppress(Refused, FinetuneError):
                found = self._wire.json(path)
                if isinstance(found, dict) and key in found:
                    self._take_facts(found)
                    if engine == "ollama":
                        self._ollama_facts()
                    return engine
        return "openai"

    def _ollama_facts(self) -> None:
        with contextlib.suppress(Refused, KeyError, TypeError):
            self._take_facts(
                _of(self._wire.json("/api/show", {"model": self.model})["details"], dict)
            )

    def _take_facts(self, found: Mapping[str, Any]) -> None:
        named = {name: found.get(name) for name in _ENGINE_FACTS}
        self.facts |= {
            name: self._wire.shown(fact) for name, fact in named.items() if isinstance(fact, str)
        }
        self.facts |= {
            name: fact
            for name, fact in named.items()
            if isinstance(fact, int) and abs(fact) <= 2**63
        }


_NONE = type(None)


def _of(value: Any, *kinds: type) -> Any:
    """The value. Raises TypeError where it is of another type; a bool is no number."""
    if type(value) not in kinds:
        raise TypeError(type(value).__name__)
    return value


def _id(value: Any) -> int:
    if not 0 <= _of(value, int) <= LARGEST_ID:
        raise ValueError("no token id")
    return int(value)


def _token_logprobs(
    given: Mapping[str, Any],
) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """The ids (where they are there) and log-probabilities of an answer's tokens."""
    content = _of(given.get("content"), list, _NONE)
    if content:
        numbers, ids = (
            [_of(token, dict).get("logprob") for token in content],
            [token.get("id") for token in content],
        )
    else:
        numbers, ids = _of(given.get("token_logprobs"), list, _NONE) or [], [None]
    logprobs = tuple(float(_of(number, int, float)) for number in numbers if number is not None)
    if not numbers or len(logprobs) < len(numbers) or not all(map(math.isfinite, logprobs)):
        return None, None
    return (None if None in ids else tuple(map(_id, ids))), logprobs
