"""Fine-tune and pretrain language models: a run is a list of global batches; the machine is only how it is executed.

import finetune
result = finetune.run({"model": "...", "data": "...", "output_dir": "..."})
result = finetune.run({"kind": "dpo", "model": "...", "data": "...", "output_dir": "..."})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.version import __version__

if TYPE_CHECKING:
    from finetune.config.run_config import RunConfig
    from finetune.errors import FinetuneError
    from finetune.training.results import RunResult
    from finetune.training.run import run

__all__ = ["FinetuneError", "RunConfig", "RunResult", "__version__", "run"]

_HOMES = {
    "FinetuneError": "finetune.errors",
    "RunConfig": "finetune.config.run_config",
    "RunResult": "finetune.training.results",
    "run": "finetune.training.run",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `import finetune` and the commands' help stay quick and need no torch.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'finetune' has no attribute {name!r}")
