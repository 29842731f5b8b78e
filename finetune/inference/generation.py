"""The generation core of chat, serve and eval: prompts in, answers out, whole or as a stream.

    generator = load_for_generation("runs/my-run")
    question = {"role": "user", "content": "a question"}
    generator.generate(["a prompt", [question]], Sampling(max_new_tokens=64))
    stream = generator.stream([question])
    for piece in stream: ...
    stream.answer

A prompt is a string (used as it is), messages (rendered by the chat template), or token ids. With
temperature 0 the tokens are those of transformers' `model.generate(do_sample=False)`, alone and in
a batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.encoding.spans import ChatTemplate
from finetune.data.formats import Message, with_matched_results
from finetune.data.report import RecordProblem
from finetune.data.tools import Call, Tools, read_calls, read_tools
from finetune.errors import DataError
from finetune.inference.answer import Answer, AnswerStream, AnswerText, Generation, OnPiece
from finetune.inference.engine import (
    ContinuousEngine,
    Engine,
    Job,
    StaticEngine,
    find_limits,
    has_latent_cache,
)
from finetune.inference.limited_template import limit_chat_template
from finetune.inference.loading import (
    check_fit,
    end_ids,
    find_source,
    load_tokenizer_of,
    load_weights,
)
from finetune.inference.sampling import Sampling, default_sampling
from finetune.inference.tool_calls import CallForm, CallReader, find_form, shown_tokens
from finetune.modeling.attention import can_pack, only_attends
from finetune.modeling.model_config import padding_id
from finetune.runtime.device import choose_device_type, choose_dtype

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMALL_MODEL_PARAMETERS = 20_000_000
ROLES = ("system", "user", "assistant", "tool")
DEFAULT_MAX_BATCH = 32

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class PromptTooLong(DataError):
    """The prompt leaves no room for an answer."""


class Generator:
    """A loaded model that answers prompts. The settings are those of `load_for_generation`.

    `model` contains the adapter's layers and must not change while answers are generated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        max_batch: int = DEFAULT_MAX_BATCH,
        context_tokens: int | None = None,
        continuous: bool | None = None,
        cpu_threads: int | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        device, eos = model.device, model.config.get_text_config().eos_token_id
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # An operation of a small model takes less time than waking another thread, and much
            # less than waiting for one that the system has descheduled.
            threads = 1 if model.num_parameters() < SMALL_MODEL_PARAMETERS else cpu_threads
            if threads is not None:
                torch.set_num_threads(threads)
        self.stop_ids = frozenset(end_ids(tokenizer, model.generation_config, eos))
        self.limits = find_limits(model, device, max_batch, context_tokens)
        self.context_tokens = self.limits.context_tokens
        self.default_sampling = default_sampling(model.generation_config)
        self._template = ChatTemplate(tokenizer)
        if continuous is None:
            # Where it is tested. Its cache needs keys and values of the same size, which latent
            # attention does not have.
            continuous = (
                can_pack(model.config)
                and only_attends(model.config)
                and device.type in ("cpu", "cuda")
                and not has_latent_cache(model.config)
            )
        engine_class = ContinuousEngine if continuous else StaticEngine
        self.engine: Engine = engine_class(
            model, sorted(self.stop_ids), padding_id(model.config, tokenizer), self.limits
        )
        try:
            # fail now if it does not work
            self.generate([[next(iter(self.stop_ids))]], Sampling(max_new_tokens=1))
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ prompts

    @cached_property
    def call_form(self) -> CallForm | None:
        """The form of tool calls in the chat template, or None if they could not be read back."""
        return find_form(self._template)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render a conversation up to where the answer begins: what training has before it.

        Raises:
            DataError: no message, a wrong role or content, or a refusal of the chat template.
        """
        turns = [_message(number, message) for number, message in enumerate(messages)]
        if not turns:
            raise DataError(
                "there is no message", "messages", "send at least one message with role and content"
            )
        template = self._template.with_tools(_tools(tools))
        if tools and self.call_form is None:
            raise DataError(
                "the model's chat template writes no calls of tools, or in a form that is not read"
                " back",
                "tools",
                "use a model or --template of the forms of Qwen, Hermes, Llama 3 or Mistral",
            )
        try:
            return template.render(with_matched_results(turns), generation_prompt=True)
        except RecordProblem as problem:
            raise DataError(
                f"the model's chat template does not take these messages: {problem}",
                "messages",
                "use the roles and the order that the model was trained with",
            ) from problem

    def prompt_ids(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            DataError: as `render`; an empty prompt; an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            # As transformers does by default: with the special tokens that the tokenizer adds.
            ids = self.tokenizer(prompt)["input_ids"]
        elif len(prompt) and all(isinstance(part, int) for part in prompt):
            ids = [int(part) for part in prompt]  # type: ignore[arg-type]
        else:
            ids = self.tokenizer(self.render(prompt, tools), add_special_tokens=False)["input_ids"]  # type: ignore[arg-type]
        if not ids:
            raise DataError("the prompt is empty", "prompt", "send at least one token")
        # Strings too: a tokenizer may have ids, for images say, without an embedding in the model.
        highest = self.model.config.get_text_config().vocab_size
        if min(ids) < 0 or max(ids) >= highest:
            raise DataError(
                "a token id is outside the vocabulary", "prompt", f"use ids from 0 to {highest - 1}"
            )
        return list(ids)

    # ------------------------------------------------------------ answers

    def start(
        self,
        prompt: Prompt,
        sampling: Sampling | None,
        on_piece: OnPiece,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Generation:
        """Start an answer. `on_piece` is called from another thread until it is complete.

        Args:
            tools: tools that the answer may call, if the prompt is messages.

        Raises:
            DataError: as `prompt_ids`; PromptTooLong.
        """
        ids = self.prompt_ids(prompt, tools)
        room = self.context_tokens - len(ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; the model reads at most {self.context_tokens}"
                " with the answer",
                "prompt",
                "shorten the conversation or begin a new one",
            )
        sampling = sampling or self.default_sampling
        sampling = sampling.changed(max_new_tokens=min(sampling.max_new_tokens or room, room))
        shown: frozenset[str] = frozenset()
        calls = None
        if tools and self.call_form is not None:
            shown = shown_tokens(self.call_form, self._template)
            calls = CallReader(self.call_form)
        text = AnswerText(self.tokenizer, sampling.stop, shown)
        generation = Generation(self.engine, self.stop_ids, len(ids), text, on_piece, calls)
        self.engine.submit(Job(generation.identity, ids, sampling, generation.receive))
        return generation

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AnswerStream:
        """Stream the answer to one prompt. Raises as `start`."""
        stream = AnswerStream()
        stream.generation = self.start(prompt, sampling, stream.put, tools=tools)
        return stream

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling | None = None) -> list[Answer]:
        """Answer all prompts together and return the answers in their order.

        Raises:
            DataError: as `start`, before anything is generated.
            GenerationError: an answer failed.
        """
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        streams: list[AnswerStream] = []
        try:
            for prompt in ids:
                streams.append(self.stream(prompt, sampling))
            return [stream.finish() for stream in streams]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise

    def close(self) -> None:
        """Stop the engine. It may be called twice."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_for_generation(
    model: str | None,
    adapter: str | None = None,
    device_type: str = "auto",
    dtype: str = "auto",
    *,
    template: str | None = None,
    max_batch: int = DEFAULT_MAX_BATCH,
    context_tokens: int | None = None,
    continuous: bool | None = None,
    cpu_threads: int | None = None,
    trust_remote_code: bool = False,
    limit_template: bool = False,
) -> Generator:
    """Load a model to answer with. `ModelOptions` describes the model, adapter, device, dtype and
    template.

    Args:
        max_batch: answers generated at the same time.
        context_tokens: maximum tokens of a prompt with its answer; None: the model's maximum.
        continuous: whether requests may join a running batch; None: wherever that is tested.
        cpu_threads: threads of an operation on a CPU, unless OMP_NUM_THREADS is set; None: torch's
            own number.
        limit_template: render the chat template in a process with limits, because the prompts come
            from others.

    Raises:
        ConfigError, DataError: no such model, adapter, device or template; files that do not fit.
    """
    source = find_source(model, adapter)
    device_type = choose_device_type(device_type)
    dtype = choose_dtype(dtype, device_type)
    tokenizer = load_tokenizer_of(source, template, trust_remote_code=trust_remote_code)
    if limit_template:
        limit_chat_template(tokenizer)
    network = load_weights(
        source, torch.device(device_type), dtype, trust_remote_code=trust_remote_code
    )
    check_fit(network, tokenizer, source)
    return Generator(
        network,
        tokenizer,
        source.name,
        max_batch=max_batch,
        context_tokens=context_tokens,
        continuous=continuous,
        cpu_threads=cpu_threads,
    )


