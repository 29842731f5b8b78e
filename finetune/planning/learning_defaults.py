"""Default learning rate and batch size for auto, from the model, the method and the number of
samples.

They affect what is trained. So they depend only on the run, never on the machine, and are stored in
the run's identity. The form of the law is from the literature below.
docs/evidence/defaults_benchmark.md shows what it costs compared with the best of a sweep.

- Rate and hidden size: Schulman et al., LoRA Without Regret (thinkingmachines.ai, 2025). The best
  rate of an adapter falls with the hidden size to the power of 0.78 (Llama). It is independent of
  the rank at a fixed alpha, and ten times the rate of full training. At hidden size 4096 its
  formulas give 2.9e-4 (Llama) and 4.7e-4 (Qwen).
- Rate and batch: under Adam the root of the batch (Malladi et al., arXiv 2205.10287).
- Batch: below the critical size the loss depends on the number of samples trained on, and smaller
  batches cost nothing but time (McCandlish et al., arXiv 1812.06162). A batch that is large
  compared with the data leaves too few steps to learn in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.config.fields import HUB_PREFIXES
from finetune.config.run_config import AUTO_BATCHES, RunConfig
from finetune.data.reading.files import expand_sources, read_records
from finetune.errors import ConfigError, DataError
from finetune.runtime.language import _

WIDTH, WIDTH_POWER = 4096, 0.78
# Rates at that hidden size and a batch of 32; adapters with alpha 32.
RATES = {"lora": 4e-4, "full": 4e-5}
ALPHA, BATCH, BATCH_POWER = 32, 32, 0.5
SETTINGS = ("global_batch_size", "learning_rate")
STEPS = 300  # minimum for a run; AUTO_BATCHES bound the resulting batch size


@dataclass(frozen=True)
class LearningDefaults:
    """Values that replace auto.

    Attributes:
        values: by the names of the settings; empty if nothing was auto.
        reason: for people; "" if nothing was auto.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def learning_defaults(
    config: RunConfig, *, width: int | None, samples: int, begun: Mapping[str, Any] | None = None
) -> LearningDefaults:
    """Return the values that replace auto in these settings.

    Args:
        width: hidden size of the model; None if its configuration has none.
        samples: number of samples of the training data.
        begun: the identity of the resumed run; its values are kept even if its data has changed.

    Raises:
        ConfigError: the rate is auto, and the width is not known.
    """
    wanted = [name for name in SETTINGS if getattr(config, name) == "auto"]
    if not wanted:
        return LearningDefaults()
    kept = {name: begun[name] for name in wanted if begun and begun.get(name)}
    values: dict[str, Any] = dict(kept)
    batch = values.get("global_batch_size", config.global_batch_size)
    if batch == "auto":
        batch = values["global_batch_size"] = batch_for(config, samples)
    if "learning_rate" in wanted and "learning_rate" not in values:
        if width is None:
            what = "learning_rate is auto, and the model's configuration has no hidden_size"
            raise ConfigError(what, "--learning-rate", "give a number")
        values["learning_rate"] = rate_for(config, width, batch)
    micro = config.micro_batch_size
    if micro != "auto" and batch % micro:
        values["micro_batch_size"] = max(size for size in range(1, micro) if batch % size == 0)
    named = ", ".join(f"{name} {value:g}" for name, value in values.items())
    if len(kept) == len(wanted):
        return LearningDefaults(
            values, _("auto: {values}, with which this run began").format(values=named)
        )
    text = _("auto: {values}; by {samples:,} samples, hidden size {width}, and finetuning {method}")
    reason = text.format(
        values=named,
        samples=samples,
        width=width,
        method=config.finetuning,
    )
    return LearningDefaults(values, reason)


def batch_for(config: RunConfig, samples: int) -> int:
    """Return the largest of `AUTO_BATCHES` with which the run has `STEPS` steps.

    `max_steps` is ignored: it sets the number of steps, and the batch size sets what each step is
    worth. The microbatch size is ignored too: it only affects how a batch is computed.
    """
    wanted = samples * config.num_epochs / STEPS
    return max((size for size in AUTO_BATCHES if size <= wanted), default=AUTO_BATCHES[0])


def with_batch_of_data(config: Any) -> Any:
    """Return a configuration with the batch that `auto` becomes by the records that are here.

    What a start leaves out of them (the validation split, bad records) is not known yet. Data that
    is not here leaves the batch at auto, which is planned as its largest.
    """
    if getattr(config, "global_batch_size", None) != "auto":
        return config
    if any(source.path.startswith(HUB_PREFIXES) for source in config.sources):
        return config
    enough = math.ceil(AUTO_BATCHES[-1] * STEPS / config.num_epochs)  # for the largest batch
    count = 0
    try:
        for file in expand_sources(config.sources):
            most = file.source.max_samples
            left = enough - count
            count += sum(1 for _ in read_records(file.path, min(left, most or left)))
    except DataError:
        return config
    with_rate = config.model_copy(update={"learning_rate": 1.0})  # which is not what is asked for
    return config.model_copy(update=learning_defaults(with_rate, width=1, samples=count).values)


def rate_for(config: RunConfig, width: int, batch: int) -> float:
    """Return the law's rate, in two digits."""
    rate = (
        RATES[config.finetuning] * (WIDTH / width) ** WIDTH_POWER * (batch / BATCH) ** BATCH_POWER
    )
    if config.finetuning == "lora":
        # With Adam a step changes the product by the rate times its scale, once for each of its
        # ranks.
        scale = config.lora_alpha / (config.lora_r**0.5 if config.use_rslora else config.lora_r)
        rate *= ALPHA / (scale * config.lora_r) / (config.lora_plus_ratio or 1.0) ** 0.5
    return float(f"{rate:.1e}")
