"""Every packable model type on a simulated NPU: the kernel's stand-in refuses what the kernel does not take.

    python tests/fake_npu/every_type.py   # prints `type calls median-difference`, or the attention that it has instead

Against the attention per document on the CPU, both in bfloat16.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "fake_npu")]

import tiny_models as tests  # noqa: E402 (after the paths)
import torch  # noqa: E402
import torch_npu  # noqa: E402, F401 (makes the device)
import transformers  # noqa: E402
import transformers.integrations.npu_flash_attention as npu_path  # noqa: E402

from finetune.modeling.attention import ISOLATED_MODEL_TYPES, choose_attention  # noqa: E402

BF16 = torch.bfloat16
# Heads of 16, and windows longer than the documents where there are any.
SIZES = {"head_dim": 16, "hidden_size": 64, "n_embd": 64, "word_embed_proj_dim": 64, "sliding_window": 64}

calls = [0]
kernel, histogram = npu_path.npu_fusion_attention, torch.histc


def counted(*arguments, **named):
    calls[0] += 1
    return kernel(*arguments, **named)


def main() -> None:
    transformers.logging.set_verbosity(logging.ERROR)
    npu_path.npu_fusion_attention = counted
    # Mixtures count their tokens in integers on a device; the CPU behind the simulation has no kernel for that.
    torch.histc = lambda numbers, *rest, **named: histogram(numbers.float(), *rest, **named)
    for kind in sorted(ISOLATED_MODEL_TYPES):
        default = tests.tiny_config(kind)
        config = tests.tiny_config(kind, **{name: size for name, size in SIZES.items() if hasattr(default, name)})
        chosen = choose_attention(config, "npu", BF16, longest_document=max(tests.LENGTHS))
        if chosen != "flash_attention_2":
            print(kind, chosen, flush=True)
            continue
        calls[0] = 0
        docs = tests.documents()
        reference = tests.make_model(config, choose_attention(config, "cpu", BF16)).to(BF16)
        expected = tests.outputs(reference, docs, packing=True)
        model = tests.make_model(config, chosen).to(BF16).to("npu")
        inputs = tests.make_microbatch(docs, packing=True).model_inputs(torch.device("npu"))
        logits = model(**{**inputs, "logits_to_keep": 0}).logits.cpu()
        found = logits[0].split([len(document) for document in docs])
        pairs = [(a.float(), b.float()) for a, b in zip(found, expected, strict=True)]
        off = torch.cat([(a - b).norm(dim=1) / b.norm(dim=1) for a, b in pairs])
        print(kind, calls[0], f"{off.median():.4f}", flush=True)


if __name__ == "__main__":
    main()