def _message(number: int, message: Any) -> Message:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise DataError("a message is not an object", where, "send objects with role and content")
    role, content = message.get("role"), message.get("content")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise DataError(
            f"role is {str(role)[:40]!r}", f"{where}.role", f"use one of {', '.join(ROLES)}"
        )
    calls: tuple[Call, ...] = ()
    try:
        if role == "assistant":
            calls = read_calls(message.get("tool_calls"), f"{where}.tool_calls", number)
    except RecordProblem as problem:
        raise DataError(
            str(problem), where, "send calls as they were answered: id, type and function"
        ) from problem
    content = "" if content is None and calls else content
    if not isinstance(content, str):
        raise DataError(
            "content is not a text", f"{where}.content", "send the message's text as content"
        )
    reasoning = message.get("reasoning_content") or ""
    if not isinstance(reasoning, str):
        raise DataError("reasoning_content is not a text", where, "send it as a text")
    name = str(message.get("name") or "")
    if role == "tool":
        call_id = str(message.get("tool_call_id") or "")
        return Message(role, content, call_id=call_id, name=name)
    return Message(
        role,
        content,
        reasoning=reasoning,
        calls=calls,
        name=name,
    )


def _tools(given: Sequence[Mapping[str, Any]]) -> Tools:
    try:
        return read_tools(list(given), "tools")
    except RecordProblem as problem:
        raise DataError(
            str(problem), "tools", "send functions with name, description and parameters"
        ) from problem
