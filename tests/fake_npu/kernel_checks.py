"""The simulated kernels against torch's operations, and how the package calls and checks them.

python tests/fake_npu/kernel_checks.py   # with tests/ and tests/fake_npu on the PYTHONPATH
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
import transformers
from observed import attentions, isolated, kernel, observe, reads
from tiny_models import documents, make_microbatch, make_model, outputs, tiny_config
from torch_npu import ops
from torch_npu.device import host_reads

from finetune.modeling import npu_attention
from finetune.modeling.attention import (
    BY_DOCUMENT,
    ISOLATED,
    ISOLATED_MODEL_TYPES,
    choose_attention,
)
from finetune.modeling.attention_check import check_attention
from finetune.modeling.layers import agreeing_ops, compare_layers, find_fusable, provided_ops

NPU, CPU, BF16 = torch.device("npu"), torch.device("cpu"), torch.bfloat16


def it_is_called_as_documented_and_right() -> None:
    """Windows, narrow values, padded lines, many documents, dropout; forward and backward."""
    observe()
    module, wide = torch.nn.Module(), [torch.randn(1, 2, 6, 16, device=NPU)] * 3

    def called() -> list[tuple[int, int, float]]:
        found = [(len(x["actual_seq_qlen"]), x["sparse_mode"], x["keep_prob"]) for x in attentions]
        attentions.clear()
        return found

    def both(
        lengths: Any, heads: int = 4, keys: int = 2, width: int = 24, values: int = 24, **given: Any
    ) -> list[tuple[int, int, float]]:
        """The calls of the kernel."""
        samples, tokens = given.pop("shape", (1, sum(lengths or ())))
        shapes = ((heads, width), (keys, width), (keys, values))
        made = [torch.randn(samples, n, tokens, d).to(BF16) for n, d in shapes]
        direction = torch.randn(samples, tokens, heads, values).to(BF16)
        results = []
        for place, dtype in ((NPU, BF16), (CPU, torch.float32)):
            leaves = [states.to(place, dtype).requires_grad_() for states in made]
            before = host_reads[0]
            output, _ = isolated(module, *leaves, None, document_lengths=lengths, **given)
            output.backward(direction.to(place, output.dtype))
            assert host_reads[0] == before
            results.append([each.detach().cpu() for each in (output, *(x.grad for x in leaves))])
        if "dropout" in given:  # what is kept is scaled up, some is gone: first tokens see one
            assert (results[0][0][0, ::64] == 0).any()
        else:
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)
        return called()

    assert both((5, 1, 9, 3)) == [(4, 3, 1.0)]
    assert both((5, 1, 9, 3), sliding_window=4, scaling=0.2) == [(4, 4, 1.0)]
    assert both((5, 1, 9, 3), sliding_window=9) == [(4, 3, 1.0)], "no document reaches it"
    both((5, 1, 9, 3), keys=4, width=40, values=16)  # as in multi-head latent attention
    assert both(None, shape=(3, 7)) == [(3, 3, 1.0)]
    found = both((3, 1) * 17, width=16, values=16, sliding_window=2)
    assert [documents for documents, *_ in found] == [16, 16, 2] and found[0][1] == 4
    assert {round(keep, 3) for *_, keep in both((64,) * 8, dropout=0.5)} == {0.5}
    # Heads that the kernel does not take, softcap and float32 go another way.
    assert not both((5, 9), heads=2, width=520, values=520) and not both((5, 9), softcap=5.0)
    isolated(module, *wide, None, document_lengths=(2, 4))
    assert not called()
    with torch.autocast("npu", BF16):
        isolated(module, *wide, None, document_lengths=(2, 4))
    assert called() == [(2, 3, 1.0)]


def one_that_differs_is_not_used() -> None:
    """Ends, a window or the scale ignored, a window one too wide, an error: SDPA instead."""
    calls: list[int] = []

    def check(model_type: str = "mistral", **given: Any) -> tuple[str, str]:
        options = {"setting": "auto", "dtype": BF16, "tokens": 700}
        options |= {name: given.pop(name) for name in options.keys() & given.keys()}
        config = tiny_config(model_type, **given)
        model = make_model(config, choose_attention(config))
        calls.clear()
        said = check_attention(model, device_type="npu", **options)
        return said, model.config._attn_implementation

    def faulty(change: Callable[[torch.Tensor, dict[str, Any]], dict[str, Any]]) -> None:
        def call(*args: Any, **named: Any) -> Any:
            calls.append(named["sparse_mode"])
            return kernel(*args, **named | change(args[0], named))

        torch_npu.npu_fusion_attention = call

    def raises(query: torch.Tensor, named: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("EZ9999: Inner Error")

    used, refused = ("npu_fusion_attention", ISOLATED), ("torch's", BY_DOCUMENT)
    faulty(lambda query, named: {})
    for model_type in ("mistral", "qwen3", "deepseek_v3"):  # windows, none, latent attention
        assert check(model_type) == check(model_type, dtype=torch.float16) == used
        assert set(calls) == ({3, 4} if model_type == "mistral" else {3})
    faulty(lambda query, named: dict.fromkeys(named.keys() & ENDS, (len(query),)))
    assert check("qwen3") == refused and check("qwen3", tokens=9) == refused
    everything = {"pre_tockens": 2147483647, "next_tockens": 2147483647}
    faulty(lambda query, named: {"sparse_mode": 3} | everything)
    assert check("qwen3") == used and check() == refused  # no window, and one that is ignored
    window = "pre_tockens"
    faulty(lambda query, named: {window: named[window] + 1} if window in named else {})
    assert check() == refused
    faulty(lambda query, named: {"scale": query.shape[-1] ** -0.5})
    assert check("qwen3") == refused
    faulty(raises)
    assert check("qwen3") == refused
    off = {"setting": "off"}, {"dtype": torch.float32}, {"model_type": "gemma2"}, {"head_dim": 520}
    for given in off:
        assert check(**given) == ("torch's", ISOLATED) and not calls, given


ENDS = {"actual_seq_qlen", "actual_seq_kvlen"}


def fused_operations_are_called_as_documented_and_right() -> None:
    model = make_model(tiny_config("qwen3", head_dim=16, hidden_size=64), "eager")
    provided = provided_ops("npu")
    given = {"device": NPU, "dtypes": [torch.float32, BF16], "tokens": 100}
    comparisons = compare_layers(provided, find_fusable(model), model.config)
    assert len(comparisons) == 4
    assert agreeing_ops("npu", provided, comparisons, **given) == provided
    # A kernel that takes the neighbour for the other half, as `interleave` does.
    rotary = torch_npu.npu_rotary_mul
    torch_npu.npu_rotary_mul = lambda x, cos, sin: rotary(x.flip(-1), cos, sin)
    kept = agreeing_ops("npu", provided, comparisons, **given)
    assert kept == {name: provided[name] for name in ("rms_norm", "swiglu")}


def every_packable_type() -> None:
    """Prints `type calls bands host-reads median-difference`: calls of the kernel, those with a
    window, and reads of the device by the host in the attention functions, forward and backward
    over a packed and a padded microbatch; the difference of packed logits is to the CPU's.
    """
    observe()
    # a CPU has no kernel for mixtures' counts in integers
    histogram = torch.histc
    torch.histc = lambda numbers, *rest, **named: histogram(numbers.float(), *rest, **named)
    for kind in sorted(ISOLATED_MODEL_TYPES):
        config, docs = tiny_config(kind), documents()
        chosen = choose_attention(config)
        expected = outputs(make_model(config, chosen).to(BF16), docs, packing=True)
        attentions.clear()
        reads[0] = 0
        model = make_model(config, chosen).to(BF16).to(NPU).requires_grad_(True)
        found = None
        for packing in (True, False):
            inputs = make_microbatch(docs, packing=packing).model_inputs(NPU)
            logits = model(**{**inputs, "logits_to_keep": 0}).logits
            logits.float().logsumexp(-1).sum().backward()
            if packing:
                found = logits.detach().cpu()[0].split([len(document) for document in docs])
        pairs = [(a.float(), b.float()) for a, b in zip(found, expected, strict=True)]
        off = torch.cat([(a - b).norm(dim=1) / b.norm(dim=1) for a, b in pairs])
        bands = sum(call["sparse_mode"] == ops.BAND for call in attentions)
        print(kind, len(attentions), bands, reads[0], f"{off.median():.4f}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    transformers.logging.set_verbosity(logging.ERROR)
    npu_attention._hidden(torch.zeros(1, device=NPU).device)  # once per device
    if sys.argv[1:] == ["every_packable_type"]:
        every_packable_type()
        sys.exit()
    assert npu_attention.MAX_DOCUMENTS == ops.MOST_DOCUMENTS == 1024
    npu_attention.MAX_DOCUMENTS = ops.MOST_DOCUMENTS = 16  # so many take long
    for part in (
        it_is_called_as_documented_and_right,
        one_that_differs_is_not_used,
        fused_operations_are_called_as_documented_and_right,
    ):
        torch.manual_seed(0)
        part()
        print(part.__name__, flush=True)
