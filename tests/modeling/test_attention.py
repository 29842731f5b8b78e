"""What one document of a microbatch holds reaches no other document and no earlier token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_models import (
    CPU,
    VOCABULARY,
    alone,
    as_trained,
    attention_by_mask,
    documents,
    make_microbatch,
    make_model,
    other_tokens,
    outputs,
    tiny_config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune.modeling import attention
from finetune.modeling.attention import (
    ISOLATED_MODEL_TYPES,
    can_pack,
    choose_attention,
    shortest_window,
)
from finetune.modeling.loss import make_chunked_head, microbatch_losses

# Full attention; a window of 4 in every layer; softcap, and windows in every other layer; short
# convolutions.
CLOSE = ("qwen3", "mistral", "gemma2", "lfm2")


def assert_isolated_and_causal(run: Callable[[list[np.ndarray]], list[torch.Tensor]]) -> None:
    """What one document holds changes no bit of another's logits, and none of an earlier token's."""
    docs = documents()
    before = run(docs)
    for number, ids in enumerate(docs):
        after = run([*docs[:number], other_tokens(ids, slice(None)), *docs[number + 1 :]])
        for other in range(len(docs)):
            assert torch.equal(before[other], after[other]) == (other != number), (number, other)
    for position in (0, 1, 6):
        after = run([*docs[:2], other_tokens(docs[2], position), docs[3]])
        assert torch.equal(before[2][:position], after[2][:position])
        # its own and the next token's: attention is at work
        assert not any(map(torch.equal, before[2][position:][:2], after[2][position:][:2]))


@pytest.mark.parametrize("model_type", CLOSE)
def test_documents_are_isolated_and_causal_bit_by_bit(model_type):
    model = as_trained(tiny_config(model_type))
    for packing in (True, False):
        assert_isolated_and_causal(partial(outputs, model, packing=packing))
    padded = (outputs(model, documents(), packing=False, pad_token_id=pad) for pad in (0, 41))
    assert all(map(torch.equal, *padded)), "the padding is seen"


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert wanted.abs().max() > 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("model_type", sorted(ISOLATED_MODEL_TYPES))
def test_every_packable_type_is_isolated_and_right(model_type):
    """Packed documents against transformers' eager attention on each alone.

    Experts see all documents in one matrix product: equal within rounding, not bit by bit.
    """
    config = tiny_config(model_type)
    assert can_pack(config)
    model, reference, docs = as_trained(config), make_model(config, "eager"), documents()
    ours = outputs(model, docs, packing=True)
    for ids, got in zip(docs, ours, strict=True):
        assert_near(got, alone(reference, ids), 2e-5)
    changed = outputs(model, [other_tokens(docs[0], slice(None)), *docs[1:]], packing=True)
    assert not torch.equal(changed[0], ours[0])
    for before, after in zip(ours[1:], changed[1:], strict=True):
        assert_near(after, before, 2e-5)
    # A chunked head returns the same losses, or is not used where a forward scales logits behind it
    if getattr(model.config, "final_logit_softcapping", None):
        model.config.final_logit_softcapping = 0.7
    microbatch = make_microbatch(docs, packing=True)
    plain = microbatch_losses(model, microbatch, CPU)
    for compiled in (False, True):
        head = make_chunked_head(model, compiled=compiled)
        assert (head is None) == (model_type in SCALED.split())
        if head is not None:
            head.logits_per_chunk = 4 * VOCABULARY
            losses = microbatch_losses(model, microbatch, CPU, head)
            torch.testing.assert_close(losses, plain, rtol=1e-4, atol=1e-4)


SCALED = "cohere cohere2 falcon_h1 granite granitemoe granitemoehybrid granitemoeshared"


def test_which_attention_is_chosen():
    jamba = CONFIG_MAPPING["jamba"]()
    assert not can_pack(jamba) and choose_attention(jamba) is None
    # not tested with ours, and SDPA has no softcap
    assert choose_attention(tiny_config("vaultgemma")) == "eager"
    convolving = tiny_config("qwen3")
    convolving.layer_types = ["full_attention", "conv"] * 2
    assert not can_pack(convolving)


class FlashKernel:
    """What torch's varlen_attn documents of the operator and its kernels, checked."""

    def __init__(self) -> None:
        self.windows: set[int] = set()

    def __call__(self, query, key, value, bounds, bounds_k, max_q, max_k, *flags, scale, **window):
        assert query.dtype == key.dtype == value.dtype and query.dtype in attention.HALF
        assert query.shape[2] == key.shape[2] == value.shape[2], "one head width"
        assert query.shape[2] % 8 == 0 and query.shape[2] <= 256, query.shape
        assert query.shape[0] == key.shape[0] and key.shape == value.shape
        assert all(states.is_contiguous() for states in (query, key, value))
        assert bounds.dtype == bounds_k.dtype == torch.int32 and bounds.device == query.device
        assert type(max_q) is int and max_q == max_k, "the host makes a grid of them"
        ends = bounds.tolist()
        assert ends[0] == 0 and ends[-1] == len(query) and ends == sorted(ends)
        assert max(end - begin for begin, end in pairwise(ends)) <= max_q
        left = window["window_size_left"]
        assert window["window_size_right"] == 0 and left >= -1, "causal"
        # no dropout, no debug mask; the kernel takes no window where it is told of causality
        assert flags == (0.0, left == -1, False)
        self.windows.add(left)
        return (attention_by_mask(query, key, value, bounds, left, scale),)


