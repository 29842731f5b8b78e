"""What the tools say of adapters and of what they stand on: the same options under a few names."""

from __future__ import annotations

from typing import Any

from finetune.commands.convert.draft import Draft, is_nothing

_BITS = {4: "nf4", 8: "int8"}
_LISTS = ("modules_to_save", "layers_to_transform")
_PATTERNS = ("rank_pattern", "alpha_pattern")


def quantization(
    name: str, bits: Any, draft: Draft, *, value: Any = None, form: Any = None
) -> None:
    """A base in so many bits.

    Args:
        name: option that says it, with this `value`.
        form: of 4 bits, where another option says it: nf4 or fp4.
    """
    value = bits if value is None else value
    kind = _BITS.get(bits)
    if kind is None or draft.values.get("finetuning") == "full":
        draft.lose(name, value, "an adapter on a base in 4 or 8 bits is trained here", trains=True)
        return
    if kind == "nf4" and form not in (None, "nf4"):
        draft.lose("quantization type", form, "nf4 is written", trains=True)
    draft.values["quantization"] = kind
    if kind == "int8":
        draft.note(
            name, value, "int8 is written: weights in 8 bits, and activations are not rounded here"
        )
    else:
        draft.note(name, value, "nf4 with double quantisation is written")


def beyond_plain(values: dict[str, Any], names: dict[str, str], draft: Draft) -> None:
    """Options of adapters beyond plain LoRA.

    Args:
        names: option -> setting of ours.
    """
    for option, ours in names.items():
        value = values.get(option)
        if is_nothing(value):
            continue
        if draft.values.get("finetuning") == "full":
            draft.lose(
                option, value, "all parameters are trained, and there is no adapter", trains=False
            )
        elif ours in _LISTS:
            given = (
                value.split(",")
                if isinstance(value, str)
                else value
                if isinstance(value, list)
                else [value]
            )
            draft.values[ours] = [part.strip() if isinstance(part, str) else part for part in given]
        elif ours in _PATTERNS and not isinstance(value, dict):
            draft.lose(option, value, "write it as a mapping of names to numbers", trains=True)
        else:
            draft.values[ours] = value
