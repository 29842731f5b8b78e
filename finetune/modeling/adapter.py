"""LoRA adapters: checked on a model without memory, added to a model, read again after saving.

Comments about other packages are about transformers 5.23 and peft 0.21.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from inspect import getsource, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from finetune.config.fields import flag
from finetune.config.paths import split_revision
from finetune.config.run_config import AdapterSettings
from finetune.errors import ConfigError, FinetuneError
from finetune.modeling.model_config import outside_text
from finetune.modeling.scratch import parameter_generator
from finetune.runtime.launch_environment import import_bitsandbytes

if TYPE_CHECKING:
    from peft import LoraConfig

    from finetune.config.pretrain_config import PretrainConfig
    from finetune.config.run_config import RunConfig


def _beyond_plain(config: RunConfig | PretrainConfig) -> AdapterSettings:
    """Return the settings beyond plain LoRA; pretraining has none."""
    return config if isinstance(config, AdapterSettings) else AdapterSettings()


def _targets(config: RunConfig | PretrainConfig) -> str | list[str]:
    """Return LoRA's targets for peft, which reads a single name as a regular expression."""
    targets = config.lora_target_modules
    if targets == "all-linear":
        return targets
    return [targets] if isinstance(targets, str) else list(targets)


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


# ---------------------------------------------------------------- checks before weights are read


def check_adapter(model_config: PretrainedConfig, config: RunConfig | PretrainConfig) -> None:
    """Raise ConfigError if peft cannot make the requested adapter, or would ignore part of it.

    Checked on the model without memory. This takes seconds for a large model; plain LoRA on all
    linear layers needs no check.
    """
    settings = _beyond_plain(config)
    layers = [str(number) for number in settings.layers_to_transform or ()]
    patterns = {"rank_pattern": settings.rank_pattern, "alpha_pattern": settings.alpha_pattern}
    has_patterns = any(patterns.values())
    is_plain = not (settings.modules_to_save or layers or has_patterns)
    if config.lora_target_modules == "all-linear" and config.lora_dropout == 0 and is_plain:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, trust_remote_code=config.trust_remote_code
        )
    _check_named(model, "modules_to_save", settings.modules_to_save)
    _check_named(model, "layers_to_transform", layers)
    if settings.quantization != "none":
        _check_saved_of_quantized(model, settings.quantization, settings.modules_to_save)
    # Experts are one three-dimensional parameter instead of linear modules. Only peft knows which
    # of them can be adapted.
    has_experts = any(parameter.dim() > 2 for parameter in model.parameters())
    linear = linear_names(model)
    if not has_experts:
        check_targets(linear, _targets(config))
        if not has_patterns:
            return
    import_bitsandbytes()
    from peft import get_peft_model

    try:
        lora = lora_config(model, config)
        with warnings.catch_warnings():
            # peft warns again when training makes the adapter
            warnings.simplefilter("ignore")
            adapted: Any = get_peft_model(model, lora, low_cpu_mem_usage=True).base_model
    except ValueError as error:
        experts = "; adapters on a mixture's experts have no dropout" if config.lora_dropout else ""
        raise ConfigError(
            f"peft cannot make this adapter: {str(error).splitlines()[0]}{experts}",
            where="--lora-target-modules, --lora-dropout",
            fix=(
                "use --lora-dropout 0, or adapt attention alone: --lora-target-modules q_proj"
                " k_proj v_proj o_proj"
            ),
        ) from error
    if has_experts:  # peft has removed names of experts from its target modules
        check_targets(linear, sorted(lora.target_modules or ()))
    adapted_names = adapted.targeted_module_names + adapted.targeted_parameter_names
    for setting, pattern in patterns.items():
        for key in pattern or ():
            # as peft matches them (get_pattern_key)
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in adapted_names):
                raise ConfigError(
                    f"{setting} names {key}, and no module of that name gets an adapter",
                    where=flag(setting),
                    fix=f"choose from {', '.join(sorted(_last_parts(adapted_names)))}",
                )