@pytest.fixture
def kernel(monkeypatch) -> FlashKernel:
    made = FlashKernel()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", made)
    monkeypatch.setattr(attention, "has_flash", lambda device: True)
    return made


# no kernel has gemma2's softcap
@pytest.mark.parametrize("model_type", sorted(ISOLATED_MODEL_TYPES - {"gemma2", "gpt_oss"}))
def test_every_packable_type_gives_the_flash_kernel_what_it_takes(model_type, kernel, monkeypatch):
    """MLA's narrow values, windows, autocast; against the same model without the kernel."""
    config, docs = tiny_config(model_type), documents()
    for weights in (torch.float32, torch.bfloat16)[: 1 + (model_type in CLOSE)]:
        model = make_model(config, choose_attention(config)).to(weights)
        kernel.windows.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
            ours = outputs(model, docs, packing=True)
            with monkeypatch.context() as without:
                without.setattr(attention, "has_flash", lambda device: False)
                wanted = outputs(model, docs, packing=True)
        window = shortest_window(config)
        assert kernel.windows and (window is None or window - 1 in kernel.windows)
        # By token: where 16 bits round otherwise, a router here and there takes another expert.
        pairs = zip(torch.cat(ours).float(), torch.cat(wanted).float(), strict=True)
        off = torch.stack([(a - b).norm() / b.norm() for a, b in pairs])
        assert off.median() < 0.03, off


def test_dropout_and_wide_heads_do_not_reach_the_flash_kernel(kernel):
    query = torch.randn(1, 2, 6, 16, dtype=torch.bfloat16)
    wide = torch.randn(1, 2, 6, 264, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = {"document_lengths": (2, 4), "cu_seq_lens_q": bounds, "max_length_q": 4}
    for states, dropout, windows in ((query, 0.1, set()), (wide, 0.0, set()), (query, 0.0, {-1})):
        given = (torch.nn.Module(), states, states, states, None)
        attention.isolated_attention(*given, dropout=dropout, **packed)
        assert kernel.windows == windows


@pytest.mark.parametrize(("generation", "flash"), [((7, 5), False), ((8, 0), True)])
def test_before_ampere_there_is_no_flash_kernel(generation, flash, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: generation)
    assert attention._cuda_has_flash.__wrapped__() is flash


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_varlen_attention_on_cuda(model_type, dtype):
    """Isolated bit by bit on the varlen path; its values near float32's on the CPU."""
    config, device = tiny_config(model_type, head_dim=16), torch.device("cuda")
    reference, model = as_trained(config), as_trained(config).to(device, dtype)

    def on_device(docs: list[np.ndarray]) -> list[torch.Tensor]:
        microbatch = make_microbatch(docs, packing=True)
        logits = model(**{**microbatch.model_inputs(device), "logits_to_keep": 0}).logits
        return list(logits[0].cpu().split([len(ids) for ids in docs]))

    docs = documents()
    before = on_device(docs)
    alike = [alone(reference, ids) for ids in docs]
    off = [(a.float() - b).norm(dim=1) / b.norm(dim=1) for a, b in zip(before, alike, strict=True)]
    assert torch.cat(off).median() < 0.03, torch.cat(off)
    assert_isolated_and_causal(on_device)
