"""From a configuration and a described cluster to what the planner computes with. No network, no
weights.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.config.kinds import run_kind
from finetune.config.paths import split_revision
from finetune.config.preference_config import PreferenceConfig
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.run_config import EMBEDDINGS, HEADS, RunConfig, check_device, last_parts
from finetune.errors import ConfigError, FinetuneError
from finetune.planning.shapes import (
    KNOWN_MODELS,
    ModelShape,
    known_config,
    read_shape,
    shape_of_config,
    shape_of_model,
)
from finetune.planning.traffic import MUONS
from finetune.planning.workload import Cluster, Computing, Sharding, Workload
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.launch_environment import hccl_buffer_bytes

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
}
DEFAULT_VOCABULARY = 32768  # of `prepare`, if there are no token files yet
# Of `--train-tokens auto`, which only the tokenizer and the weights decide: a template ends answers
# with one or two.
_AUTO_TOKENS = 2

# ---------------------------------------------------------------- the model's shape


def shape_for(config: BaseConfig, model_config: Path | None = None) -> ModelShape:
    """Return the shape of the model that a configuration trains.

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
    """Return the shape that pretraining makes, or of the model that it continues."""
    return shape_of_base_model(config) if config.model else shape_from_scratch(config)


def shape_from_scratch(config: PretrainConfig) -> ModelShape:
    """Return the shape that pretraining makes."""
    from finetune.modeling.scratch import make_empty_model, scratch_config

    vocabulary = config.vocab_size or _vocabulary(config)
    made = scratch_config(
        config.arch, config.depth, vocab_size=vocabulary, max_seq_len=config.max_seq_len
    )
    return shape_of_model(make_empty_model(made))


def shape_of_base_model(config: RunConfig | PretrainConfig) -> ModelShape:
    """Return the shape of the model that training starts from."""
    from huggingface_hub import constants

    from finetune.modeling.hub import folder_of

    assert config.model is not None
    folder, (name, revision) = folder_of(config.model), split_revision(config.model)
    if folder is None and revision is None:  # of any commit, if what `main` is was not recorded
        snapshots = f"models--{name.replace('/', '--')}/snapshots/*"
        folder = next(
            iter(sorted(Path(constants.HF_HUB_CACHE).glob(snapshots), reverse=True)), None
        )
    if folder is not None and folder.exists():
        return read_shape(folder)
    if (known := known_config(name)) is not None:
        return shape_of_config(known, config.model)
    raise ConfigError(
        f"the sizes of {config.model} are not known here",
        where="--model",
        fix="give --model-config FILE with the model's config.json (weights are not needed); known"
        f" by name: {', '.join(KNOWN_MODELS)}",
    )


# ---------------------------------------------------------------- the workload


def workload_of(config: BaseConfig, shape: ModelShape, cluster: Cluster) -> Workload:
    """Return what one process of the run has in memory."""
    work: Workload = run_kind(config).workload(config, shape, cluster)
    return work


def recomputes(config: BaseConfig, device_type: str) -> bool:
    """Return whether activations are recomputed; while it is auto, whether they would be without a
    plan.
    """
    choice = config.gradient_checkpointing
    return device_type != "cpu" if choice == "auto" else choice


def fine_tuning_workload(config: RunConfig, shape: ModelShape, cluster: Cluster) -> Workload:
    """Return what a process of a fine-tuning run has in memory."""
    check_device(config, cluster.device_type)
    lora = config.finetuning == "lora"
    sharding = sharding_of(config.deepspeed, shape, config.lora_r if lora else 0)
    paths = [source.path for source in (*config.sources, *config.valid_sources)]
    muon = config.optimizer in MUONS
    work = _workload(config, shape, cluster, sharding)
    # A head with an adapter is no plain linear layer, so that there is no chunked one
    # (modeling/loss.make_chunked_head).
    saved = last_parts(config.modules_to_save)
    wrapped = (saved | work.computing.adapted) & HEADS or (shape.tied and saved & EMBEDDINGS)
    computing = replace(
        work.computing,
        fused_lora=config.fused_lora and not config.use_dora,
        whole_logits=lora and bool(wrapped or config.train_tokens),
        trained_rows=lora and bool(config.train_tokens),
    )
    return replace(
        work,
        computing=computing,
        longest=config.cutoff_len,
        microbatches=max(
            1, ceil(config.samples_per_step / (config.samples_per_microbatch * cluster.devices))
        ),
        optimizer="adamw" if muon else config.optimizer,
        # The others go from tensor to tensor.
        fused=work.fused or config.optimizer != "adamw",
        quantization=config.quantization,
        # A character is about a quarter of a token. A token takes 4 bytes for the id and 1 for the
        # mask.
        data_bytes=int(1.25 * sum(_size(path) for path in paths)),
    )


