"""Layers that carry a state from token to token, with documents apart: the gated delta rule
(Qwen3.5, Qwen3-Next, OLMo Hybrid) and Mamba-2 (Granite 4, Falcon-H1, Bamba, Nemotron-H).

Both are computed in chunks of tokens: products within a chunk, and one step from chunk to chunk for
the state. Here every document begins a chunk of its own, so no product has tokens of two documents,
and the state of a document begins at zero. A step takes the next chunk of all documents that have
one: a packed sequence needs as many steps as its longest document has chunks.

Shapes: N tokens, H heads, C tokens of a chunk.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import softplus

from finetune.errors import FinetuneError
from finetune.modeling.short_convolution import convolve

# Model type -> the function of its module that computes the state.
_DELTA, _MAMBA = "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
RECURRENT_TYPES = {
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "nemotron_h": _MAMBA,
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
}
CHUNK = 64


def keep_states_apart(model_type: str) -> None:
    """Let transformers' layers of a model type call the functions here, in this process.

    Without the packages flash-linear-attention, causal-conv1d and mamba-ssm, transformers 5.23 has
    plain functions, which take no document bounds: it refuses `cu_seq_lens_q`, or mixes documents
    without a word. With them, the convolution still gets no bounds. The functions receive the
    keyword arguments of the model's call, so nothing else has to change. Remove this when they take
    cu_seq_lens_q.
    """
    name = model_type.removesuffix("_text")
    module: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    function = RECURRENT_TYPES[model_type]
    original = getattr(module, function, None)
    if original is None or not hasattr(module, "causal_conv1d_fn"):
        raise FinetuneError(
            f"{model_type}'s layers call other functions in this transformers: packed documents"
            " would mix",
            f"transformers {transformers.__version__}",
            "install the version that constraints.txt names",
        )
    if getattr(original, "keeps_documents_apart", False):
        return
    ours = _delta_of(original) if function == _DELTA else _mamba_of(original)
    ours.keeps_documents_apart = True  # type: ignore[attr-defined]
    setattr(module, function, ours)
    module.causal_conv1d_fn = convolve
    if function == _MAMBA:
        # One call for convolution, scan and norm, without document bounds; None: not available.
        module.mamba2_split_conv1d_scan_combined = _no_fused_layer


def _no_fused_layer(*args: Any, **kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class _Chunks:
    """Where the tokens of documents go.

    Attributes:
        place: `(N,)`, the slot of each token; slots are those of the first chunk, then the second.
        count: chunks.
        size: C.
        steps: first chunk and end of each step. Chunks are in the order of the steps, and in a step
            those of the longest documents come first.
    """

    place: Tensor
    count: int
    size: int
    steps: tuple[tuple[int, int], ...]

    def put(self, tokens: Tensor) -> Tensor:
        """`(N, H, ...)` to `(chunks, H, C, ...)`, with zeros after the end of a document."""
        slots = tokens.new_zeros(self.count * self.size, *tokens.shape[1:])
        slots = slots.index_copy(0, self.place, tokens)
        return slots.unflatten(0, (self.count, self.size)).transpose(1, 2)

    def take(self, chunks: Tensor) -> Tensor:
        """`(chunks, H, C, D)` to `(N, H, D)`."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.place)