def _check_named(model: nn.Module, setting: str, names: Sequence[str]) -> None:
    """Raise ConfigError for a module or layer that the model does not have: peft ignores it."""
    modules = [
        name
        for name, module in model.named_modules()
        if next(module.parameters(), None) is not None
    ]
    missing = [
        name for name in names if not any(f".{module}".endswith(f".{name}") for module in modules)
    ]
    if missing:
        raise ConfigError(
            f"{setting} names {', '.join(missing)}, and the model has none",
            where=flag(setting),
            fix=f"choose from {', '.join(sorted(_last_parts(modules) - {''}))}",
        )


def _check_saved_of_quantized(model: PreTrainedModel, kind: str, names: Sequence[str]) -> None:
    """Raise ConfigError for modules to save that contain linear layers to be quantized: quantized
    weights cannot be trained.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        has_linear = any(
            isinstance(inner, nn.Linear) and inner is not head for inner in module.modules()
        )
        if has_linear and name.endswith(tuple(names)):  # as peft matches them
            raise ConfigError(
                f"modules_to_save has {name}, whose weights are in {kind}: they cannot be trained",
                where="--modules-to-save",
                fix=(
                    "on a quantised base embeddings, head and norms can be trained whole; LoRA"
                    " trains the rest"
                ),
            )


def check_targets(linear: set[str], targets: str | list[str]) -> None:
    """Check LoRA's targets by name: peft ignores a name that matches nothing if others match.

    Raises:
        ConfigError: a name that is not in `linear` (see `linear_names`), which the message lists.
    """
    if targets == "all-linear":
        return
    missing = [name for name in targets if name.rpartition(".")[2] not in linear]
    if missing:
        raise ConfigError(
            f"LoRA target {', '.join(missing)} matches no linear module of the model",
            where="--lora-target-modules",
            fix=f"choose from {', '.join(sorted(linear - {'lm_head'}))}, or use all-linear",
        )


def linear_names(model: nn.Module) -> set[str]:
    """Return the last parts of the names of the linear modules that can have an adapter."""
    linear = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return _last_parts(linear.difference(passed_over(model)))


def passed_over(model: nn.Module) -> list[str]:
    """Return the names of the linear modules that the model does not call but whose weights it
    reads: adapters on them have no effect.

    State-space layers pass some weights to their kernels (out_proj of Mamba 2, dt_proj of Jamba),
    and routers pass them to a function. This is read from the source because peft knows and refuses
    only some of these modules (tuners_utils._check_lora_target_modules_mamba).
    """
    found = []
    for name, module in model.named_modules():
        for child, inner in module.named_children():
            if isinstance(inner, nn.Linear) and child in _weights_read(type(module)):  # type: ignore[arg-type]
                found.append(f"{name}.{child}".removeprefix("."))
    return found


@cache
def _weights_read(kind: type[nn.Module]) -> frozenset[str]:
    """Return the children whose weight a module's own functions compute with; reading only dtype,
    device or shape does not count.
    """
    if not kind.__module__.startswith("transformers.models."):
        return frozenset()
    source = "".join(getsource(member) for member in vars(kind).values() if isfunction(member))
    return frozenset(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size))", source))


# ---------------------------------------------------------------- the adapter of a run


def lora_config(
    model: PreTrainedModel, config: RunConfig | PretrainConfig, token_ids: Sequence[int] = ()
) -> LoraConfig:
    """Return peft's settings for this model.

    Args:
        token_ids: tokens whose embeddings are trained.
    """
    import_bitsandbytes()
    from peft import LoraConfig

    settings = _beyond_plain(config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding.weight is head.weight
    ends = [name for name, module in model.named_modules() if module is embedding or module is head]
    targets = _targets(config)
    layers = settings.layers_to_transform
    if layers is not None and targets == "all-linear":  # peft does not accept both
        targets = sorted(linear_names(model) - _last_parts(ends))
    ties_saved = is_tied and any(name.endswith(settings.modules_to_save) for name in ends)
    outside = [rf"{re.escape(name)}\..*" for name in outside_text(model)]
    # One pattern for all layers: peft writes it into adapter_config.json.
    outside += sorted({re.sub(r"\d+", r"\\d+", re.escape(name)) for name in passed_over(model)})
    tokens = None
    if token_ids:  # peft itself handles a tied head
        tokens = {name: list(token_ids) for name in (ends[:1] if is_tied else ends)}
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        exclude_modules="|".join(outside) or None,
        layers_to_transform=None if layers is None else list(layers),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        rank_pattern=dict(settings.rank_pattern or {}),
        alpha_pattern=dict(settings.alpha_pattern or {}),
        modules_to_save=list(settings.modules_to_save) or None,
        # One weight stays one: otherwise embedding and head would be trained separately, and merged
        # into a model of another form.
        ensure_weight_tying=ties_saved,
        trainable_token_indices=tokens,
        task_type="CAUSAL_LM",
        bias="none",
        revision=split_revision(config.model or "")[1],  # of the base, on the hub
    )


def add_adapter(
    model: PreTrainedModel,
    config: RunConfig | PretrainConfig,
    *,
    one_dtype: bool,
    token_ids: Sequence[int] = (),
) -> nn.Module:
    """Add a LoRA adapter to the model. Its start is a pure function of (seed, parameter name): the
    same on every machine.

    Args:
        one_dtype: keep the adapter in the model's dtype (DeepSpeed requires one dtype among
            trainable parameters and keeps float32 masters itself). Otherwise the trainable
            parameters of a 16-bit model are held in float32.
        token_ids: tokens whose embeddings are trained as well.
    """
    import_bitsandbytes()
    from peft import get_peft_model

    dtype = model.get_input_embeddings().weight.dtype
    with warnings.catch_warnings():
        # About tied models: modules_to_save and tokens are meant to change what is tied to them.
        warnings.filterwarnings("ignore", message=r"Model with `tie_word_embeddings=True`")
        adapted = get_peft_model(
            model, lora_config(model, config, token_ids), autocast_adapter_dtype=not one_dtype
        )
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and not one_dtype:  # peft leaves modules_to_save in 16 bits
            parameter.data = parameter.data.float()
        if "lora_A" in name:
            # The distribution is peft's (kaiming_uniform with a=sqrt(5), Linear's default). Only
            # the generator is ours: a device's own gives other values on other devices.
            start = torch.empty(parameter.shape, dtype=torch.float32)
            generator = parameter_generator(config.seed, name)
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            with torch.no_grad():
                parameter.copy_(start)
    copies = getattr(model.get_input_embeddings(), "modules_to_save", {})
    if "default" in copies and not one_dtype:
        # Autocast does not change an embedding's dtype: held in float32, the embedding would turn
        # the residual stream into float32.
        copies["default"].register_forward_hook(lambda _module, _inputs, output: output.to(dtype))
    return adapted


def check_adapter_file(
    folder: Path, expected: dict[str, tuple[int, ...]] | None = None, *, trained: bool = True
) -> None:
    """Read a saved adapter again, and refuse one that is empty, incomplete or untrained.

    ZeRO-3 has saved adapters of `torch.Size([0])` in more than one package: a run of days, and
    nothing in the file.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        expected: names and shapes of tensors that must be present; None to check only those that
            are.
        trained: whether at least one lora_B must differ from its all-zero start.

    Raises:
        FinetuneError: names the first tensor that is wrong.
    """
    fix = "do not use this adapter; report it with your versions and DeepSpeed configuration"
    path = folder / "adapter_model.safetensors"
    try:
        json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
            learned = any(bool(file.get_tensor(name).any()) for name in shapes if "lora_B" in name)
    except (OSError, ValueError, SafetensorError) as error:
        raise FinetuneError(
            f"the saved adapter cannot be read: {error}", str(folder), fix
        ) from error
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if not shapes:
        empty = ["no tensor at all"]
    if empty:
        raise FinetuneError(f"the saved adapter has an empty tensor: {empty[0]}", str(path), fix)
    for name, shape in (expected or {}).items():
        if shapes.get(name) != shape:
            raise FinetuneError(
                f"the saved adapter has {name} as {shapes.get(name)}, not {shape}", str(path), fix
            )
    if trained and not learned:
        raise FinetuneError(
            "every lora_B of the saved adapter is zero: nothing was trained", str(path), fix
        )
