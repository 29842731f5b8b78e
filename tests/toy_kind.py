"""A third kind of run, which the package does not know: a model of bytes, trained on one text file.

Registered by `import toy_kind`; run by `python -m toy_kind --text FILE --output-dir FOLDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from finetune.commands.doctor.check import Check
from finetune.config.base_config import BaseConfig
from finetune.config.fields import Text, setting
from finetune.config.kinds import RunKind, register
from finetune.errors import ConfigError, FinetuneError
from finetune.planning.inputs import Cluster
from finetune.planning.memory import Workload
from finetune.training.run import run_command

BYTES, WINDOW_TOKENS = 256, 16


class ToyConfig(BaseConfig):
    """The settings of a toy run."""

    command: ClassVar[str] = "python -m toy_kind"

    text: Text = setting(group="model and data", unit="file", description="The text to train on.")
    windows_per_step: int = setting(4, ge=1, group="batch and length", description="Global batch.")
    max_steps: int = setting(3, ge=1, group="batch and length", description="Optimizer steps.")
    learning_rate: float = setting(1e-3, gt=0, group="optimizer", description="Learning rate.")

    @property
    def tokens_per_step(self) -> int:
        return self.windows_per_step * WINDOW_TOKENS

    def describe_batch(self, world_size: int) -> tuple[str, dict[str, int]]:
        text = f"{self.windows_per_step} windows of bytes a step on {world_size} processes"
        return text, {"windows": self.windows_per_step}


def check(config: ToyConfig) -> list[FinetuneError]:
    missing = ConfigError(f"there is no text {config.text}", "--text", "name a file")
    return [] if Path(config.text).is_file() else [missing]


def describe(settings: Mapping[str, Any]) -> str:
    return f"the bytes of {settings.get('text')}"


def probe(config: ToyConfig) -> Iterator[Check]:
    size = Path(config.text).stat().st_size
    yield Check("data").ok("{text}: {size} bytes", text=config.text, size=size)


def shape(config: ToyConfig) -> Any:
    from finetune.planning.inputs import shape_from_scratch

    class Like:
        arch, depth, vocab_size, max_seq_len = "qwen3", 1, BYTES, WINDOW_TOKENS

    return shape_from_scratch(Like())


def workload(config: ToyConfig, shape: Any, cluster: Cluster) -> Workload:
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.planning.inputs import pretraining_workload

    fields = PretrainConfig.model_fields.items()
    defaults = {name: info.get_default(call_default_factory=False) for name, info in fields}
    own = {"device_batch_size": config.windows_per_step, "max_seq_len": WINDOW_TOKENS}
    own |= {"train_data_path": (), "optimizer": "adamw"}
    like = PretrainConfig.model_construct(**(defaults | own))
    return pretraining_workload(like, shape, cluster)


class ByteWindows:
    """Windows of a text; see `data.steps.SampleSource`."""

    def __init__(self, path: str) -> None:
        import numpy as np

        text = np.frombuffer(Path(path).read_bytes(), dtype=np.uint8).astype(np.int32)
        size = WINDOW_TOKENS + 1
        self.windows = text[: len(text) // size * size].reshape(-1, size)
        self.lengths = np.full(len(self.windows), WINDOW_TOKENS, dtype=np.int32)
        self.supervised_counts, self.record_ids = self.lengths, np.arange(len(self.windows))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Any, None]:
        return self.windows[index], None


def prepare(config: ToyConfig, begun: Mapping[str, Any]) -> Any:
    import numpy as np

    from finetune.batching.curriculum import uniform_schedule
    from finetune.batching.sampler import GlobalBatches
    from finetune.training.prepare import PreparedRun

    windows = ByteWindows(config.text)
    sizes = (config.windows_per_step, config.max_steps, config.seed)
    batches = GlobalBatches(np.zeros(len(windows), dtype=np.int64), uniform_schedule(), *sizes)
    identity = {"kind": "toy", "text": config.text, "total_steps": config.max_steps}
    identity["schedule"] = batches.fingerprint()
    return PreparedRun(identity=identity, batches=batches, train=windows)


def build(config: ToyConfig, data: Any, session: Any) -> Any:
    import numpy as np
    from safetensors.torch import save_file

    from finetune.batching.steps import LossGroups, StepBatches
    from finetune.modeling.scratch import make_model, scratch_config
    from finetune.training.build import make_execution
    from finetune.training.trainer import RunParts, RunTrainer, training_arguments

    class ToyTrainer(RunTrainer):
        def model_files(self, weights: Any) -> Any:
            return lambda folder: None

        def output_weights(self) -> dict[str, Any]:
            return self.whole_weights(None)

        def write_output(self, folder: Path, weights: dict[str, Any], saved: Path | None) -> None:
            save_file(weights, folder / "model.safetensors")

    arguments = training_arguments(config, data, learning_rate=config.learning_rate)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    shape = scratch_config("qwen3", 1, vocab_size=BYTES, max_seq_len=WINDOW_TOKENS, **ends)
    model = make_model(shape, seed=config.seed)
    step_batches = StepBatches(
        data.train,
        data.batches,
        make_execution(session, samples_per_microbatch=1),
        difficulty_ids=np.full(len(data.train), -1),
        groups=LossGroups(),
        pad_token_id=0,
    )
    parts = {"config": config, "data": data, "session": session, "arguments": arguments}
    return RunParts(trainer_class=ToyTrainer, model=model, step_batches=step_batches, **parts)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(KIND, arguments)


class Toy(RunKind):
    name = "toy"
    module = "toy_kind"
    title = "a toy"
    config_class = ToyConfig
    telling_settings = frozenset({"text", "windows_per_step"})
    probed = ("data",)
    check, describe, prepare = (staticmethod(f) for f in (check, describe, prepare))
    build, shape, workload, probe = (staticmethod(f) for f in (build, shape, workload, probe))


KIND = Toy()
register("toy", "toy_kind")


if __name__ == "__main__":
    sys.exit(main())
