"""A run's own trainer on fake tensors: model, adapter, attention, loss, executor, optimizer as the
product builds them.

Replaced are, and only for a trace: the weights (made on fake tensors instead of read), the data
(documents of given lengths), the first step's rehearsal of the largest microbatch, what is said at
the start; and the branch of an accelerator is taken although the tensors' device is called `cpu`:
16 bits under autocast, checkpointing, flash attention over document bounds. CPU autocast casts the
same products as CUDA's; its list of float32 operators is shorter, but what a decoder of
transformers does in float32 it asks for by itself.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from roofline_data import Documents, EveryStep, Windows
from roofline_network import agreements, fake_group
from roofline_ops import use_stand_ins
from roofline_trace import Crossings, Recorder, Segment

from finetune.config.base_config import BaseConfig
from finetune.config.kinds import KINDS
from finetune.config.resolution import resolve_object
from finetune.planning.shapes import KNOWN_MODELS, known_config
from finetune.runtime.launch_environment import LaunchWorld

# From the public config.json; Qwen's are in finetune/planning/shapes.py.
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
MODELS: dict[str, dict[str, Any]] = {name: known_config(name) or {} for name in KNOWN_MODELS}
MODELS["meta-llama/Llama-3.1-8B"] = LLAMA_8B
MACHINE = 8  # devices of one
NANOCHAT = "nanochat-d12"  # pretraining from scratch; -dN for other depths


@dataclass(frozen=True)
class Case:
    """What is traced.

    Attributes:
        model: a name of `MODELS`, or nanochat-dN.
        tokens: of a row; documents of equal length share it.
        supervised: share of the tokens that are targets.
        settings: of the run, over those that follow from the rest.
        zero3: weights are 16-bit and partitioned; the engine is not run.
        device_type: cuda or npu: which attention and optimizer would run; cpu for no accelerator's
            branch.
        config: a model's configuration instead of that of `model`.
        processes: that have replicas of the model, or its parts.
        steps: to run; the last is recorded, because the optimizer makes its moments in the first.
        rows: microbatches of a step.
    """

    model: str
    tokens: int = 2048
    documents: int = 4
    supervised: float = 1.0
    zero3: bool = False
    device_type: str = "cuda"
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    processes: int = 1
    steps: int = 2
    rows: int = 2

    @property
    def pretraining(self) -> bool:
        return self.model.startswith("nanochat-d")

    @property
    def world(self) -> LaunchWorld:
        """Rank 0 of the replicas; partitioned weights are looked at in one process."""
        count = 1 if self.zero3 else self.processes
        return LaunchWorld(0, 0, count, min(count, MACHINE), launched=count > 1)

    def layers(self) -> int:
        """Blocks of the whole model."""
        if self.pretraining:
            return int(self.model.removeprefix("nanochat-d"))
        return int((self.config or MODELS[self.model])["num_hidden_layers"])


@dataclass
class Trace:
    """Microbatches of a step and what the step does beside them.

    Attributes:
        first: makes gradients; `second` adds to them; `last`, which may be one of them, is where
            DDP reduces them.
        rest: norm, optimizer, log.
        static_bytes: alive between two steps: weights and moments.
    """

    first: Segment
    second: Segment
    last: Segment
    rest: Segment
    static_bytes: int
    trained: int


class StepsAreDone(Exception):
    """Ends the training loop."""


def run_config(case: Case) -> BaseConfig:
    """The settings of such a step, by the product's own rules."""
    processes = case.world.world_size
    common = {"output_dir": "unused", "report_to": ["none"], "save_steps": 10**6}
    if case.pretraining:
        values = {"train_data_path": ["unused"], "depth": case.layers(), "max_seq_len": case.tokens}
        values |= {
            "vocab_size": 32768,
            "num_iterations": case.steps + 1,
            "compile": False,
            "gradient_checkpointing": False,
        }
        values |= {"device_batch_size": 1, **case.settings}
        values["total_batch_size"] = (
            processes * case.rows * int(values["device_batch_size"]) * case.tokens
        )
        return resolve_object(
            {**common, **values}, processes, KINDS["pretrain"].config_class
        ).config
    values = {
        "model": case.model,
        "data": ["unused"],
        "cutoff_len": case.tokens,
        "gradient_checkpointing": True,
    }
    values |= {
        "global_batch_size": processes * case.rows * case.documents,
        "learning_rate": 1e-4,
        "max_steps": case.steps + 1,
        "use_curriculum": False,
    }
    return resolve_object({**common, **values, **case.settings}, processes).config


def dtype_of(config: BaseConfig) -> str:
    """The compute dtype: an accelerator's unless the run names another."""
    return "bfloat16" if config.dtype == "auto" else config.dtype


def model_config(case: Case, layers: int) -> Any:
    """The model's configuration with fewer blocks."""
    from transformers import CONFIG_MAPPING

    values = {**(case.config or MODELS[case.model]), "num_hidden_layers": layers}
    values = {"max_position_embeddings": max(case.tokens, 4096), "pad_token_id": None, **values}
    return CONFIG_MAPPING[values.pop("model_type")](**values)


