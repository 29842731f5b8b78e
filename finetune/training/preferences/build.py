"""From a checked run on preferences to its trainer: the parts are those of fine-tuning
(training/build_sft.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from finetune.batching.steps import AnswerBatches, BatchSource, InOrder
from finetune.config.preference_config import PreferenceConfig
from finetune.data import cache
from finetune.data.samples import PreferenceSamples, Samples
from finetune.modeling.preference_loss import WeighedHead
from finetune.runtime.launch_environment import LaunchWorld
from finetune.training.build_sft import Place, build_as
from finetune.training.preferences.objective import PreferenceObjective
from finetune.training.preferences.reference import AdapterOff
from finetune.training.preferences.reference_point import all_mismatched_pairs
from finetune.training.preferences.saved_reference import SavedReference, Side
from finetune.training.preferences.trainer import PreferenceTrainer
from finetune.training.prepare_sft import Prepared
from finetune.training.resume import Resume
from finetune.training.session import Session


def build_trainer(
    config: PreferenceConfig,
    world: LaunchWorld,
    data: Prepared,
    start: Resume,
    session: Session,
    *,
    device_type: str,
    dtype: str,
) -> PreferenceTrainer:
    """Build the trainer of a run on preferences; the process group exists."""
    assert isinstance(data.train, PreferenceSamples)
    asked = config.needs_reference and config.finetuning == "lora"
    objective = PreferenceObjective(config, data.train, AdapterOff() if asked else None)
    place = Place(world, session, start, device_type, dtype)
    return build_as(
        PreferenceTrainer,
        config,
        data,
        place,
        batches_class=AnswerBatches,
        head_class=WeighedHead,
        objective=objective,
        saved_references=_saved_references(config, data, place)
        if config.needs_reference and not asked
        else {},
    )


def _saved_references(
    config: PreferenceConfig, data: Prepared, place: Place
) -> dict[Side, SavedReference]:
    """By side; the list of global batches says beforehand which answers KTO's reference point is
    of.
    """
    samples_cache = (
        Path(config.cache_dir).expanduser() if config.cache_dir else cache.default_cache_dir()
    )

    def saved(
        side: Side, content: str, drawn: np.ndarray, pairs: np.ndarray | None = None
    ) -> SavedReference:
        return SavedReference(
            side=side,
            parts={"weights": data.identity["weights"], "data": content, "dtype": place.dtype},
            drawn=drawn,
            folder=place.session.output_dir,
            others=() if place.start.folder is None else (place.start.folder.parent,),
            cache_dir=samples_cache / "reference",
            fresh=place.start.step == 0,
            pairs=pairs,
        )

    def add_mismatched(side: Side, samples: Samples, batches: BatchSource) -> None:
        pairs = all_mismatched_pairs(batches, len(samples))
        # no global batch has two samples: the reference point is 0 and nothing is asked
        if not len(pairs):
            return
        content = f"{samples.fingerprint}:{hashlib.sha256(pairs.tobytes()).hexdigest()}"
        found[side] = saved(side, content, np.ones(len(pairs), dtype=bool), pairs)

    found: dict[Side, SavedReference] = {
        "train": saved("train", data.train.fingerprint, data.batches.drawn())
    }
    if data.valid is not None:
        found["valid"] = saved(
            "valid", data.valid.fingerprint, np.ones(len(data.valid), dtype=bool)
        )
    if config.loss == "kto":
        add_mismatched("train-mismatched", data.train, data.batches)
        if data.valid is not None:
            in_order = InOrder(len(data.valid), config.global_batch_size)
            add_mismatched("valid-mismatched", data.valid, in_order)
    return found
