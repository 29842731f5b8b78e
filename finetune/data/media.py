"""Pictures, video and sound in records, which nothing here trains: found, or taken out, and the
text stands alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from finetune.data.problems import RecordProblem

MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# Parts of a content, in the forms of OpenAI's protocols and of transformers' processors.
_PART_TYPES = frozenset(
    [f"{kind}{form}" for kind in ("image", "video", "audio") for form in ("", "_url")]
    + [f"input_{kind}" for kind in ("image", "video", "audio")]
)
# Where LLaVA's and LLaMA-Factory's data has one; only read as such in a record that has media.
_PLACEHOLDER = re.compile(r"<(?:image|video|audio)>\n?")
_CONTENT_KEYS = ("content", "value")


class MediaLeftOut(RecordProblem):
    """The record has media, and --on-media leaves such records out."""

    def __init__(self) -> None:
        super().__init__("has images, video or sound")


def holds_something(value: Any) -> bool:
    """Whether a key's value says anything; some files write an empty list as a text."""
    return bool(value) and not (
        isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")
    )


def _holds_media(value: Any) -> bool:
    """As `holds_something`; a list or struct of nothing, as parquet has it of a missing image, says
    nothing.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(
            inner is not None and (_is_number(inner) or _holds_media(inner)) for inner in value
        )
    return holds_something(value)


def _is_number(value: Any) -> bool:
    """A pixel or a sound's sample, which may be 0."""
    return isinstance(value, (int, float))


def _is_media_part(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in _PART_TYPES


def has_media(value: Any) -> bool:
    """Whether a record, or one of its turns or contents, has media."""
    if isinstance(value, (list, tuple)):
        return any(map(has_media, value))
    if not isinstance(value, Mapping):
        return False
    if _is_media_part(value) or any(_holds_media(value.get(key)) for key in MEDIA_KEYS):
        return True
    return any(has_media(inner) for inner in value.values() if isinstance(inner, (list, tuple)))


def without_media(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with neither media nor the places in its texts where they were."""
    return {key: _stripped(value) for key, value in record.items() if key not in MEDIA_KEYS}


def _stripped(value: Any) -> Any:
    if isinstance(value, str):
        return _PLACEHOLDER.sub("", value)
    if isinstance(value, (list, tuple)):
        return [
            _stripped(one)
            for one in value
            if not (isinstance(one, Mapping) and _is_media_part(one))
        ]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "text":
        return {**value, "text": _stripped(value.get("text"))}
    # Of a turn only its content: arguments of calls and results of tools stay as they are.
    kept = {key: inner for key, inner in value.items() if key not in MEDIA_KEYS}
    return kept | {key: _stripped(kept[key]) for key in _CONTENT_KEYS if key in kept}
