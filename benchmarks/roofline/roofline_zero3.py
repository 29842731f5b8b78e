"""What ZeRO-3 gathers and reduces: DeepSpeed's own engine on fake tensors, as rank 0 of a group
that is fake.

Kernels, waits and memory are not taken from this trace: the engine takes the device for a CPU, and
copies as it does there. Neither what it gathers nor when depends on that.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from roofline_network import agreements, fake_group
from roofline_runs import (
    Case,
    Trace,
    device_branch,
    documents,
    dtype_of,
    model_config,
    on_device,
    record,
    run_config,
    session_of,
)
from roofline_trace import Crossings, Recorder

os.environ.setdefault("DS_ACCELERATOR", "cpu")
STAGE_3 = {"stage": 3, "reduce_bucket_size": "auto"}


def zero3_config(case: Case, keys: Mapping[str, Any]) -> Any:
    """The settings of such a run, with further keys of `zero_optimization`."""
    deepspeed = {"zero_optimization": {**STAGE_3, **keys}}
    return run_config(replace(case, zero3=False)).model_copy(update={"deepspeed": deepspeed})


def zero3_trace(case: Case, layers: int, keys: Mapping[str, Any] | None = None) -> Trace:
    """Run steps of a model with so many blocks under the engine, and record the last; of use are
    its collectives.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from finetune.modeling.attention import choose_attention
    from finetune.modeling.loss import let_choose_logits
    from finetune.training import build

    case, config = replace(case, zero3=False), zero3_config(case, keys or {})
    shape = model_config(case, layers)
    dtype = getattr(torch, dtype_of(config))

    def load_model(
        config: Any, *, model_dtype: torch.dtype, zero3: bool, **of_quantised: Any
    ) -> Any:
        from transformers import AutoModelForCausalLM

        # from_config itself partitions: TrainingArguments have told transformers of the engine.
        attention = choose_attention(shape)
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=attention)
        let_choose_logits(model)
        return model.train()

    fake, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder()
    with (
        tempfile.TemporaryDirectory() as folder,
        device_branch(case),
        fake_group(case.processes),
        _engine_alone(),
        patch.object(build, "load_model", load_model),
        agreements(lambda: recorder.segment.collectives),
        fake,
        recorder,
        Crossings(recorder, fake),
    ):
        config = on_device(config.model_copy(update={"output_dir": folder}), "cpu")
        parts = build.build_fine_tuning(
            config, documents(case, config, shape), session_of(case, folder)
        )
        return record(parts.trainer_class(parts), recorder, case)


@contextlib.contextmanager
def _engine_alone() -> Iterator[None]:
    """DeepSpeed without what it keeps of an earlier group, and without ranks comparing numbers in
    the first row.
    """
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    with (
        patch.object(comm, "cdb", None),
        # zero.Init puts its own in its place (partition_parameters.py), which a later trace would
        # take for torch's.
        patch.object(torch.nn.functional, "linear", torch.nn.functional.linear),
        patch.object(groups, "_WORLD_GROUP", None),
        patch.object(coordinator, "assert_ints_same_as_other_ranks", lambda ints: None),
    ):
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
