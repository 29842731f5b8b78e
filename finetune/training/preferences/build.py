"""From a checked run on preferences to its trainer: the parts are those of fine-tuning (training/build_sft.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from finetune.config.preference_config import PreferenceConfig
from finetune.data import cache
from finetune.data.preference.batches import AnswerBatches
from finetune.data.preference.samples import PreferenceSamples
from finetune.data.samples import Samples
from finetune.modeling.preference_loss import WeighedHead
from finetune.runtime.device import LaunchWorld
from finetune.training.build_sft import Place, build_as
from finetune.training.preferences.objective import PreferenceObjective
from finetune.training.preferences.reference import AdapterOff
from finetune.training.preferences.saved_reference import SavedReference
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
        saved_references=_saved_references(config, data, place) if config.needs_reference and not asked else {},
    )


def _saved_references(config: PreferenceConfig, data: Prepared, place: Place) -> dict[str, SavedReference]:
    samples_cache = Path(config.cache_dir).expanduser() if config.cache_dir else cache.default_cache_dir()

    def saved(side: Literal["train", "valid"], samples: Samples, drawn: np.ndarray) -> SavedReference:
        return SavedReference(
            side=side,
            parts={"weights": data.identity["weights"], "data": samples.fingerprint, "dtype": place.dtype},
            drawn=drawn,
            folder=place.session.output_dir,
            others=() if place.start.folder is None else (place.start.folder.parent,),
            cache_dir=samples_cache / "reference",
            fresh=place.start.step == 0,
        )

    found = {"train": saved("train", data.train, data.batches.drawn())}
    if data.valid is not None:
        found["valid"] = saved("valid", data.valid, np.ones(len(data.valid), dtype=bool))
    return found
