"""From a configuration and a described cluster to what the planner computes with. No network, no
weights.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from finetune.config.adapter_config import EMBEDDINGS, HEADS, last_parts
from finetune.config.base_config import BaseConfig
from finetune.config.kinds import run_kind
from finetune.config.paths import is_hub_id, split_revision
from finetune.config.preference_config import PreferenceConfig
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve_object
from finetune.config.run_config import RunConfig, check_device
from finetune.errors import ConfigError
from finetune.planning.activations import Computing
from finetune.planning.adapters import adapter_numbers
from finetune.planning.shapes import (
    KNOWN_MODELS,
    ModelShape,
    known_config,
    read_shape,
    shape_of_config,
    shape_of_model,
)
from finetune.planning.token_data import document_bytes, stream_vocabulary
from finetune.planning.traffic import MUONS
from finetune.planning.workload import Cluster, Sharding, Workload
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.npu_tuning import hccl_buffer_bytes

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def shape_for(config: BaseConfig, model_config: Path | None = None) -> ModelShape:
    """The shape of the model that a configuration trains.

    Args:
        model_config: a config.json instead of the model's own.

    Raises:
        ConfigError: the model is neither a folder, nor in the hub's cache here, nor a public model
            known by name.
    """
    if model_config is not None:
        return read_shape(model_config)
    shape: ModelShape = run_kind(config).shape(config)
    return shape


def shape_of_pretraining(config: PretrainConfig) -> ModelShape:
    """The shape that pretraining makes, or of the model that it continues."""
    return shape_of_base_model(config) if config.model else shape_from_scratch(config)


def shape_from_scratch(config: PretrainConfig) -> ModelShape:
    """The shape that pretraining makes."""
    from finetune.modeling.scratch import make_empty_model, scratch_config

    vocabulary = config.vocab_size or stream_vocabulary(config)
    made = scratch_config(
        config.arch, config.depth, vocab_size=vocabulary, max_seq_len=config.max_seq_len
    )
    return shape_of_model(make_empty_model(made))


def shape_of_base_model(config: RunConfig | PretrainConfig) -> ModelShape:
    """The shape of the model that training starts from."""
    assert config.model is not None
    folder = Path(config.model).expanduser()
    if folder.exists():
        return read_shape(folder)
    if (cached := _cached_config(config.model)) is not None:
        return read_shape(cached)
    if (known := known_config(split_revision(config.model)[0])) is not None:
        return shape_of_config(known, config.model)
    raise ConfigError(
        f"the sizes of {config.model} are not known here",
        where="--model",
        fix=(
            "give --model-config FILE with the model's config.json (weights are not needed); known"
            " by name: "
        )
        + ", ".join(KNOWN_MODELS),
    )


def _cached_config(name: str) -> Path | None:
    """The config.json of a model's revision in the hub's cache on this machine; without one, of any
    that is there.
    """
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(name):
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    name, revision = split_revision(name)
    cached = try_to_load_from_cache(name, "config.json", cache_dir=hub, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    found = sorted(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
    return found[-1] if found and revision is None else None


def workload_of(config: BaseConfig, shape: ModelShape, cluster: Cluster) -> Workload:
    """What one process of the run has in memory."""
    work: Workload = run_kind(config).workload(config, shape, cluster)
    return work


def workload_of_settings(settings: Mapping[str, Any], *, processes: int) -> Workload:
    """The same of a run's settings on one node of CPUs, as the benchmark runs them."""
    config = resolve_object(settings, processes).config
    return workload_of(
        config, shape_for(config), Cluster(devices_per_node=processes, device_type="cpu")
    )


def element_bytes(config: BaseConfig, device_type: str) -> int:
    """Of the compute dtype: `auto` is 16 bit where there is an accelerator
    (device.choose_dtype).
    """
    if config.dtype == "auto":
        return 2 if device_type in ("cuda", "npu") else 4
    return DTYPE_BYTES[config.dtype]


def recomputes(config: BaseConfig, device_type: str) -> bool:
    """Whether activations are recomputed; where it is still auto, whether they would be without a
    plan.
    """
    choice = config.gradient_checkpointing
    return device_type != "cpu" if choice == "auto" else choice


