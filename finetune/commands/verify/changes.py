"""The forms of a fault: what the model would have read, or which model would have answered."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jinja2

from finetune.commands.verify.evidence import Messages, Prompt
from finetune.commands.verify.reference import TRAINED, Reference, Weights
from finetune.data.encoding.templates import TEMPLATES
from finetune.errors import FinetuneError
from finetune.inference.loading import Source, load_tokenizer_of
from finetune.runtime.language import _

Ids = tuple[int, ...]
SYSTEM_TURNS = (
    "You are a helpful assistant.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
)
# 1.1 was Ollama's default, 1.05 is Qwen's generation_config.json
PENALTIES = (1.05, 1.1, 1.15, 1.2, 1.3, 1.5)


@dataclass(frozen=True)
class Change:
    """What would be otherwise, were it this fault.

    Attributes:
        reads: the ids that the model would read of a prompt; None: as in training.
        opens: ids that the model itself would begin its answer with, where they are not of the
            answer proper.
    """

    detail: str = ""
    reads: Callable[[Prompt], Ids] | None = None
    opens: Callable[[Prompt], Ids] | None = None
    weights: Weights = TRAINED
    penalty: float = 1.0


AS_TRAINED = Change()


# ---------------------------------------------------------------- of the prompt


def _rendered(
    reference: Reference,
    source: str,
    edit: Callable[[Messages], Messages] = lambda messages: messages,
    **settings: Any,
) -> Callable[[Prompt], Ids]:
    """Ids of a prompt under another template, or with other messages or settings of the
    template.
    """

    def reads(prompt: Prompt) -> Ids:
        try:
            text = reference.tokenizer.apply_chat_template(
                [dict(message) for message in edit(prompt.messages)],
                chat_template=source,
                tokenize=False,
                **({"add_generation_prompt": True} | settings),
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return ()  # it would have answered with an error
        return reference.ids(str(text))

    return reads


def templates(reference: Reference) -> Iterator[Change]:
    own = reference.tokenizer.chat_template
    try:
        base = load_tokenizer_of(Source(reference.source.base, None), None, trust_remote_code=False)
    except FinetuneError:  # it has none of its own
        pass
    else:
        yield Change(_("the base model's own template"), _rendered(reference, base.chat_template))
    for name, source in TEMPLATES.items():
        if source != own:
            yield Change(name, _rendered(reference, source))
    contents = (
        "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{%"
        " endif %}{% endfor %}"
    )
    yield Change(_("none: the bare contents"), _rendered(reference, contents))
    roles = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{%"
        " endfor %}"
    )
    yield Change(_("none: roles and contents as text"), _rendered(reference, roles))
    yield Change(_("none: roles and contents as text"), _rendered(reference, roles + "assistant:"))


def no_generation_prompt(reference: Reference) -> Iterator[Change]:
    reads = _rendered(reference, reference.template.source, add_generation_prompt=False)
    # The model then writes what is missing itself, and of that a text shows only what is no control
    # token.
    yield Change(reads=reads, opens=lambda prompt: prompt.ids[len(reads(prompt)) :])


def _bos(reference: Reference) -> int | None:
    number = reference.tokenizer.bos_token_id
    return None if number is None else int(number)


def bos_missing(reference: Reference) -> Iterator[Change]:
    first = _bos(reference)
    if first is not None:
        yield Change(
            reads=lambda prompt: prompt.ids[1:] if prompt.ids[:1] == (first,) else prompt.ids
        )


def bos_added(reference: Reference) -> Iterator[Change]:
    first = _bos(reference)
    if first is not None:
        yield Change(reads=lambda prompt: (first, *prompt.ids))


def history(reference: Reference) -> Iterator[Change]:
    source = reference.template.source

    def last_turn(messages: Messages) -> Messages:
        return messages[-1:]

    def last_turn_and_system(messages: Messages) -> Messages:
        return [message for message in messages[:-1] if message["role"] == "system"] + list(
            messages[-1:]
        )

    def last_turns(messages: Messages) -> Messages:
        return messages if len(messages) < 4 else messages[-3:]

    yield Change(
        _("the last question and the system turn"),
        _rendered(reference, source, last_turn_and_system),
    )
    yield Change(_("the last question alone"), _rendered(reference, source, last_turn))
    yield Change(_("the last two questions"), _rendered(reference, source, last_turns))


def system_left_out(reference: Reference) -> Iterator[Change]:
    def edit(messages: Messages) -> Messages:
        return [message for message in messages if message["role"] != "system"]

    yield Change(reads=_rendered(reference, reference.template.source, edit))


def system_added(reference: Reference) -> Iterator[Change]:
    for text in SYSTEM_TURNS:

        def edit(messages: Messages, text: str = text) -> Messages:
            own = messages[0]["role"] == "system"
            return messages if own else [{"role": "system", "content": text}, *messages]

        yield Change(repr(text), _rendered(reference, reference.template.source, edit))


def trimmed(reference: Reference) -> Iterator[Change]:
    def edit(messages: Messages) -> Messages:
        return [{**message, "content": message["content"].strip()} for message in messages]

    yield Change(reads=_rendered(reference, reference.template.source, edit))


def thinking(reference: Reference) -> Iterator[Change]:
    for name in ("enable_thinking", "thinking"):
        if name in reference.template.source:
            for value in (False, True):
                yield Change(
                    f"{name}={value}",
                    _rendered(reference, reference.template.source, **{name: value}),
                )
    block = reference.ids("<think>\n\n</think>\n\n")
    for opening in (block, reference.ids("<think>\n")):
        yield Change(
            repr(reference.tokenizer.decode(opening)),
            lambda prompt, opening=opening: prompt.ids + opening,
        )


def date(reference: Reference) -> Iterator[Change]:
    source = reference.tokenizer.chat_template
    if "strftime_now" in source:
        yield Change(datetime.date.today().isoformat(), _rendered(reference, source))


def specials_as_text(reference: Reference) -> Iterator[Change]:
    plain = partial(reference.tokenizer, add_special_tokens=False, split_special_tokens=True)
    yield Change(reads=lambda prompt: tuple(plain(prompt.text)["input_ids"]))


def cut_front(reference: Reference) -> Iterator[Change]:
    for room in (64, 128, 256, 512, 1024, 2048, 4096):
        yield Change(
            _("the last {count} tokens").format(count=room),
            lambda prompt, room=room: prompt.ids[-room:],
        )


# ---------------------------------------------------------------- of the weights


def no_adapter(reference: Reference) -> Iterator[Change]:
    if reference.source.adapter is not None:
        yield Change(weights=Weights(adapter=False))


def scales(reference: Reference) -> Iterator[Change]:
    if reference.source.adapter is None:
        return
    from peft import PeftConfig

    settings = PeftConfig.from_pretrained(str(reference.source.adapter))
    rank, alpha = getattr(settings, "r", 0), getattr(settings, "lora_alpha", 0)
    factors = {2.0: _("twice"), 0.5: _("half")}
    if rank and alpha:
        root = math.sqrt(rank)
        stabilised = getattr(settings, "use_rslora", False)
        factors |= {
            (1 / root if stabilised else root): "use_rslora",
            (root if stabilised else rank) / alpha: _("alpha left out"),
        }
    for factor, detail in factors.items():
        if not math.isclose(factor, 1.0):
            yield Change(f"{detail} (x{factor:.3g})", weights=Weights(scale=factor))


def dtypes(reference: Reference) -> Iterator[Change]:
    for dtype in ("bfloat16", "float16"):
        yield Change(dtype, weights=Weights(dtype=dtype))


def arithmetic(reference: Reference) -> Iterator[Change]:
    for dtype in ("bfloat16", "float16"):
        yield Change(dtype, weights=Weights(dtype=dtype, compute=dtype))


def quantised(reference: Reference) -> Iterator[Change]:
    for bits in (8, 4):
        yield Change(_("{bits} bits").format(bits=bits), weights=Weights(bits=bits))


def rope(reference: Reference) -> Iterator[Change]:
    config = reference.config.get_text_config()
    own = getattr(config, "rope_parameters", None)
    # none, or other ones for each kind of layer
    if not isinstance(own, dict) or "rope_theta" not in own:
        return
    # how it makes positions is not known
    if reference.trust_remote_code and hasattr(reference.config, "auto_map"):
        return
    theta, kept = (
        own["rope_theta"],
        {name: own[name] for name in ("partial_rotary_factor",) if name in own},
    )
    length = config.max_position_embeddings
    plain = {"rope_type": "default", "rope_theta": theta, **kept}
    others: list[tuple[str, dict[str, Any]]] = []
    if own.get("rope_type", "default") != "default":
        others.append((_("left out"), plain))
    for factor in (2.0, 4.0, 8.0):
        others.append((f"linear x{factor:g}", plain | {"rope_type": "linear", "factor": factor}))
        scaled = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        others.append((f"yarn x{factor:g}", plain | scaled))
    for other in (10_000.0, 500_000.0, 1_000_000.0, theta / 10, theta * 10):
        if other != theta:
            others.append((f"theta {other:g}", plain | {"rope_theta": other}))
    for detail, parameters in others:
        if parameters != own:
            yield Change(detail, weights=Weights(rope=tuple(parameters.items())))


# ---------------------------------------------------------------- of the decoding


def penalties(reference: Reference) -> Iterator[Change]:
    for penalty in PENALTIES:
        yield Change(f"{penalty:g}", penalty=penalty)