def empty_model(case: Case, layers: int) -> Any:
    """The model on the meta device, for the planner."""
    from finetune.modeling.scratch import make_empty_model

    return make_empty_model(
        scratch_shape(case, layers) if case.pretraining else model_config(case, layers)
    )


def scratch_shape(case: Case, layers: int) -> Any:
    """The configuration that pretraining makes, with fewer blocks of the same width."""
    from finetune.modeling.scratch import scratch_config

    config: Any = run_config(case)
    made = scratch_config(
        config.arch, case.layers(), vocab_size=config.vocab_size, max_seq_len=config.max_seq_len
    )
    return type(made)(**{**made.to_dict(), "num_hidden_layers": layers, "layer_types": None})


def trace(case: Case, layers: int) -> Trace:
    """Run steps of a model with so many blocks on fake tensors, and record the last."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = run_config(case)
    fake, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder()
    with (
        tempfile.TemporaryDirectory() as folder,
        device_branch(case),
        fake_group(case.world.world_size),
        agreements(lambda: recorder.segment.collectives),
        fake,
        recorder,
        Crossings(recorder, fake),
    ):
        config = config.model_copy(update={"output_dir": folder})
        trainer = build(case, config, layers)
        return record(trainer, recorder, case)


def build(case: Case, config: BaseConfig, layers: int, *, on: str = "cpu") -> Any:
    """The product's trainer of a run, on the tensors of the mode that is active, or on a real
    device.
    """
    made = (_pretrainer if case.pretraining else _fine_tuner)(case, config, layers, on)
    if (
        on == "cpu"
        and case.device_type != "cpu"
        and getattr(config, "fused_layers", "off") != "off"
    ):
        use_stand_ins(made.model)
    return made


def session_of(case: Case, folder: str) -> Any:
    from finetune.storage.run_log import RunLog
    from finetune.training.control import Control, StopSignals
    from finetune.training.resume import Resume

    return SimpleNamespace(
        world=case.world,
        start=Resume(None, 0),
        control=Control(case.world.world_size),
        signals=StopSignals(),
        runlog=RunLog(None),
        sample_log=None,
        output_dir=Path(folder),
        out_of_memory_note=lambda: None,
    )


def documents(case: Case, config: Any, model_config: Any) -> Any:
    """What a run of fine-tuning would have prepared."""
    from finetune.training.prepare import PreparedConversations

    samples = Documents(config.global_batch_size, case.tokens // case.documents, case.supervised)
    batches = EveryStep(len(samples), case.steps + 1)
    return PreparedConversations(
        identity={},
        batches=batches,  # type: ignore[arg-type]
        train=samples,  # type: ignore[arg-type]
        valid=None,
        tokenizer=None,  # type: ignore[arg-type]
        model_config=model_config,
        trained_token_ids=(5,) * len(getattr(config, "train_tokens", ())),
        packing=config.packing,
    )


def _fine_tuner(case: Case, config: Any, layers: int, on: str) -> Any:
    from transformers import AutoModelForCausalLM

    from finetune.modeling.attention import choose_attention
    from finetune.modeling.loss import let_choose_logits
    from finetune.training import build

    config = on_device(config, on)
    shape = model_config(case, layers)

    def load_model(
        config: Any, *, model_dtype: torch.dtype, zero3: bool, **of_quantised: Any
    ) -> Any:
        attention = choose_attention(shape)
        model_dtype = torch.bfloat16 if case.zero3 else model_dtype
        with torch.device(on):
            model = AutoModelForCausalLM.from_config(
                shape, dtype=model_dtype, attn_implementation=attention
            )
        let_choose_logits(model)
        return model.train()

    data = documents(case, config, shape)
    adapt, arguments = build.add_adapter, build.training_arguments
    with contextlib.ExitStack() as stack:
        replaced: dict[str, Any] = {"load_model": load_model}
        if case.zero3:  # as under DeepSpeed: one dtype, and no autocast
            replaced["add_adapter"] = lambda model, config, **rest: adapt(
                model, config, **rest | {"one_dtype": True}
            )
            replaced["training_arguments"] = lambda config, *rest, **more: arguments(
                config.model_copy(update={"dtype": "float32"}), *rest, **more
            )
            replaced["fuse_lora"] = _fuse_partitioned
        for name, value in replaced.items():
            stack.enter_context(patch.object(build, name, value))
        parts = build.build_fine_tuning(config, data, session_of(case, config.output_dir))
        return parts.trainer_class(parts)


def on_device(config: Any, device_type: str) -> Any:
    """The settings as they are at the end."""
    final = {"device_type": device_type, "dtype": dtype_of(config)}
    return config.model_copy(update=final)


def _fuse_partitioned(model: Any) -> int:
    """`fuse_lora` of weights that look like ZeRO-3's, which it leaves to the hooks of their own
    modules.
    """
    from finetune.modeling.lora import fuse_lora

    with patch.object(torch.Tensor, "ds_id", 0, create=True):
        return fuse_lora(model)


def _pretrainer(case: Case, config: Any, layers: int, on: str) -> Any:
    from finetune.modeling.scratch import make_unstarted_model
    from finetune.training.pretraining import build
    from finetune.training.pretraining.prepare import PreparedTexts

    config = on_device(config, on)
    shape = scratch_shape(case, layers)
    samples = Windows(config.global_batch_size, config.max_seq_len)
    batches = EveryStep(len(samples), case.steps + 1)
    data = PreparedTexts(
        identity={},
        batches=batches,  # type: ignore[arg-type]
        train=samples,  # type: ignore[arg-type]
        valid=None,
        model_config=shape,
        bytes_per_token=None,
    )

    def make_model(shape: Any, *, seed: int, attention: str) -> Any:
        with torch.device(on):
            return make_unstarted_model(shape, attention).train()

    with patch.object(build, "make_model", make_model):
        parts = build.build_pretraining(config, data, session_of(case, config.output_dir))
        return parts.trainer_class(parts)


@contextlib.contextmanager
def device_branch(case: Case) -> Iterator[None]:
    """What an accelerator has and a CPU has not."""
    from finetune.modeling import attention, loss
    from finetune.runtime import device
    from finetune.training import trainer
    from finetune.training.session import _forget_accelerate

    logger = logging.getLogger("finetune")
    level = logger.level
    logger.setLevel(logging.ERROR)
    accelerator = case.device_type != "cpu"
    chunk = loss.LOGITS_PER_CHUNK_ON_CPU
    if accelerator:
        full = case.pretraining or case.settings.get("finetuning") == "full"
        chunk = loss.LOGITS_PER_CHUNK * (loss.TRAINED_HEAD_CHUNKS if full else 1)
    kinds = {
        **device.DEVICE_KINDS,
        "cpu": replace(device.DEVICE_KINDS["cpu"], fused_adamw=case.device_type != "npu"),
    }
    with (
        patch.object(attention, "has_flash", lambda device: accelerator),
        patch.object(attention, "computes_on_cpu", lambda device: not accelerator),
        patch.object(loss, "LOGITS_PER_CHUNK_ON_CPU", chunk),
        patch("finetune.training.pretraining.build.keep_freed_memory", lambda device_type: None),
        patch.dict(device.DEVICE_KINDS, kinds),
        patch.object(trainer, "largest_microbatch", lambda step_batches: None),
        # Lists of tensors are one operator on accelerators, and on a CPU none.
        patch.object(
            torch.nn.utils.clip_grad, "_has_foreach_support", lambda tensors, device: accelerator
        ),
        patch("torch.optim.adam._default_to_fused_or_foreach", lambda *a, **k: (False, True)),
        # One kernel with a mask of bytes; a CPU's is made of several, with a mask of floats.
        patch.object(
            torch.nn.functional,
            "dropout",
            _fused_dropout if accelerator else torch.nn.functional.dropout,
        ),
        patch.object(torch, "from_numpy", on_host(torch.from_numpy)),
        # Module.to swaps fake parameters, which it refuses where something refers to one weakly, as
        # the modes here do (torch 2.13, nn/modules/module.py, _apply); of others it sets the data.
        patch.object(torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new.data)),
    ):
        try:
            yield
        finally:
            _forget_accelerate()
            logger.setLevel(level)


def _fused_dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return torch.native_dropout(x, p, training)[0] if training and p else x


def on_host(make: Callable[[np.ndarray], torch.Tensor]) -> Callable[[np.ndarray], torch.Tensor]:
    """What makes a tensor of the host's memory, in spite of the modes."""
    from torch.utils._python_dispatch import _disable_current_modes

    def made(array: np.ndarray) -> torch.Tensor:
        with _disable_current_modes():
            return make(array)

    return made


