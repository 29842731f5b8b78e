"""What a run, or a function, asks of the simulated npu.

python tests/fake_npu/observed.py FLAGS   # finetune.sft; writes $OBSERVED<rank>
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from torch_npu.device import host_reads

from finetune.modeling import attention

kernel, isolated = torch_npu.npu_fusion_attention, attention.isolated_attention
attentions: list[dict[str, Any]] = []  # the arguments of each call of the attention kernel
reads = [0]  # of the device by the host, in attention functions
fused: Counter[str] = Counter()  # calls of other kernels


def _kernel(*arguments: Any, **named: Any) -> Any:
    attentions.append(dict(zip(("input_layout",), arguments[4:5], strict=False)) | named)
    before = host_reads[0]
    result = kernel(*arguments, **named)
    host_reads[0] = before  # the stand-in looks at its mask; the kernel does not
    return result


def _isolated(*arguments: Any, **named: Any) -> Any:
    before = host_reads[0]
    result = isolated(*arguments, **named)
    reads[0] += host_reads[0] - before
    return result


def _tallied(name: str) -> Any:
    original = getattr(torch_npu, name)
    return lambda *arguments, **named: fused.update([name]) or original(*arguments, **named)


def observe() -> None:
    """From now on, calls are counted."""
    torch_npu.npu_fusion_attention = _kernel
    attention.isolated_attention = _isolated


def main() -> int:
    from finetune.sft import main
    from finetune.training.trainer import SFTTrainer

    observe()
    for name in ("npu_rms_norm", "npu_rotary_mul", "npu_swiglu"):
        setattr(torch_npu, name, _tallied(name))
    save_output = SFTTrainer.save_output

    def observed(self: Any, output_dir: Any, best: Any) -> None:
        model = self.model
        head = model.get_output_embeddings().weight
        facts = {
            "layouts": sorted({call["input_layout"] for call in attentions}),
            "documents": max((len(call["actual_seq_qlen"]) for call in attentions), default=0),
            "host_reads": reads[0],
            "fused_calls": fused,
            "devices": sorted({parameter.device.type for parameter in model.parameters()}),
            "accelerator": str(self.accelerator.device),
            "current_device": torch.npu.current_device(),
            "distributed_type": self.accelerator.distributed_type.value,
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "fused": [group.get("fused") for group in self.optimizer.optimizer.param_groups],
            "tied": model.get_input_embeddings().weight is head,
        }
        with open(os.environ["OBSERVED"] + os.environ.get("RANK", "0"), "w") as file:
            json.dump(facts, file)
        save_output(self, output_dir, best)

    SFTTrainer.save_output = observed
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