def fine_tuning_workload(config: RunConfig, shape: ModelShape, cluster: Cluster) -> Workload:
    """What a process of a fine-tuning run has in memory."""
    check_device(config, cluster.device_type)
    size = element_bytes(config, cluster.device_type)
    engine, lora = bool(config.deepspeed), config.finetuning == "lora"
    adapted = shape.adapted(config.lora_target_modules) if lora else frozenset()
    adapter = adapter_numbers(config, shape, adapted) if lora else 0
    sharding = sharding_of(config.deepspeed, shape, config.lora_r if lora else 0)
    accelerator = cluster.device_type in ("cuda", "npu")
    tokens = config.tokens_per_microbatch
    paths = [source.path for source in (*config.sources, *config.valid_sources)]
    return Workload(
        shape=shape,
        computing=Computing(
            element_bytes=size,
            weight_bytes=size if lora or engine else 4,
            adapted=adapted,
            adapter_rank=config.lora_r if lora else 0,
            adapter_bytes=(size if engine else 4) if lora else 0,
            dropout=lora and config.lora_dropout > 0,
            checkpointing=recomputes(config, cluster.device_type),
            flash=accelerator,
            partitioned=sharding.engine and sharding.stage == 3,
            fused_lora=lora and config.fused_lora and not config.use_dora,
            whole_logits=_head_is_wrapped(shape, adapted, config),
            trained_rows=lora and bool(config.train_tokens),
            fused_layers=accelerator and config.fused_layers != "off",
            float32_attention=cluster.device_type == "cpu" and size == 2,
        ),
        sharding=sharding,
        trained=adapter or shape.total,
        adapter=adapter,
        processes=cluster.devices,
        local_processes=cluster.devices_per_node,
        microbatch_tokens=tokens,
        targets=tokens,
        longest=config.cutoff_len,
        microbatches=max(
            1, ceil(config.samples_per_step / (config.samples_per_microbatch * cluster.devices))
        ),
        muon=config.optimizer in MUONS,
        optimizer="adamw" if config.optimizer in MUONS else config.optimizer,
        # The others go from tensor to tensor.
        fused=DEVICE_KINDS[cluster.device_type].fused_adamw or config.optimizer != "adamw",
        device_type=cluster.device_type,
        file_bytes=size,
        loader_workers=config.dataloader_num_workers,
        hccl_bytes=_hccl_bytes(config, cluster),
        quantization=config.quantization,
        saves_behind=config.async_save and config.save_steps > 0,
        # A character of text is about a quarter of a token; a token is 4 bytes of id and 1 of mask.
        data_bytes=int(1.25 * sum(_size(path) for path in paths)),
    )


def preference_workload(config: PreferenceConfig, shape: ModelShape, cluster: Cluster) -> Workload:
    """What a process of a run on preferences has in memory: that of fine-tuning, with microbatches
    of whole pairs.

    The reference takes no more: with an adapter its forward is before the one that keeps
    activations, and of a model that is trained whole it is two numbers a pair.
    """
    asks = config.needs_reference and config.finetuning == "lora"
    work = fine_tuning_workload(config, shape, cluster)
    return replace(work, documents=config.documents_per_sample, asks_reference=asks)


def _head_is_wrapped(shape: ModelShape, adapted: frozenset[str], config: RunConfig) -> bool:
    """Whether the head is no plain linear layer, so that there is no chunked one
    (modeling/loss.make_chunked_head).
    """
    if config.trains_all_weights:
        return False
    saved = last_parts(config.modules_to_save)
    wrapped = (saved | adapted) & HEADS or (shape.tied and saved & EMBEDDINGS)
    return bool(wrapped or config.train_tokens)


def pretraining_workload(config: PretrainConfig, shape: ModelShape, cluster: Cluster) -> Workload:
    """What a process of a pretraining run has in memory."""
    size = element_bytes(config, cluster.device_type)
    lora = config.finetuning == "lora"
    compiled = (
        cluster.device_type == "cuda" and not lora if config.compile is None else config.compile
    )
    adapted = shape.adapted(config.lora_target_modules) if lora else frozenset()
    adapter = sum(shape.lora_tensors(config.lora_r, adapted))
    tokens = config.tokens_per_microbatch
    return Workload(
        shape=shape,
        computing=Computing(
            element_bytes=size,
            weight_bytes=size if lora else 4,
            adapted=adapted,
            adapter_rank=config.lora_r if lora else 0,
            adapter_bytes=4 if lora else 0,
            dropout=lora and config.lora_dropout > 0,
            fused_lora=lora and config.fused_lora,
            whole_logits=bool(adapted & HEADS),
            checkpointing=recomputes(config, cluster.device_type),
            compiled=compiled,
            flash=True,  # a window is one document
            # Compiled steps are fused as a whole (training/pretraining/build.py).
            fused_layers=cluster.device_type in ("cuda", "npu")
            and config.fused_layers != "off"
            and not compiled,
            float32_attention=cluster.device_type == "cpu" and size == 2,
        ),
        sharding=Sharding(),
        trained=adapter or shape.total,
        adapter=adapter,
        processes=cluster.devices,
        local_processes=cluster.devices_per_node,
        microbatch_tokens=tokens,
        targets=tokens,
        longest=config.max_seq_len,
        microbatches=config.gradient_accumulation_steps or 1,
        muon=config.optimizer in MUONS,
        fused=DEVICE_KINDS[cluster.device_type].fused_adamw,
        device_type=cluster.device_type,
        file_bytes=size if config.model else 0,
        loader_workers=config.dataloader_num_workers,
        hccl_bytes=_hccl_bytes(config, cluster),
        saves_behind=config.async_save and config.save_steps > 0,
        data_bytes=sum(_size(path) for path in (*config.train_data_path, *config.valid_data_path)),
        document_bytes=document_bytes(config),
    )


