"""What the tools say of adapters and of what they stand on: the same options under a few names."""

from __future__ import annotations

from typing import Any

from finetune.commands.convert.draft import Draft

_BITS = {4: "nf4", 8: "int8"}


def quantization(name: str, bits: Any, draft: Draft, *, value: Any = None, form: Any = None) -> None:
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
        draft.note(name, value, "int8 is written: weights in 8 bits, and activations are not rounded here")
    else:
        draft.note(name, value, "nf4 with double quantisation is written")
