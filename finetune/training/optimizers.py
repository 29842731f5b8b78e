"""Optimizers and the schedule of their rates.

Pretraining uses Muon for the blocks' matrices and AdamW for everything else, as one torch
optimizer. Full fine-tuning can use optimizers other than AdamW.

The optimizer and rate of each parameter follow nanochat (karpathy/nanochat, gpt.py setup_optimizer
and base_train.py). Muon itself is in muon.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.optimization import Adafactor

from finetune.planning.traffic import MUONS
from finetune.training.muon import BatchedMuon, NorMuon, evaluated

if TYPE_CHECKING:
    from finetune.config.pretrain_config import PretrainConfig

# Rates are given for this width and batch; the decay for this many tokens (12 per parameter at
# depth 12).
REFERENCE_WIDTH = 768
REFERENCE_BATCH_TOKENS = 2**19
REFERENCE_TOKENS = 12 * (12 * 12 * 768**2 + 32768 * 768)
# The law for the decay was found on models worth more than a tenth of those tokens; smaller ones do
# not go beyond it.
LARGEST_DECAY_FACTOR = 10.0
# The best learning rate falls with the tokens of a run to this power (Bjorck et al. 2024, arXiv
# 2409.19913, beta).
HORIZON_POWER = 0.32
# for a run with a seventy-sixth of the tokens; shorter runs were not measured
LARGEST_HORIZON_FACTOR = 4.0
EMBEDDING_BETA2 = 0.995
EMBEDDING_DECAY, HEAD_DECAY = 0.001, 0.01
MOMENTUM_START, MOMENTUM_TOP, MOMENTUM_END, MOMENTUM_STEPS = 0.85, 0.97, 0.90, 400


@dataclass(frozen=True)
class Rates:
    """Learning rates and decay of a run, scaled."""

    matrix: float
    embedding: float
    head: float
    vector: float
    decay: float


def scaled_rates(
    config: PretrainConfig, *, width: int, worth_tokens: float, run_tokens: float
) -> Rates:
    """Return the rates that the run trains with.

    With B tokens a step, all rates are scaled by (B / 2^19)^lr_batch_exponent, and the rates of
    AdamW also by (width / 768)^-1/2. The decay is scaled by sqrt(B / 2^19) x (reference tokens /
    horizon). The horizon is `worth_tokens`, or `run_tokens` if they are more. A run of fewer tokens
    than `worth_tokens` has higher rates, by (worth / run)^0.32, but no higher decay: its weights
    would shrink away before they had learned.

    Args:
        worth_tokens: tokens that the model is worth: target_param_data_ratio x parameters.
        run_tokens: tokens of the run.
    """
    single = config.learning_rate
    matrix, embedding, head = (
        single or rate for rate in (config.matrix_lr, config.embedding_lr, config.unembedding_lr)
    )
    scale, width_factor, decay = config.lr_scale, 1.0, 1.0
    if config.lr_scaling:
        batch = config.total_batch_size / REFERENCE_BATCH_TOKENS
        horizon = min(LARGEST_HORIZON_FACTOR, max(1.0, worth_tokens / run_tokens) ** HORIZON_POWER)
        scale *= batch**config.lr_batch_exponent * horizon
        width_factor = (width / REFERENCE_WIDTH) ** -0.5
        decay = min(
            LARGEST_DECAY_FACTOR,
            math.sqrt(batch) * REFERENCE_TOKENS / max(worth_tokens, run_tokens),
        )
    adamw = scale * width_factor
    return Rates(
        matrix=matrix * (scale if config.optimizer in MUONS else adamw),
        embedding=embedding * adamw,
        head=head * adamw,
        vector=head * adamw,
        decay=config.weight_decay * decay,
    )


def parameter_kinds(model: PreTrainedModel) -> dict[str, list[tuple[str, torch.nn.Parameter]]]:
    """Every trainable parameter under matrix, head, embedding or vector, in the model's order.

    A head that is tied to the embedding counts as embedding, and so does a table that a block looks
    tokens up in. A two-dimensional parameter outside the blocks that is neither is a vector's kin:
    Muon is for the blocks' matrices.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    layers = model.get_decoder().layers
    blocks = {id(p) for layer in layers for p in layer.parameters()}
    tables = {
        id(m.weight)
        for layer in layers
        for m in layer.modules()
        if isinstance(m, torch.nn.Embedding)
    }
    kinds: dict[str, list[tuple[str, torch.nn.Parameter]]] = {
        "matrix": [],
        "head": [],
        "embedding": [],
        "vector": [],
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter is embedding or id(parameter) in tables:
            kind = "embedding"
        elif parameter is head:
            kind = "head"
        else:
            kind = "matrix" if parameter.ndim == 2 and id(parameter) in blocks else "vector"
        kinds[kind].append((name, parameter))
    return kinds


def make_optimizer(
    model: PreTrainedModel,
    config: PretrainConfig,
    rates: Rates,
    *,
    fused: bool,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> JointOptimizer:
    """Return the optimizer of a pretraining run. The model is where it will be trained.

    Args:
        fused: whether AdamW's fused kernels are right on this device.
        compute_dtype: of the model's products.
    """
    kinds = {kind: [p for _, p in members] for kind, members in parameter_kinds(model).items()}
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    groups = {
        "head": {
            "lr": rates.head,
            "betas": (beta1, beta2),
            "weight_decay": HEAD_DECAY,
        },
        "embedding": {
            "lr": rates.embedding,
            "betas": (beta1, EMBEDDING_BETA2),
            "weight_decay": EMBEDDING_DECAY,
        },
        "vector": {
            "lr": rates.vector,
            "betas": (beta1, beta2),
            "weight_decay": 0.0,
        },
    }
    parts: list[torch.optim.Optimizer] = []
    if config.optimizer in MUONS:
        matrices = {"params": kinds["matrix"], "kind": "matrix"}
        settings: dict[str, Any] = {
            "lr": rates.matrix,
            "weight_decay": rates.decay,
            "momentum": MOMENTUM_START,
        }
        if config.optimizer == "normuon":
            dtype = torch.float32 if compute_dtype == torch.float32 else torch.bfloat16
            parts.append(NorMuon([matrices], dtype=dtype, **settings))
        else:
            parts.append(BatchedMuon([matrices], **settings))
    else:
        groups = {
            "matrix": {
                "lr": rates.matrix,
                "betas": (beta1, beta2),
                "weight_decay": rates.decay,
            }
        } | groups
    adamw = [
        {
            "params": kinds[kind],
            "kind": kind,
            **group,
        }
        for kind, group in groups.items()
        if kinds[kind]
    ]
    parts.append(torch.optim.AdamW(adamw, eps=config.adam_epsilon, fused=fused))
    return JointOptimizer(parts)


def make_small_optimizer(
    name: str, model: PreTrainedModel, groups: list[dict[str, Any]], arguments: TrainingArguments
) -> torch.optim.Optimizer:
    """Make an optimizer for full fine-tuning with less state than AdamW's 8 bytes per parameter.

    The learning rates are the same as AdamW's.

    Args:
        name: one of
            - adamw-8bit: 2 bytes, 8 for vectors (Dettmers et al. 2021, arXiv:2110.02861)
            - adafactor: one value per row and column (Shazeer and Stern 2018, arXiv:1804.04235)
            - muon: 4 bytes for the blocks' matrices; its updates are as large as AdamW's (Liu et
              al. 2025, arXiv:2502.16982)
        groups: parameters with and without weight decay.
    """
    rate, betas = arguments.learning_rate, (arguments.adam_beta1, arguments.adam_beta2)
    if name == "adamw-8bit":
        from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]

        eight: torch.optim.Optimizer = AdamW8bit(
            groups, lr=rate, betas=betas, eps=arguments.adam_epsilon
        )
        return eight
    if name == "adafactor":
        return Adafactor(
            groups,
            lr=rate,
            scale_parameter=False,
            relative_step=False,
        )
    matrices = {id(parameter) for _, parameter in parameter_kinds(model)["matrix"]}
    muon, adamw = (
        [
            {**group, "params": [p for p in group["params"] if (id(p) in matrices) == of_muon]}
            for group in groups
        ]
        for of_muon in (True, False)
    )
    fused = str(arguments.optim).endswith("fused")
    parts = [
        BatchedMuon([g for g in muon if g["params"]], lr=rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [g for g in adamw if g["params"]],
            lr=rate,
            betas=betas,
            eps=arguments.adam_epsilon,
            fused=fused,
        ),
    ]
    return JointOptimizer(parts)


def step_count(step: int, optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the number of steps in the form of torch's optimizers: on the device for fused
    kernels, which read it there.
    """
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return torch.tensor(float(step), device=parameter.device if fused else "cpu")


def restored_state(
    optimizer: Any, parameter: torch.Tensor, moments: dict[str, torch.Tensor], step: int
) -> dict[str, Any]:
    """Return what the optimizer holds for a parameter after `step` steps, given float32 moments."""
    state: dict[str, Any] = dict(moments)
    if "momentum_buffer" in state:  # Muon counts no steps
        return state
    if "absmax1" in state:
        if "dynamic" not in optimizer.name2qmap:
            optimizer.fill_qmap()
        for number, table in ((1, "dynamic"), (2, "udynamic")):
            state[f"state{number}"] = state[f"state{number}"].to(torch.uint8)
            state[f"qmap{number}"] = optimizer.name2qmap[table].to(parameter.device)
    if "state1" in state or isinstance(optimizer, Adafactor):
        state["step"] = step  # a number, as theirs
    elif state:
        state["step"] = step_count(step, optimizer, parameter)
    return state


def skip_where(optimizer: torch.optim.Optimizer, nonfinite: torch.Tensor) -> bool:
    """Let the optimizer's next step be empty if `nonfinite` is 1, which the device finds out by
    itself.

    Returns:
        False for an optimizer that cannot: the host has to look, and wait for the device.
    """
    parts = optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)
    for part in parts:
        # What torch.amp.GradScaler sets where `_step_supports_amp_scaling`: fused Adam kernels
        # return at once.
        if not isinstance(part, BatchedMuon) and not all(
            group.get("fused") for group in part.param_groups
        ):
            return False
    for part in parts:
        part.found_inf = nonfinite  # type: ignore[attr-defined]
    return True


def set_apart(optimizer: torch.optim.Optimizer, chosen: Collection[int], ratio: float) -> None:
    """Put parameters, by their ids, into separate groups after the others, at `ratio` times the
    rate.
    """
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if own:
            group["params"] = [
                parameter for parameter in group["params"] if id(parameter) not in chosen
            ]
            optimizer.add_param_group(
                {
                    **group,
                    "params": own,
                    "lr": ratio * group["lr"],
                }
            )


class StepSchedule(torch.optim.lr_scheduler.LRScheduler):
    """Learning rates as a function of the step, set before each one; the only place that sets them.

    torch's schedulers count their calls, and Trainer leaves those out after a step that was skipped
    (ZeRO-1/2, float16): resumed right after it, a run would have other rates. So `step` does
    nothing here. Groups are the same objects in DeepSpeed's optimizer and the one below it.

    Args:
        factor: step (0-based) -> factor on the rate that each group was made with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        self.factor = factor
        super().__init__(optimizer)

    def set(self, step: int) -> None:
        """Set the rates of a step (0-based)."""
        factor = self.factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters as one: one list of groups and one state, shared
    with the parts.

    So what sets a group's rate or reads a parameter's state (schedulers, accelerate, checkpoints)
    need not know of them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self.group_counts = [len(part.param_groups) for part in self.parts]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts see the groups and the state of the whole."""
        start = 0
        for part, count in zip(self.parts, self.group_counts, strict=True):
            part.param_groups = self.param_groups[start : start + count]
            part.state = self.state
            start += count

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of every part."""
        loss = evaluated(closure)
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def decay_factor(step: int, total_steps: int) -> float:
    """Factor on the matrices' weight decay for the update after `step` steps: half a cosine to
    0.
    """
    return 0.5 * (1.0 + math.cos(math.pi * min(step, total_steps) / total_steps))


def momentum_at(step: int, total_steps: int, warmdown_ratio: float) -> float:
    """Muon's momentum for the update after `step` steps: 0.85 to 0.97 in 400 steps, to 0.90 in the
    warm-down.
    """
    rise = min(step / MOMENTUM_STEPS, 1.0)
    momentum = (1 - rise) * MOMENTUM_START + rise * MOMENTUM_TOP
    warmdown_steps = round(warmdown_ratio * total_steps)
    if step <= total_steps - warmdown_steps:
        return momentum
    left = (total_steps - step) / warmdown_steps
    return min(momentum, left * MOMENTUM_TOP + (1 - left) * MOMENTUM_END)


def set_matrix_schedule(
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    total_steps: int,
    warmdown_ratio: float,
    decay: float,
) -> None:
    """Set momentum and decay of the matrices for the next update. A function of the step: nothing
    is restored.
    """
    for group in optimizer.param_groups:
        if group["kind"] == "matrix":
            group["weight_decay"] = decay * decay_factor(step, total_steps)
            if "momentum" in group:
                group["momentum"] = momentum_at(step, total_steps, warmdown_ratio)