def record(trainer: Any, recorder: Recorder, case: Case) -> Trace:
    """Train, and cut what is recorded of the last step at its microbatches."""
    segments: list[Segment] = []
    static = 0
    executor, step = trainer.executor, trainer.training_step
    run, enter = executor.run, executor._microbatch

    def microbatch(*arguments: Any, **options: Any) -> Any:
        segments.append(recorder.begin())
        return enter(*arguments, **options)

    def run_step(*arguments: Any) -> Any:
        result = run(*arguments)
        segments.append(recorder.begin())
        return result

    def training_step(model: Any, inputs: Any, *arguments: Any) -> Any:
        nonlocal static
        if inputs.step == case.steps:
            recorder.close()
            raise StepsAreDone
        segments.clear()
        static = recorder.memory.now
        row = inputs.microbatches[0]
        recorder.document_lengths, recorder.targets = row.document_lengths, len(row.targets)
        return step(model, inputs, *arguments)

    executor.run, executor._microbatch, trainer.training_step = run_step, microbatch, training_step
    with contextlib.suppress(StepsAreDone):
        trainer.train()
    *microbatches, rest = segments
    first, second, last = microbatches[0], microbatches[:2][-1], microbatches[-1]
    trained = sum(
        parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad
    )
    return Trace(first, second, last, rest, static, trained)
