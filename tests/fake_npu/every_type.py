"""Every packable model type on a simulated NPU: the kernel's stand-in refuses what the kernel does
not take.

    python tests/fake_npu/every_type.py   # prints `type calls bands host-reads median-difference`
    for each

Calls of the kernel, those with a window, and reads of the device by the host in the attention
functions, of a forward and a backward pass over a packed and a padded microbatch; the difference is
to the attention per document on the CPU, both in bfloat16, of the packed logits.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "fake_npu")]

import tiny_models as tests  # noqa: E402 (after the paths)
import torch  # noqa: E402
import torch_npu  # noqa: E402
import transformers  # noqa: E402
from torch_npu.device import host_reads  # noqa: E402
from torch_npu.ops import BAND  # noqa: E402

from finetune.modeling import attention  # noqa: E402
from finetune.modeling.attention import ISOLATED_MODEL_TYPES, choose_attention  # noqa: E402
from finetune.modeling.npu_attention import _hidden  # noqa: E402

BF16 = torch.bfloat16
counts = {"calls": 0, "bands": 0, "reads": 0}
kernel, histogram, isolated = (
    torch_npu.npu_fusion_attention,
    torch.histc,
    attention.isolated_attention,
)


def counted(*arguments, **named):
    counts["calls"] += 1
    counts["bands"] += named["sparse_mode"] == BAND
    before = host_reads[0]
    result = kernel(*arguments, **named)
    host_reads[0] = before  # the stand-in looks at the mask; the kernel does not
    return result


def watched(*arguments, **named):
    before = host_reads[0]
    result = isolated(*arguments, **named)
    counts["reads"] += host_reads[0] - before
    return result


def main() -> None:
    transformers.logging.set_verbosity(logging.ERROR)
    torch_npu.npu_fusion_attention = counted
    attention.isolated_attention = watched
    # Mixtures count their tokens in integers on a device; the CPU behind the simulation has no
    # kernel for that.
    torch.histc = lambda numbers, *rest, **named: histogram(numbers.float(), *rest, **named)
    _hidden(torch.zeros(1, device="npu").device)  # once per device
    for kind in sorted(ISOLATED_MODEL_TYPES):
        config = tests.tiny_config(kind)
        chosen = choose_attention(config)
        docs = tests.documents()
        reference = tests.make_model(config, chosen).to(BF16)
        expected = tests.outputs(reference, docs, packing=True)
        counts.update(calls=0, bands=0, reads=0)
        model = tests.make_model(config, chosen).to(BF16).to("npu").requires_grad_(True)
        found = None
        for packing in (True, False):
            inputs = tests.make_microbatch(docs, packing=packing).model_inputs(torch.device("npu"))
            logits = model(**{**inputs, "logits_to_keep": 0}).logits
            logits.float().logsumexp(-1).sum().backward()
            if packing:
                found = logits.detach().cpu()[0].split([len(document) for document in docs])
        pairs = [(a.float(), b.float()) for a, b in zip(found, expected, strict=True)]
        off = torch.cat([(a - b).norm(dim=1) / b.norm(dim=1) for a, b in pairs])
        print(kind, *counts.values(), f"{off.median():.4f}", flush=True)


if __name__ == "__main__":
    main()
