"""What the place of an exception tells, when no entry knows its words: `entries/places.toml`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from finetune.commands.diagnose.knowledge import Symptom, knowledge

# Of the device, the network or other processes, wherever they are raised.
_ELSEWHERE = re.compile(
    r"CUDA (?:error|out)|CUBLAS|CUDNN|NCCL|HCCL|NPU (?:error|out)|\bACL\b|aclnn|[Gg]loo|\bc10d"
    r"|Dist\w*Error|Time(?:d )?out|timed? out"
    r"|Connection|Memory|Interrupt|SystemError|Exit\b|Abort\b|Rendezvous"
)
# Installed, or started from its source.
_REPOSITORIES = (
    r"llama-?factory|llmtuner|ms-swift|swift|axolotl|megatron\w*|mindspeed\w*|modellink|verl|openrlhf"
    r"|vllm\w*|sglang\w*|sd-scripts|ai-toolkit|comfyui|llama\.cpp|unsloth\w*|deepspeed"
)
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/src/(?:trl|peft|transformers|accelerate|datasets)/"
    rf"|/(?i:{_REPOSITORIES})(?:-\w+)*/"
)
# Python's own errors about a name, a key or an argument that is not there.
_MISMATCH = re.compile(r"(?:Attribute|Type|Key|Index|Name)Error$")
_PACKAGE = re.compile(rf"-packages/(\w+)|/((?i:{_REPOSITORIES})(?:-\w+)*)/|/(?:src|python)/(\w+)/")
_STANDARD = re.compile(r"/lib/python3|<frozen |<string>")


def symptom_of_place(frames: Sequence[str], code: str, text: str) -> tuple[Symptom, dict[str, str]]:
    """Return the entry for an exception by its place, with values for its texts.

    Args:
        frames: of the traceback, outermost first: `File "PATH", line N, in FUNCTION`.
        code: the source line of the innermost frame, "" if the log does not show it.
        text: how the traceback ends: `NAME: MESSAGE`.
    """
    named = knowledge().named
    values = {"error": text.strip()} | ({"code": code} if code else {})
    if frames:
        values["frame"] = readable(frames[-1])
    if packages := packages_in(frames):
        values["packages"] = packages
    name = text.partition(":")[0].rpartition(".")[2].strip()
    places = [entry for entry in knowledge().symptoms if entry.id.startswith("place_")]
    for entry in places:
        if entry.exceptions and re.search(entry.exceptions, name):
            return entry, values
    if not frames or _ELSEWHERE.search(text):
        return named["unexplained"], values
    for frame in reversed(frames):
        # A folder of one's own tells nothing.
        place = frame if _LIBRARY.search(frame) else "/" + frame.rpartition("/")[2]
        for entry in places:
            if any(re.search(pattern, place) for pattern in entry.frames):
                if frame is not frames[-1]:
                    values["frame"] = f"{readable(frame)}, {values['frame']}"
                return entry, values
    if _MISMATCH.search(name) and _LIBRARY.search(frames[-1]):
        return named["place_versions"], values
    own = not _LIBRARY.search(frames[-1]) and not _STANDARD.search(frames[-1])
    if name == "RuntimeError" and not code.startswith(("raise ", "assert ")):
        own = False  # of an operator of torch, whose code has no frames
    return named["place_program" if own else "unexplained"], values


def packages_in(frames: Sequence[str]) -> str:
    """Return the last two packages that a traceback goes through, the innermost first."""
    found = [match for frame in reversed(frames) if (match := _PACKAGE.search(frame))]
    names = dict.fromkeys(next(filter(None, match.groups())) for match in found)
    return ", ".join([name for name in names if name != "torch"][:2])


def readable(frame: str) -> str:
    """Return `collate (train.py, line 41)` of `File "PATH", line N, in FUNCTION`."""
    file, _, rest = frame.removeprefix('File "').partition('", ')
    place, _, function = rest.partition(", in ")
    name = function.partition(": ")[0] or "<module>"
    return f"{name} ({file.rpartition('-packages/')[2]}, {place})"
