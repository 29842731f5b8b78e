"""The faults that a deployment is tested for. One entry of `CAUSES` is all that a new one needs.

A fault of the prompt says what the model would have read instead, one of the weights which model would have answered;
what the trained model makes of that is compared with what the deployment answered (`diagnosis`). A fault of the
decoding is either of the same kind (a penalty), or seen in the answers themselves (`diagnosis.SEEN_IN_ANSWERS`).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jinja2

from finetune.commands.verify.evidence import Messages, Prompt
from finetune.commands.verify.reference import TRAINED, Reference, Weights
from finetune.data.templates import TEMPLATES
from finetune.errors import FinetuneError
from finetune.inference.loading import Source, load_tokenizer_of
from finetune.runtime.language import N_, _

Ids = tuple[int, ...]
SYSTEM_TURNS = ("You are a helpful assistant.", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
PENALTIES = (1.05, 1.1, 1.15, 1.2, 1.3, 1.5)  # 1.1 was Ollama's default, 1.05 is Qwen's generation_config.json


@dataclass(frozen=True)
class Change:
    """What would be otherwise, were it this fault.

    Attributes:
        reads: the ids that the model would read of a prompt; None: as in training.
        opens: ids that the model itself would begin its answer with, where they are not of the answer proper.
    """

    detail: str = ""
    reads: Callable[[Prompt], Ids] | None = None
    opens: Callable[[Prompt], Ids] | None = None
    weights: Weights = TRAINED
    penalty: float = 1.0


AS_TRAINED = Change()


@dataclass(frozen=True)
class Cause:
    """A fault: its name in JSON, what it is, how it is mended, and the forms it may have."""

    name: str
    what: str
    mend: str
    changes: Callable[[Reference], Iterable[Change]] | None = None


# ---------------------------------------------------------------- of the prompt


def _rendered(
    reference: Reference, source: str, edit: Callable[[Messages], Messages] = lambda messages: messages, **settings: Any
) -> Callable[[Prompt], Ids]:
    """Ids of a prompt under another template, or with other messages or settings of the template."""

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


def _templates(reference: Reference) -> Iterator[Change]:
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
        "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
    )
    yield Change(_("none: the bare contents"), _rendered(reference, contents))
    roles = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    yield Change(_("none: roles and contents as text"), _rendered(reference, roles))
    yield Change(_("none: roles and contents as text"), _rendered(reference, roles + "assistant:"))


def _no_generation_prompt(reference: Reference) -> Iterator[Change]:
    reads = _rendered(reference, reference.template.source, add_generation_prompt=False)
    # The model then writes what is missing itself, and of that a text shows only what is no control token.
    yield Change(reads=reads, opens=lambda prompt: prompt.ids[len(reads(prompt)) :])


def _bos(reference: Reference) -> int | None:
    number = reference.tokenizer.bos_token_id
    return None if number is None else int(number)


def _bos_missing(reference: Reference) -> Iterator[Change]:
    first = _bos(reference)
    if first is not None:
        yield Change(reads=lambda prompt: prompt.ids[1:] if prompt.ids[:1] == (first,) else prompt.ids)


def _bos_added(reference: Reference) -> Iterator[Change]:
    first = _bos(reference)
    if first is not None:
        yield Change(reads=lambda prompt: (first, *prompt.ids))


def _history(reference: Reference) -> Iterator[Change]:
    source = reference.template.source

    def last_turn(messages: Messages) -> Messages:
        return messages[-1:]

    def last_turn_and_system(messages: Messages) -> Messages:
        return [message for message in messages[:-1] if message["role"] == "system"] + list(messages[-1:])

    def last_turns(messages: Messages) -> Messages:
        return messages if len(messages) < 4 else messages[-3:]

    yield Change(_("the last question and the system turn"), _rendered(reference, source, last_turn_and_system))
    yield Change(_("the last question alone"), _rendered(reference, source, last_turn))
    yield Change(_("the last two questions"), _rendered(reference, source, last_turns))


def _system_left_out(reference: Reference) -> Iterator[Change]:
    def edit(messages: Messages) -> Messages:
        return [message for message in messages if message["role"] != "system"]

    yield Change(reads=_rendered(reference, reference.template.source, edit))


def _system_added(reference: Reference) -> Iterator[Change]:
    for text in SYSTEM_TURNS:

        def edit(messages: Messages, text: str = text) -> Messages:
            own = messages[0]["role"] == "system"
            return messages if own else [{"role": "system", "content": text}, *messages]

        yield Change(repr(text), _rendered(reference, reference.template.source, edit))


def _trimmed(reference: Reference) -> Iterator[Change]:
    def edit(messages: Messages) -> Messages:
        return [{**message, "content": message["content"].strip()} for message in messages]

    yield Change(reads=_rendered(reference, reference.template.source, edit))


def _thinking(reference: Reference) -> Iterator[Change]:
    for name in ("enable_thinking", "thinking"):
        if name in reference.template.source:
            for value in (False, True):
                yield Change(f"{name}={value}", _rendered(reference, reference.template.source, **{name: value}))
    block = reference.ids("<think>\n\n</think>\n\n")
    for opening in (block, reference.ids("<think>\n")):
        yield Change(repr(reference.tokenizer.decode(opening)), lambda prompt, opening=opening: prompt.ids + opening)


def _date(reference: Reference) -> Iterator[Change]:
    source = reference.tokenizer.chat_template
    if "strftime_now" in source:
        yield Change(datetime.date.today().isoformat(), _rendered(reference, source))


def _specials_as_text(reference: Reference) -> Iterator[Change]:
    plain = partial(reference.tokenizer, add_special_tokens=False, split_special_tokens=True)
    yield Change(reads=lambda prompt: tuple(plain(prompt.text)["input_ids"]))


def _cut_front(reference: Reference) -> Iterator[Change]:
    for room in (64, 128, 256, 512, 1024, 2048, 4096):
        yield Change(_("the last {count} tokens").format(count=room), lambda prompt, room=room: prompt.ids[-room:])


# ---------------------------------------------------------------- of the weights


def _no_adapter(reference: Reference) -> Iterator[Change]:
    if reference.source.adapter is not None:
        yield Change(weights=Weights(adapter=False))


def _scales(reference: Reference) -> Iterator[Change]:
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


def _dtypes(reference: Reference) -> Iterator[Change]:
    for dtype in ("bfloat16", "float16"):
        yield Change(dtype, weights=Weights(dtype=dtype))
        yield Change(dtype, weights=Weights(dtype=dtype, compute=dtype))


def _quantised(reference: Reference) -> Iterator[Change]:
    for bits in (8, 4):
        yield Change(_("{bits} bits").format(bits=bits), weights=Weights(bits=bits))


def _rope(reference: Reference) -> Iterator[Change]:
    config = reference.config.get_text_config()
    own = getattr(config, "rope_parameters", None)
    if not isinstance(own, dict) or "rope_theta" not in own:  # none, or other ones for each kind of layer
        return
    theta, kept = own["rope_theta"], {name: own[name] for name in ("partial_rotary_factor",) if name in own}
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


def _penalties(reference: Reference) -> Iterator[Change]:
    for penalty in PENALTIES:
        yield Change(f"{penalty:g}", penalty=penalty)


# In the order in which a deployment meets them; of two that explain the same, the first is named.
CAUSES = (
    Cause(
        "bos_missing",
        N_("the prompt lacks the token that begins it (BOS)"),
        N_("let the engine add BOS, or keep it in the template: add_bos_token, tokenizer.ggml.add_bos_token"),
        _bos_missing,
    ),
    Cause(
        "bos_added",
        N_("the prompt begins with a BOS that training did not have, or with two"),
        N_("take BOS out of the template or let the engine add none: send add_special_tokens false"),
        _bos_added,
    ),
    Cause(
        "generation_prompt",
        N_("the prompt does not open the answer (no generation prompt)"),
        N_("render with add_generation_prompt=true; let the template write the assistant's header"),
        _no_generation_prompt,
    ),
    Cause(
        "system_left_out",
        N_("the system turn does not reach the model"),
        N_("use the run's chat_template.jinja: the deployed one leaves out the role system"),
        _system_left_out,
    ),
    Cause(
        "system_added",
        N_("the engine writes a system turn that training did not have"),
        N_("take the default system prompt out of the template, the Modelfile or the proxy"),
        _system_added,
    ),
    Cause(
        "history",
        N_("earlier turns of the conversation do not reach the model"),
        N_("raise the context (num_ctx, --max-model-len, -c), and let the client and the template keep all turns"),
        _history,
    ),
    Cause(
        "context_cut",
        N_("the beginning of long prompts is cut off"),
        N_("raise the context: num_ctx, --max-model-len or -c to the longest conversation with its answer"),
        _cut_front,
    ),
    Cause(
        "contents_trimmed",
        N_("white space around messages is cut off"),
        N_("use the run's chat_template.jinja: the deployed one, or the engine, trims contents"),
        _trimmed,
    ),
    Cause(
        "date",
        N_("the template writes today's date, training wrote a fixed one"),
        N_("set the date that training used (26 Jul 2024) in the template or as its variable date_string"),
        _date,
    ),
    Cause(
        "thinking",
        N_("the template's thinking is switched otherwise than in training"),
        N_("send or set chat_template_kwargs so that enable_thinking is as in training"),
        _thinking,
    ),
    Cause(
        "special_tokens_as_text",
        N_("the template's control tokens are read as plain text"),
        N_("copy tokenizer.json and tokenizer_config.json of the run; let the engine parse special tokens"),
        _specials_as_text,
    ),
    Cause(
        "template",
        N_("another chat template writes the prompt"),
        N_(
            "copy chat_template.jinja of the run beside the model, or pass it: --chat-template (vLLM), "
            "--chat-template-file (llama.cpp), TEMPLATE (Ollama)"
        ),
        _templates,
    ),
    Cause(
        "repetition_penalty",
        N_("a repetition penalty changes the greedy answer"),
        N_("send repetition_penalty 1, and take it out of generation_config.json or the Modelfile (repeat_penalty 1)"),
        _penalties,
    ),
    Cause(
        "adapter_left_out",
        N_("the base model answers: the adapter is not applied"),
        N_("name the adapter in the request (vLLM: --lora-modules), or serve the folder that merge wrote"),
        _no_adapter,
    ),
    Cause(
        "adapter_scale",
        N_("the adapter is applied with another strength"),
        N_("merge once, from the base, with the adapter's own lora_alpha, r and use_rslora"),
        _scales,
    ),
    Cause(
        "rope_scaling",
        N_("positions are scaled otherwise than in training"),
        N_(
            "serve with the rope parameters of the merged config.json: no --rope-scaling, --rope-freq-base or overrides"
        ),
        _rope,
    ),
    Cause(
        "dtype",
        N_("weights or arithmetic have fewer bits than they are to have"),
        N_("serve with --dtype as trained, or merge again with merge --dtype"),
        _dtypes,
    ),
    Cause(
        "quantised",
        N_("the weights are quantised"),
        N_("serve unquantised weights, or accept it: this is what the quantisation changes"),
        _quantised,
    ),
    Cause(
        "end_ignored",
        N_("answers run on behind their end"),
        N_("add the end of turn to eos_token_id of generation_config.json (merge writes it), or send it as stop"),
    ),
    Cause(
        "stops_early",
        N_("answers end before their end"),
        N_("take stop texts or extra eos ids out of the request, generation_config.json or the Modelfile"),
    ),
    Cause(
        "answers_cut",
        N_("the server cuts answers off"),
        N_("raise its own limit: max_tokens, num_predict, or the context"),
    ),
    Cause(
        "not_greedy",
        N_("the answer to the same prompt changes: the server draws it, in spite of temperature 0"),
        N_("let the server take temperature 0: no sampling defaults that override the request"),
    ),
    Cause(
        "unknown",
        N_("the deployment differs, and no known cause explains it"),
        N_("compare model, tokenizer and engine settings by hand; --merged FOLDER tells files from engine"),
    ),
)
BY_NAME = {cause.name: cause for cause in CAUSES}


@dataclass(frozen=True)
class Hypothesis:
    """A fault in one of its forms, or two faults at once; without any it is the deployment as it should be."""

    causes: tuple[tuple[Cause, str], ...] = ()
    change: Change = AS_TRAINED

    def reads(self, prompt: Prompt) -> Ids:
        return prompt.ids if self.change.reads is None else self.change.reads(prompt)

    def joined(self, other: Hypothesis) -> Hypothesis:
        """A fault of the prompt and one behind it."""
        change = replace(other.change, reads=self.change.reads, opens=self.change.opens)
        return Hypothesis(self.causes + other.causes, change)


def hypotheses(reference: Reference, prompts: Sequence[Prompt]) -> list[Hypothesis]:
    """All forms of all faults that would change anything for these prompts, each once."""
    found: list[Hypothesis] = []
    known = {tuple(prompt.ids for prompt in prompts)}
    for cause in CAUSES:
        for change in cause.changes(reference) if cause.changes else ():
            if change.reads is not None:
                read = tuple(change.reads(prompt) for prompt in prompts)
                if read in known:
                    continue
                known.add(read)
                table = dict(zip([prompt.ids for prompt in prompts], read, strict=True))
                change = replace(change, reads=lambda prompt, table=table: table[prompt.ids])
            found.append(Hypothesis(((cause, change.detail),), change))
    return found
