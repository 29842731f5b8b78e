"""Fine-tune and pretrain language models: a run is a list of global batches; the machine is only
how it is executed.

import finetune
result = finetune.run({"model": "...", "data": "...", "output_dir": "..."})
result = finetune.run({"kind": "dpo", "model": "...", "data": "...", "output_dir": "..."})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.version import __version__

if TYPE_CHECKING:
    from finetune.batching.collate import PackedCollator
    from finetune.batching.curriculum_sampler import CurriculumSampler
    from finetune.commands.diagnose.command import diagnose_logs as diagnose
    from finetune.commands.diagnose.findings import Finding
    from finetune.commands.plan.command import plan
    from finetune.config.preference_config import PreferenceConfig
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.config.run_config import RunConfig
    from finetune.errors import FinetuneError
    from finetune.planning.plan import Plan
    from finetune.runs.follow import follow
    from finetune.training.preferences.trainer import PreferenceTrainer
    from finetune.training.pretraining.trainer import PretrainTrainer
    from finetune.training.results import RunResult
    from finetune.training.run import run
    from finetune.training.trainer import SFTTrainer

__all__ = [
    "CurriculumSampler",
    "Finding",
    "FinetuneError",
    "PackedCollator",
    "Plan",
    "PreferenceConfig",
    "PreferenceTrainer",
    "PretrainConfig",
    "PretrainTrainer",
    "RunConfig",
    "RunResult",
    "SFTTrainer",
    "__version__",
    "diagnose",
    "follow",
    "plan",
    "run",
]

# name: the module that defines it
_HOMES = {
    "CurriculumSampler": "finetune.batching.curriculum_sampler",
    "Finding": "finetune.commands.diagnose.findings",
    "FinetuneError": "finetune.errors",
    "PackedCollator": "finetune.batching.collate",
    "Plan": "finetune.planning.plan",
    "PreferenceConfig": "finetune.config.preference_config",
    "PreferenceTrainer": "finetune.training.preferences.trainer",
    "PretrainConfig": "finetune.config.pretrain_config",
    "PretrainTrainer": "finetune.training.pretraining.trainer",
    "RunConfig": "finetune.config.run_config",
    "RunResult": "finetune.training.results",
    "SFTTrainer": "finetune.training.trainer",
    "diagnose": "finetune.commands.diagnose.command",
    "follow": "finetune.runs.follow",
    "plan": "finetune.commands.plan.command",
    "run": "finetune.training.run",
}
_NAMES_THERE = {"diagnose": "diagnose_logs"}  # others have the same


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `import finetune` and the commands' help stay quick and need no
    # torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), _NAMES_THERE.get(name, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