def preference_workload(config: PreferenceConfig, shape: ModelShape, cluster: Cluster) -> Workload:
    """Return what a process of a run on preferences has in memory: the same as in fine-tuning, with
    microbatches of whole pairs.

    The reference needs no more memory. With an adapter its forward runs before the one that keeps
    activations. If the model is fully trained, the reference is only two values per pair.
    """
    asks = config.needs_reference and config.finetuning == "lora"
    work = fine_tuning_workload(config, shape, cluster)
    return replace(work, documents=config.documents_per_sample, asks_reference=asks)


def pretraining_workload(config: PretrainConfig, shape: ModelShape, cluster: Cluster) -> Workload:
    """Return what a process of a pretraining run has in memory."""
    lora = config.finetuning == "lora"
    on_cuda = cluster.device_type == "cuda"
    compiled = on_cuda and not lora if config.compile is None else config.compile
    work = _workload(config, shape, cluster, Sharding())
    computing = replace(
        work.computing,
        fused_lora=config.fused_lora,
        whole_logits=bool(work.computing.adapted & HEADS),
        compiled=compiled,
        # Compiled steps are fused as a whole (training/pretraining/build.py).
        fused_layers=work.computing.fused_layers and not compiled,
    )
    return replace(
        work,
        computing=computing,
        longest=config.max_seq_len,
        microbatches=config.gradient_accumulation_steps or 1,
        file_bytes=work.file_bytes if config.model else 0,
        data_bytes=sum(_size(path) for path in (*config.train_data_path, *config.valid_data_path)),
    )


def _workload(
    config: RunConfig | PretrainConfig, shape: ModelShape, cluster: Cluster, sharding: Sharding
) -> Workload:
    """Return what all kinds of runs have in common."""
    device_type, tokens = cluster.device_type, config.tokens_per_microbatch
    # auto is 16 bits on an accelerator (device.choose_dtype).
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device_type == "cpu" else "bfloat16"
    lora, size = config.finetuning == "lora", DTYPE_BYTES[dtype]
    adapted = shape.adapted(config.lora_target_modules) if lora else frozenset()
    adapter = adapter_parameters(config, shape, adapted) if lora else 0
    computing = Computing(
        element_bytes=size,
        weight_bytes=size,
        adapted=adapted,
        dropout=lora and config.lora_dropout > 0,
        checkpointing=recomputes(config, device_type),
        fused_layers=device_type != "cpu" and config.fused_layers != "off",
        float32_attention=device_type == "cpu" and size == 2,
    )
    hccl_bytes = 0
    if device_type == "npu" and cluster.devices > 1:
        # torch's group of all ranks, DeepSpeed's own, and the group for hpZ's second copies.
        zero = (config.deepspeed or {}).get("zero_optimization") or {}
        has_second_copies = int(zero.get("zero_hpz_partition_size", 1)) > 1
        communicators = 1 + bool(config.deepspeed) + has_second_copies
        hccl_bytes = hccl_buffer_bytes(config.hccl_buffer_mb, communicators)
    work = Workload(
        shape=shape,
        computing=computing,
        sharding=sharding,
        trained=adapter or shape.total,
        adapter=adapter,
        processes=cluster.devices,
        local_processes=cluster.devices_per_node,
        microbatch_tokens=tokens,
        targets=tokens,
        muon=config.optimizer in MUONS,
        fused=DEVICE_KINDS[device_type].fused_adamw,
        device_type=device_type,
        file_bytes=size,
        loader_workers=config.dataloader_num_workers,
        hccl_bytes=hccl_bytes,
        saves_behind=config.async_save and config.save_steps > 0,
    )
    return with_sharding(work, sharding)


def with_sharding(work: Workload, sharding: Sharding) -> Workload:
    """Return the same run with other sharding; the dtypes of weights and adapters follow
    (training/build.py).
    """
    size, wide = work.computing.element_bytes, 4
    computing = replace(
        work.computing,
        weight_bytes=size if work.adapter or sharding.engine else wide,
        adapter_bytes=(size if sharding.engine else wide) if work.adapter else 0,
        partitioned=sharding.stage == 3,
    )
    return replace(work, sharding=sharding, computing=computing)


def with_micro_batch(work: Workload, config: BaseConfig, micro_batch: int) -> Workload:
    """Return the same run with `micro_batch` samples (windows) in a microbatch."""
    tokens = micro_batch * work.sample_tokens
    samples = config.tokens_per_step // work.sample_tokens
    count = max(1, ceil(samples / (micro_batch * work.processes)))
    return replace(
        work,
        microbatch_tokens=tokens,
        targets=tokens,
        microbatches=count,
    )


