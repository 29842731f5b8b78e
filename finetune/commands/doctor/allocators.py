"""Settings of PyTorch's allocators that contradict one another."""

from __future__ import annotations

from collections.abc import Mapping

from finetune.commands.doctor.check import Check, fail, warn
from finetune.commands.doctor.facts import Facts


def _settings(text: str) -> dict[str, str]:
    return {
        key.strip(): value.strip() for key, _, value in (part.partition(":") for part in text.split(",")) if key.strip()
    }


def npu_allocator(facts: Facts) -> Check | None:
    """torch_npu refuses expandable segments beside limits on splitting or collecting."""
    text = facts.get("PYTORCH_NPU_ALLOC_CONF")
    settings = _settings(text)
    expandable = settings.get("expandable_segments", "").lower() == "true"
    others = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in settings]
    if expandable and others:
        return fail(
            "npu_allocator",
            (
                f"PYTORCH_NPU_ALLOC_CONF={text}: {' and '.join(others)} cannot go with expandable_segments",
                f"PYTORCH_NPU_ALLOC_CONF={text}：{'、'.join(others)} 不能与 expandable_segments 同用",
            ),
            (
                "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True (rows of many lengths), or keep "
                "max_split_size_mb alone",
                "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True（适合长短不一的样本），或只保留 "
                "max_split_size_mb",
            ),
        )
    return _malformed("npu_allocator", "PYTORCH_NPU_ALLOC_CONF", text, settings)


def cuda_allocator(facts: Facts) -> Check | None:
    """The old and the new name with different settings; a backend that has no expandable segments."""
    old, new = facts.get("PYTORCH_CUDA_ALLOC_CONF"), facts.get("PYTORCH_ALLOC_CONF")
    if old and new and _settings(old) != _settings(new):
        return warn(
            "cuda_allocator",
            (
                f"PYTORCH_CUDA_ALLOC_CONF={old} and PYTORCH_ALLOC_CONF={new} differ: the new name wins",
                f"PYTORCH_CUDA_ALLOC_CONF={old} 与 PYTORCH_ALLOC_CONF={new} 不同：以新名称为准",
            ),
            ("keep PYTORCH_ALLOC_CONF alone", "只保留 PYTORCH_ALLOC_CONF"),
        )
    for name, text in (("PYTORCH_ALLOC_CONF", new), ("PYTORCH_CUDA_ALLOC_CONF", old)):
        settings = _settings(text)
        if settings.get("backend") == "cudaMallocAsync" and settings.get("expandable_segments", "").lower() == "true":
            return warn(
                "cuda_allocator",
                (
                    f"{name}={text}: cudaMallocAsync has no expandable_segments",
                    f"{name}={text}：cudaMallocAsync 不支持 expandable_segments",
                ),
                ("keep one of the two", "二者保留其一"),
            )
        if (found := _malformed("cuda_allocator", name, text, settings)) is not None:
            return found
    return None


def _malformed(name: str, variable: str, text: str, settings: Mapping[str, str]) -> Check | None:
    """Allocators refuse a key without a value when the first tensor is made."""
    broken = [key for key, value in settings.items() if not value]
    if not broken:
        return None
    return fail(
        name,
        (
            f"{variable}={text}: {broken[0]!r} has no value; write key:value,key:value",
            f"{variable}={text}：{broken[0]!r} 没有值；格式为 key:value,key:value",
        ),
        (f"export {variable}=expandable_segments:True", f"export {variable}=expandable_segments:True"),
    )