def _hccl_bytes(config: BaseConfig, cluster: Cluster) -> int:
    """Of a run on several NPUs: torch's group of all, DeepSpeed's own of all, and that of hpZ's
    second copies.
    """
    if cluster.device_type != "npu" or cluster.devices == 1:
        return 0
    zero = (config.deepspeed or {}).get("zero_optimization") or {}
    communicators = 1 + bool(config.deepspeed) + (int(zero.get("zero_hpz_partition_size", 1)) > 1)
    return hccl_buffer_bytes(config.hccl_buffer_mb, communicators)


def sharding_of(deepspeed: Mapping[str, Any] | None, shape: ModelShape, lora_rank: int) -> Sharding:
    """DeepSpeed's keys as numbers, with its defaults, and what "auto" comes to
    (config/deepspeed.py).
    """
    if not deepspeed:
        return Sharding()
    zero = deepspeed.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    square = shape.hidden * shape.hidden  # transformers/integrations/deepspeed.py: "auto"
    threshold = max(100_000, lora_rank * max(shape.hidden, shape.intermediate))

    def number(name: str, auto: int, default: int) -> int:
        value = zero.get(name, zero.get(name.removeprefix("stage3_"), default))
        return auto if value == "auto" else int(value)

    def offloads(name: str) -> bool:
        return (zero.get(name) or {}).get("device") in ("cpu", "nvme")

    return Sharding(
        engine=True,
        stage=stage,
        offload_optimizer=offloads("offload_optimizer"),
        offload_param=offloads("offload_param"),
        reduce_bucket=number("reduce_bucket_size", square, 500_000_000),
        prefetch_bucket=number("stage3_prefetch_bucket_size", int(0.9 * square), 50_000_000),
        persistence_threshold=number("stage3_param_persistence_threshold", threshold, threshold),
        max_live=number("stage3_max_live_parameters", 1_000_000_000, 1_000_000_000),
        max_reuse_distance=number("stage3_max_reuse_distance", 1_000_000_000, 1_000_000_000),
        sub_group=number("sub_group_size", 1_000_000_000, 1_000_000_000),
        overlap=bool(zero.get("overlap_comm", stage == 3)),
        hpz=max(1, int(zero.get("zero_hpz_partition_size", 1))) if stage == 3 else 1,
    )


def with_sharding(work: Workload, sharding: Sharding) -> Workload:
    """The same run sharded otherwise: dtypes of weights and adapters follow
    (training/build.py).
    """
    how, size = work.computing, work.computing.element_bytes
    lora = bool(work.adapter)
    computing = replace(
        how,
        weight_bytes=size if lora or sharding.engine else 4,
        adapter_bytes=(size if sharding.engine else 4) if lora else 0,
        partitioned=sharding.engine and sharding.stage == 3,
    )
    return replace(work, sharding=sharding, computing=computing)


def with_micro_batch(work: Workload, config: BaseConfig, micro_batch: int) -> Workload:
    """The same run with so many samples (windows) in a microbatch."""
    tokens = micro_batch * work.sample_tokens
    samples = config.tokens_per_step // work.sample_tokens
    count = max(1, ceil(samples / (micro_batch * work.processes)))
    return replace(work, microbatch_tokens=tokens, targets=tokens, microbatches=count)


def _size(name: str) -> int:
    """Bytes of a file; of the token files in a folder, else of all in it; of what a glob names."""
    path = Path(name)
    inside = (
        [*path.glob("*.bin")] or [*path.rglob("*")]
        if path.is_dir()
        else map(Path, glob.glob(name, recursive=True))
    )
    return sum(file.stat().st_size for file in inside if file.is_file())
