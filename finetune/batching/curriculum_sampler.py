"""The global batches of a curriculum as a sampler for `torch.utils.data.DataLoader` and
transformers.Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from finetune.batching.curriculum import schedule_of
from finetune.batching.sampler import GlobalBatches
from finetune.config.fields import CurriculumConfig
from finetune.errors import DataError


class CurriculumSampler:
    """Sample indices, one global batch after another, in the order of a run of this package.

    A loop that takes `global_batch_size` indices for each optimizer step has the curriculum's mix
    in every step, within one sample. The order depends only on the arguments: to resume, skip the
    indices that were taken.

    Args:
        difficulties: the name of each sample's difficulty, `(N,)`.
        global_batch_size: samples of an optimizer step over all devices. For transformers.Trainer,
            `per_device_train_batch_size * gradient_accumulation_steps * world_size`.
        total_steps: optimizer steps of the whole run; `max_steps` of transformers.Trainer.
        curriculum: levels and stages, as in `curriculum` of a run file; by default those of
            `RunConfig`.

    Attributes:
        batches: the `GlobalBatches`: step (from 0) to indices.

    Raises:
        DataError: a sample's difficulty is not in the curriculum, or a difficulty with weight has
            no samples.
        pydantic.ValidationError: the curriculum breaks a rule.

    >>> from finetune import CurriculumSampler
    >>> stages = [{"until": 0.5, "mix": [3, 1]}, {"until": 1.0, "mix": [1, 3]}]
    >>> names = ["easy"] * 50 + ["hard"] * 50
    >>> sampler = CurriculumSampler(names, global_batch_size=8, total_steps=4,
    ...                             curriculum={"levels": ["easy", "hard"], "stages": stages})
    >>> order = list(sampler)
    >>> is_hard = [names[index] == "hard" for index in order]
    >>> [sum(is_hard[start : start + 8]) for start in range(0, 32, 8)]
    [2, 2, 6, 6]
    """

    def __init__(
        self,
        difficulties: Sequence[str],
        *,
        global_batch_size: int,
        total_steps: int,
        seed: int = 42,
        curriculum: CurriculumConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(curriculum, CurriculumConfig):
            curriculum = CurriculumConfig.model_validate(dict(curriculum or {}))
        numbers = {name: number for number, name in enumerate(curriculum.levels)}
        unknown = next(
            (index for index, name in enumerate(difficulties) if name not in numbers), None
        )
        if unknown is not None:
            raise DataError(
                f"{difficulties[unknown]!r} is not one of the curriculum's difficulties",
                f"sample {unknown}",
                f"use {', '.join(numbers)}, or name it in the curriculum's levels",
            )
        self.batches = GlobalBatches(
            np.array([numbers[name] for name in difficulties], dtype=np.int64),
            schedule_of(curriculum),
            global_batch_size,
            total_steps,
            seed,
        )

    def __len__(self) -> int:
        return self.batches.global_batch_size * self.batches.total_steps

    def __iter__(self) -> Iterator[int]:
        for step in range(self.batches.total_steps):
            yield from self.batches.indices(step).tolist()
