"""A server of the OpenAI protocol as a deployment, and what some engines let see besides.

| engine | known by | rendered prompt |
|---|---|---|
| vLLM, vllm-ascend | `version` at /version | ids from /tokenize, which takes messages |
| llama.cpp's server | `default_generation_settings` at /props | text from /apply-template, ids of it from /tokenize |
| Ollama | `version` at /api/version | the number of its tokens only |
| any other | | the number of its tokens, where `usage` has it |
"""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from finetune.commands.verify.evidence import Messages, Seen
from finetune.errors import ConfigError, FinetuneError

LARGEST_ANSWER_BYTES = 64 << 20
SHOWN_CHARACTERS = 200  # of a server's own message
_ENGINE_FACTS = ("dtype", "quantization_level", "parameter_size", "ftype", "model_ftype", "n_ctx", "build_info")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Refused(Exception):
    """The server answered with an error; `status` and its own words."""

    def __init__(self, status: int, words: str) -> None:
        self.status, self.words = status, words


class Endpoint:
    """A server under its address. The key is in memory and in the requests' headers only.

    Args:
        url: with or without the /v1 at its end.
        model: the server's name of the model; None: the first that it lists.

    Raises:
        ConfigError: nothing answers there, or it has no such model.
    """

    def __init__(self, url: str, model: str | None, *, key_variable: str, timeout_seconds: float) -> None:
        parts = urlsplit(url)
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._root = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self.name = self._root
        self._key, self._seconds = os.environ.get(key_variable, ""), timeout_seconds
        # No proxy of the environment in between for a server on this machine or network.
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
        self.facts: dict[str, Any] = {}
        self.model = self._model(model)
        self.engine = self._engine()
        self.facts |= {"engine": self.engine, "model": self.model}
        self._takes_ids, self._without_logprobs = True, set[str]()

    # ------------------------------------------------------------ answers

    def chat(self, messages: Messages, max_new_tokens: int) -> Seen:
        body = {"model": self.model, "messages": [dict(message) for message in messages]}
        try:
            answer = self._asked("/v1/chat/completions", body, max_new_tokens)
        except _Refused as refused:
            raise self._failure("/v1/chat/completions", refused) from None
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
        reasoning = choice["message"].get("reasoning_content") or choice["message"].get("reasoning")
        if reasoning:  # taken out of the answer by the server
            text = f"<think>\n{reasoning}</think>{text}"
        ids, text_of_prompt = self._rendered(body["messages"])
        return self._seen(answer, choice, text, prompt_ids=ids, prompt_text=text_of_prompt)

    def complete(self, ids: Sequence[int], text: str, max_new_tokens: int) -> Seen | None:
        if self.engine == "ollama":  # puts a template of its own around it
            return None
        for prompt in [list(ids), text] if self._takes_ids else [text]:
            try:
                answer = self._asked("/v1/completions", {"model": self.model, "prompt": prompt}, max_new_tokens)
            except _Refused:  # of ids: it takes texts only; of a text: it has no such path
                self._takes_ids = False
                continue
            choice = answer["choices"][0]
            return self._seen(answer, choice, choice.get("text") or "")
        return None

    def _asked(self, path: str, body: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
        """A greedy answer; with log-probabilities where the server gives them."""
        body = {**body, "temperature": 0, "max_tokens": max_new_tokens}
        if path not in self._without_logprobs:
            wanted = {"logprobs": True} if "messages" in body else {"logprobs": 1}
            try:
                return self._checked(self._json(path, body | wanted))
            except _Refused as refused:
                if refused.status in (401, 403, 404):
                    raise
        answer = self._checked(self._json(path, body))
        self._without_logprobs.add(path)
        return answer

    def _seen(self, answer: Mapping[str, Any], choice: Mapping[str, Any], text: str, **more: Any) -> Seen:
        usage = answer.get("usage") or {}
        ids, logprobs = _token_logprobs(choice.get("logprobs"))
        tokens = usage.get("prompt_tokens")
        return Seen(
            answer=text,
            finish=str(choice.get("finish_reason")),
            answer_tokens=usage.get("completion_tokens"),
            answer_ids=ids,
            logprobs=logprobs,
            # Ollama leaves out what it had in its cache.
            prompt_tokens=tokens if isinstance(tokens, int) and tokens > 0 and self.engine != "ollama" else None,
            **more,
        )

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...] | None, str | None]:
        """The prompt's ids and its text, as far as the engine shows them."""
        try:
            if self.engine == "vllm":
                asked = {"model": self.model, "messages": messages, "add_generation_prompt": True}
                return tuple(map(int, self._json("/tokenize", asked)["tokens"])), None
            if self.engine == "llama.cpp":
                text = str(self._json("/apply-template", {"messages": messages})["prompt"])
                asked = {"content": text, "add_special": True, "parse_special": True}
                return tuple(map(int, self._json("/tokenize", asked)["tokens"])), text
        except (_Refused, KeyError, TypeError, ValueError):
            self.facts["prompt_hidden"] = True
        return None, None

    # ------------------------------------------------------------ who answers

    def _model(self, wanted: str | None) -> str:
        if wanted is not None:
            return wanted
        try:
            listed = [str(model["id"]) for model in self._json("/v1/models")["data"]]
        except (_Refused, KeyError, TypeError) as error:
            words = error.words if isinstance(error, _Refused) else "its list of models cannot be read"
            raise ConfigError(
                f"the server lists no models: {words}", self.name, "name one with --served-model"
            ) from None
        if not listed:
            raise ConfigError("the server has no model", self.name, "load one there, or name it with --served-model")
        return listed[0]

    def _engine(self) -> str:
        probes = (("llama.cpp", "/props", "default_generation_settings"), ("ollama", "/api/version", "version"))
        for engine, path, key in (*probes, ("vllm", "/version", "version")):
            with contextlib.suppress(_Refused, FinetuneError):
                found = self._json(path)
                if isinstance(found, dict) and key in found:
                    self.facts |= {
                        name: found[name] for name in _ENGINE_FACTS if isinstance(found.get(name), (str, int))
                    }
                    if engine == "ollama":
                        self._ollama_facts()
                    return engine
        return "openai"

    def _ollama_facts(self) -> None:
        with contextlib.suppress(_Refused, KeyError, TypeError):
            details = self._json("/api/show", {"model": self.model})["details"]
            self.facts |= {name: details[name] for name in _ENGINE_FACTS if isinstance(details.get(name), (str, int))}

    # ------------------------------------------------------------ the wire

    def _checked(self, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise FinetuneError(
                "the server's answer has no choices", self.name, "is it a server of the OpenAI protocol?"
            )
        return answer

    def _failure(self, path: str, refused: _Refused) -> FinetuneError:
        fix = "check --served-model and the server's log"
        if refused.status in (401, 403):
            fix = "put the server's key into the variable that --api-key-variable names"
        return FinetuneError(f"the server refused: {refused.status} {refused.words}", f"{self.name}{path}", fix)

    def _json(self, path: str, body: Any = None) -> Any:
        """What a request gives. Raises `_Refused` for an error of the server, FinetuneError where none answers."""
        headers = {"accept": "application/json", "content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, headers)
        try:
            with self._opener.open(request, timeout=self._seconds) as response:
                read = response.read(LARGEST_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise _Refused(error.code, _words(error.read(1 << 16))) from None
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            fix = "start the server, or correct --endpoint; --timeout-seconds is the longest wait"
            raise ConfigError(f"no server answers: {reason}", self.name, fix) from None
        if len(read) > LARGEST_ANSWER_BYTES:
            raise FinetuneError("the server's answer is too large", f"{self.name}{path}", "check --endpoint")
        try:
            return json.loads(read)
        except (ValueError, RecursionError):
            raise _Refused(502, "its answer is no JSON") from None


def _token_logprobs(given: Any) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """The ids (where they are there) and log-probabilities of an answer's tokens."""
    if not isinstance(given, dict):
        return None, None
    content = given.get("content")
    if isinstance(content, list) and content:
        numbers = [token.get("logprob") for token in content]
        ids = [token.get("id") for token in content]
    else:
        numbers, ids = list(given.get("token_logprobs") or ()), [None]
    if not numbers or not all(isinstance(number, (int, float)) for number in numbers):
        return None, None
    return (tuple(ids) if all(isinstance(one, int) for one in ids) else None), tuple(map(float, numbers))


def _words(body: bytes) -> str:
    """The message of an error, short: a server may write the request back into it."""
    try:
        found = json.loads(body)
        error = found.get("error", found.get("detail", "")) if isinstance(found, dict) else ""
        message = error.get("message", "") if isinstance(error, dict) else error
    except (ValueError, RecursionError):
        message = ""
    return str(message)[:SHOWN_CHARACTERS]