def _chunks(lengths: tuple[int, ...], bounds: Tensor, size: int) -> _Chunks:
    """Lay out documents.

    Args:
        lengths: tokens of each document; as integers, so that the host need not ask the device.
        bounds: `(documents + 1,)`, their running sum.
    """
    counts = [-(-length // size) for length in lengths]
    working = [sum(count > step for count in counts) for step in range(max(counts))]
    ends = list(accumulate(working))
    device = bounds.device
    tokens = torch.diff(bounds).long()
    chunks = (tokens + size - 1) // size
    rank = torch.argsort(torch.argsort(chunks, descending=True, stable=True), stable=True)
    before = torch.arange(len(working), device=device)
    first = (chunks[None] > before[:, None]).sum(dim=1).cumsum(0)
    first = torch.cat([first.new_zeros(1), first[:-1]])
    document = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), tokens, output_size=sum(lengths)
    )
    position = torch.arange(sum(lengths), device=device) - bounds[:-1].long()[document]
    place = (first[position // size] + rank[document]) * size + position % size
    steps = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return _Chunks(place, sum(counts), size, steps)


def _scan(
    chunks: _Chunks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    log_decay: Tensor,
    reads: Tensor | None = None,
) -> Tensor:
    """The output of a layer whose state is a sum of products of keys and values.

    Args:
        query, key: `(chunks, H, C, D)`; value: `(chunks, H, C, E)`.
        scores: `(chunks, H, C, C)`, of a token's query with the keys of its chunk, decay included.
        log_decay: `(chunks, H, C)`, of the state, summed within the chunk.
        reads: `(chunks, H, C, D)`, what the values subtract from the state (the delta rule).

    Returns:
        `(chunks, H, C, E)`.
    """
    query = query * log_decay.exp()[..., None]
    last = log_decay[..., -1:]
    key = (key * (last - log_decay).exp()[..., None]).transpose(-1, -2)
    decay = last.exp()[..., None]
    state, outputs = None, []
    for first, end in chunks.steps:
        new = value[first:end]
        if state is None:
            outputs.append(scores[first:end] @ new)
            state = key[first:end] @ new
            continue
        state = state[: end - first]
        if reads is not None:
            new = new - reads[first:end] @ state
        outputs.append(scores[first:end] @ new + query[first:end] @ state)
        state = state * decay[first:end] + key[first:end] @ new
    return torch.cat(outputs)


def _decays(log_decay: Tensor) -> Tensor:
    """`(..., C, C)`: of the state from one token of a chunk to another, 0 if that is earlier."""
    later = torch.ones(log_decay.shape[-1:] * 2, dtype=torch.bool, device=log_decay.device).triu(1)
    between = log_decay[..., :, None] - log_decay[..., None, :]
    return between.masked_fill(later, float("-inf")).exp()


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    lengths: tuple[int, ...],
    bounds: Tensor,
    *,
    normalise: bool = True,
) -> Tensor:
    """Gated delta rule: a token decays the state, corrects what it holds for the key, and reads it.

    Args:
        query, key: `(N, K, D)`; value: `(N, H, E)`, H a multiple of K.
        log_decay, rate: `(N, H)`, of the state before the token, and of the correction.
        lengths: tokens of each document; bounds: `(documents + 1,)`, their running sum.
        normalise: query and key to length 1.

    Returns:
        `(N, H, E)`, in the precision of the computation: float32, or that of the query if it is
        higher.

    Source:
        Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", equations 10 and section 3.3.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    chunks = _chunks(lengths, bounds, CHUNK)
    copies = value.shape[1] // key.shape[1]
    query, key, value, log_decay, rate = (
        chunks.put(states.to(precise)) for states in (query, key, value, log_decay, rate)
    )
    if normalise:
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    query = query * query.shape[-1] ** -0.5
    if copies > 1:
        query, key = (states.repeat_interleave(copies, dim=1) for states in (query, key))
    log_decay = log_decay.cumsum(-1)
    decays = _decays(log_decay)
    keys = key * rate[..., None]
    # A correction depends on those before it in its chunk: a triangular system for all of them.
    system = (keys @ key.transpose(-1, -2)) * decays
    right = torch.cat([value * rate[..., None], keys * log_decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, reads = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (query @ key.transpose(-1, -2)) * decays
    return chunks.take(_scan(chunks, query, key, new, scores, log_decay, reads))


def mamba2(
    inputs: Tensor,
    step_sizes: Tensor,
    log_decay: Tensor,
    key: Tensor,
    query: Tensor,
    lengths: tuple[int, ...],
    bounds: Tensor,
) -> Tensor:
    """State space model with a scalar decay per head.

    Args:
        inputs: `(N, H, E)`; step_sizes: `(N, H)`, positive; log_decay: `(H,)`, per unit of step.
        key, query: `(N, G, D)` (B and C in the paper), H a multiple of G.
        lengths: tokens of each document; bounds: `(documents + 1,)`, their running sum.

    Returns:
        `(N, H, E)` as `gated_delta_rule`.

    Source:
        Dao, Gu 2024, "Transformers are SSMs", section 6 (block decomposition).
    """
    precise = torch.promote_types(inputs.dtype, torch.float32)
    chunks = _chunks(lengths, bounds, CHUNK)
    copies = inputs.shape[1] // key.shape[1]
    steps = step_sizes.to(precise)
    value = chunks.put(inputs.to(precise) * steps[..., None])
    decay = chunks.put(steps * log_decay.to(precise)).cumsum(-1)
    key, query = (
        chunks.put(states.to(precise)).repeat_interleave(copies, dim=1) for states in (key, query)
    )
    scores = (query @ key.transpose(-1, -2)) * _decays(decay)
    return chunks.take(_scan(chunks, query, key, value, scores, decay))


def _documents(
    states: Tensor, document_lengths: tuple[int, ...] | None, bounds: Tensor | None
) -> tuple[tuple[int, ...], Tensor]:
    """Documents of `(samples, T, ...)`: those of a packed sequence, or one a row."""
    if document_lengths is not None and bounds is not None:
        return document_lengths, bounds
    samples, tokens = states.shape[:2]
    return (tokens,) * samples, torch.arange(samples + 1, device=states.device) * tokens


def _delta_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function for layers of the gated delta rule, with transformers' signature.

    `original` generates, where a state comes in or goes out, and runs flash-linear-attention's
    kernels where these can be used.
    """
    fused = importlib.util.find_spec("fla") is not None

    def apart(
        query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        kernels = fused and value.device.type != "cpu"
        generates = options.get("initial_state") is not None or options.get("output_final_state")
        if kernels or generates:
            return original(query, key, value, **options)
        lengths, bounds = _documents(
            value, options.get("document_lengths"), options.get("cu_seqlens")
        )
        # Products of 16-bit numbers would lose the state.
        with torch.autocast(value.device.type, enabled=False):
            output = gated_delta_rule(
                query.flatten(0, 1),
                key.flatten(0, 1),
                value.flatten(0, 1),
                options["g"].flatten(0, 1),
                options["beta"].flatten(0, 1),
                lengths,
                bounds,
                normalise=options.get("use_qk_l2norm_in_kernel", False),
            )
        return output.to(query.dtype).view(value.shape), None

    return apart


def _mamba_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function for Mamba-2 layers, with transformers' signature; `original` generates."""

    def apart(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
    ) -> Any:
        if options.get("initial_states") is not None or options.get("return_final_states"):
            return original(hidden_states, dt, A, B, C, **options)
        lengths, bounds = _documents(
            hidden_states, options.get("document_lengths"), options.get("cu_seq_lens_q")
        )
        dt_bias, skip = options.get("dt_bias"), options.get("D")
        steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        steps = softplus(steps) if options.get("dt_softplus") else steps
        steps = steps.clamp(*options.get("dt_limit", (0.0, float("inf"))))
        with torch.autocast(dt.device.type, enabled=False):
            inputs, steps, key, query = (
                states.flatten(0, 1) for states in (hidden_states, steps, B, C)
            )
            output = mamba2(inputs, steps, A, key, query, lengths, bounds)
            if skip is not None:
                output = output + skip[:, None] * inputs.to(output.dtype)
        return output.view(hidden_states.shape)

    return apart