def adapter_parameters(
    config: RunConfig | PretrainConfig, shape: ModelShape, adapted: Collection[str]
) -> int:
    """Count the parameters that are trained in addition to the base, by the names that peft matches
    (0.21).

    Args:
        adapted: names of the linear layers that get an adapter.
    """
    # settings that continued pretraining does not have
    ranks = getattr(config, "rank_pattern", None) or {}
    layers = getattr(config, "layers_to_transform", None)
    saved = getattr(config, "modules_to_save", ())
    # Modules that are fully trained, as copies. A module matches if its name, or the name of a
    # module around it, ends in one of `saved`.
    whole = re.compile(rf"({'|'.join(map(re.escape, saved))})(\.|$)") if saved else None

    def is_copied(path: str) -> bool:
        return whole is not None and whole.search(path) is not None

    parameters = sum(size for path, size in shape.vectors if is_copied(path))
    copied_ends = 0
    for matrix in shape.matrices:
        if is_copied(matrix.path):
            copied_ends += matrix.is_end
            if not (shape.tied and copied_ends == 2 and matrix.is_end):  # a tied head is counted
                parameters += matrix.size
        elif matrix.name in adapted and (matrix.linear or matrix.name in HEADS):
            layer = re.search(r"\.(\d+)\.", matrix.path)
            if layers is None or (layer is not None and int(layer[1]) in layers):
                # As peft's get_pattern_key and check_target_module_exists.
                named = (key for key in ranks if re.match(rf"(.*\.)?({key})$", matrix.path))
                rank = ranks.get(next(named, ""), config.lora_r)
                parameters += rank * (matrix.inputs + matrix.outputs)
                parameters += matrix.outputs * bool(getattr(config, "use_dora", False))
    # Rows of embedding and head; a tied head has the embedding's.
    train_tokens = getattr(config, "train_tokens", ())
    tokens = _AUTO_TOKENS if "auto" in train_tokens else len(set(train_tokens))
    return parameters + tokens * shape.hidden * (1 if shape.tied else 2)


def sharding_of(deepspeed: Mapping[str, Any] | None, shape: ModelShape, lora_rank: int) -> Sharding:
    """DeepSpeed's settings as numbers, with its defaults, and what "auto" becomes
    (config/deepspeed.py; transformers/integrations/deepspeed.py).
    """
    if not deepspeed:
        return Sharding()
    zero = deepspeed.get("zero_optimization", {})
    stage, square = int(zero.get("stage", 0)), shape.hidden * shape.hidden
    threshold = max(100_000, lora_rank * max(shape.hidden, shape.intermediate))
    keys = {
        "reduce_bucket": ("reduce_bucket_size", square),
        "prefetch_bucket": ("stage3_prefetch_bucket_size", int(0.9 * square)),
        "persistence_threshold": ("stage3_param_persistence_threshold", threshold),
        "max_live": ("stage3_max_live_parameters", 1_000_000_000),
        "max_reuse_distance": ("stage3_max_reuse_distance", 1_000_000_000),
        "sub_group": ("sub_group_size", 1_000_000_000),
    }
    sizes = {"persistence_threshold": threshold}
    for field, (name, auto) in keys.items():
        value = zero.get(name, zero.get(name.removeprefix("stage3_")))
        if value is not None:
            sizes[field] = auto if value == "auto" else int(value)

    def offloads(name: str) -> bool:
        return (zero.get(name) or {}).get("device") in ("cpu", "nvme")

    return Sharding(
        engine=True,
        stage=stage,
        offload_optimizer=offloads("offload_optimizer"),
        offload_param=offloads("offload_param"),
        overlap=bool(zero.get("overlap_comm", stage == 3)),
        hpz=max(1, int(zero.get("zero_hpz_partition_size", 1))) if stage == 3 else 1,
        **sizes,
    )


# ---------------------------------------------------------------- data


def token_data(config: PretrainConfig) -> dict[str, Any] | None:
    """Return the windows of a run's training data, as `plan --json` has them; None without its
    files.

    Raises:
        DataError: what the run itself would refuse.
    """
    from finetune.data.corpus.windows import training_windows

    if not _shards(config):
        return None
    windows = training_windows(config, vocab_size=config.vocab_size or _vocabulary(config))
    return {
        "tokens": windows.tokens,
        "windows": len(windows),
        "window_kind": config.windows,
        "cut_tokens": windows.cut_tokens,
        "steps_per_pass": len(windows) / config.global_batch_size,
    }


def _vocabulary(config: PretrainConfig) -> int:
    """Return the vocabulary in the header of the first token file that has one."""
    from finetune.data.corpus.token_shards import read_header

    headers = filter(None, map(read_header, _shards(config)))
    return next((header.vocabulary for header in headers), DEFAULT_VOCABULARY)


def _shards(config: PretrainConfig) -> tuple[Path, ...]:
    """Return the training files; empty if they do not exist."""
    from finetune.data.corpus.token_shards import find_shards

    try:
        return find_shards(config.train_data_path, "train")
    except FinetuneError:
        return ()


def _size(name: str) -> int:
    """Return the bytes of a file or of a glob's files; of a folder's token files, if it has any,
    otherwise of all its files.
    """
    path = Path(name)
    inside = (
        [*path.glob("*.bin")] or [*path.rglob("*")]
        if path.is_dir()
        else map(Path, glob.glob(name, recursive=True))
    )
    return sum(file.stat().st_size for file in inside if file.is_file())
