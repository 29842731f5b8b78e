"""What autograd keeps of a microbatch until its backward pass has used it, tensor by tensor as
transformers' decoders make it.

Read off the modelling code of transformers 5.23 (models/*/modeling_*.py, integrations/moe.py), peft
0.21 (tuners/lora/layer.py) and our own attention and loss; blocks are checked against autograd
(tests/planning/test_memory.py), the peak of a microbatch against fake tensors
(tests/planning/test_peaks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from finetune.planning.shapes import Block, Matrix, ModelShape, Part

# As in modeling/loss.py: numbers in one chunk of logits. (That module imports torch; a test
# compares the two.)
LOGITS_PER_CHUNK = 64 * 2**20
TRAINED_HEAD_CHUNKS = 2
# Logits and their log-softmax, which becomes their gradient in place; both in float32 at most.
LOSS_BYTES_PER_LOGIT = 8
# Of a head that is wrapped, torch's own: the log-softmax, the gradient by it, and what becomes of
# that, in float32.
WHOLE_BYTES_PER_LOGIT = 12
# And where logits are squashed: the slope of that.
SOFTCAP_BYTES_PER_LOGIT = 4
# A compiled step fuses head and loss: the logits, and their gradient in float32.
COMPILED_BYTES_PER_LOGIT = 6


@dataclass(frozen=True)
class Computing:
    """How numbers are held while a microbatch is computed.

    Attributes:
        element_bytes: of the compute dtype.
        weight_bytes: of the dtype that trained or frozen weights are held in.
        adapted: names of the linear layers with an adapter, empty without LoRA.
        adapter_bytes: of the dtype that adapters are held in.
        dropout: there is dropout in front of the adapters.
        checkpointing: blocks are recomputed in the backward pass.
        compiled: the step is compiled, head and loss included.
        flash: attention runs over all documents at once, so that its output is not copied together.
        partitioned: weights are gathered module by module (ZeRO-3).
        fused_lora: base product and adapter are one function where weights are whole
            (modeling/lora.py).
        fused_layers: norms with a scale, rotation and SwiGLU are one function each
            (modeling/layers.py).
        whole_logits: logits of all targets are made at once: the head is not a plain linear layer.
        trained_rows: single rows of embedding and head are trained (`--train-tokens`).
        float32_attention: attention casts queries, keys and values up (a CPU in 16 bits,
            modeling/attention.py).
    """

    element_bytes: int
    weight_bytes: int
    adapted: frozenset[str] = frozenset()
    adapter_rank: int = 0
    adapter_bytes: int = 0
    dropout: bool = False
    checkpointing: bool = False
    compiled: bool = False
    flash: bool = False
    partitioned: bool = False
    fused_lora: bool = False
    fused_layers: bool = False
    float32_attention: bool = False
    whole_logits: bool = False
    trained_rows: bool = False

    @property
    def full(self) -> bool:
        """All parameters are trained."""
        return not self.adapted

    @property
    def autocast(self) -> bool:
        """Weights are cast for each product; the residual stream has their dtype."""
        return self.weight_bytes > self.element_bytes

    @property
    def adds_adapters(self) -> bool:
        """Adapters are added by the base's own products, and layers of one input keep it once."""
        return bool(self.adapted) and self.fused_lora and not self.partitioned

    @property
    def casts_adapters(self) -> bool:
        """peft casts the input of each adapter to its dtype, and autocast the result to its own,
        which is kept.
        """
        return (
            bool(self.adapted)
            and self.adapter_bytes > self.element_bytes
            and not self.adds_adapters
        )

    @property
    def residual_bytes(self) -> int:
        """Bytes of a number in the residual stream."""
        return self.weight_bytes if self.autocast else self.element_bytes


def block_bytes_per_token(block: Block, how: Computing) -> int:
    """Bytes that one block keeps per token of a microbatch without checkpointing."""
    size, hidden = how.element_bytes, block.hidden
    if how.compiled:
        # torch's min-cut partitioner keeps what matrix products and attention made, and the
        # residual stream at each norm; it computes again what is element by element
        # (torch/_functorch/partitioners.py). Not measured.
        products = sum(
            part.made + part.routed + part.inner * part.attention for part in block.parts
        )
        return 2 * how.residual_bytes * hidden + size * products
    kept = _norms_keep(block, how)
    for part in block.parts:
        kept += _part_makes(part, how) + _linear_inputs(part, how)
    return kept


def _norms_keep(block: Block, how: Computing) -> int:
    """Bytes per token of the norms' inputs."""
    stream, normed = block.norms * block.hidden, block.normed
    if how.fused_layers and block.scaled:  # as they came, or widened to the scale's dtype
        return how.residual_bytes * stream + max(how.element_bytes, how.weight_bytes) * normed
    kept = 4 * (stream + normed)  # RMSNorm computes in float32, and keeps what it got
    if how.full and block.scaled:  # what is multiplied by the trained scale
        kept += how.residual_bytes * stream + how.element_bytes * normed
    return kept


def _part_makes(part: Part, how: Computing) -> int:
    """Bytes per token of what matrices made and of what is made of it; without the inputs of
    matrices.
    """
    if part.attention and how.float32_attention:
        # q, k, v and the output; their 16-bit originals are dropped
        return 4 * (part.made + part.inner)
    # Of an MLP gate, silu(gate) and up, or the activation; of attention q, k, v and its output.
    inner = part.made >= 2 * part.inner
    if part.attention:
        # The documents of a microbatch are joined into a copy, which o_proj keeps; flash
        # attention's output is what it keeps, unless it is cast for an adapter.
        inner = not (how.flash and not how.casts_adapters and _keeps_its_input(part.writer, how))
    elif how.fused_layers and part.is_swiglu:
        inner = False  # silu(gate) is computed again
    return how.element_bytes * (part.made + part.routed + part.inner * inner)


def _keeps_its_input(matrix: Matrix | None, how: Computing) -> bool:
    return matrix is not None and (how.full or (matrix.linear and matrix.name in how.adapted))


def _linear_inputs(part: Part, how: Computing) -> int:
    """Bytes per token of the inputs that matrices keep for the gradients of their weights."""
    size = how.element_bytes
    if how.full:
        # Autocast casts the input of each layer anew; without it the layers after one norm share
        # theirs.
        return size * sum(part.inputs(shared=not how.autocast))
    low_rank = size * how.adapter_rank * len(part.inputs(how.adapted))
    if how.adds_adapters:  # dropped inputs are made again from their masks
        masks = sum(part.inputs(how.adapted)) if how.dropout else 0
        return low_rank + masks + size * sum(part.inputs(how.adapted, shared=True))
    if how.dropout:
        # Each adapter has its own dropped input, and a mask of a byte.
        return low_rank + (size + 1) * sum(part.inputs(how.adapted))
    return low_rank + size * sum(part.inputs(how.adapted, shared=not how.casts_adapters))


@dataclass(frozen=True)
class Moment:
    """Bytes at a moment of a microbatch in which its memory may be largest, beside the state.

    Attributes:
        kept: what autograd keeps, of all blocks or (checkpointed) of their inputs and of the one
            that is recomputed.
        flowing: gradients on their way, and whole gradients of embedding and head.
        logits: logits and what the loss makes of them.
        casts: weights cast by autocast.
    """

    name: str
    kept: int
    flowing: int = 0
    logits: int = 0
    casts: int = 0

    @property
    def bytes(self) -> int:
        return self.kept + self.flowing + self.logits + self.casts


def moments(
    shape: ModelShape, how: Computing, tokens: int, targets: int, longest: int
) -> list[Moment]:
    """The moments of a microbatch, in their order; they are never the same.

    Args:
        targets: supervised positions. longest: tokens of the longest document.
    """
    kept, block = activation_bytes(shape, how, tokens)
    working, logits = working_bytes(shape, how, tokens, longest), loss_bytes(shape, how, targets)
    if how.compiled:  # a compiler's order is not known
        return [
            Moment("compiled", kept + block, working, logits, _casts(shape, how, shape.embedding))
        ]
    # A checkpointed block's casts go with its forward pass, and are made again with it.
    whole = 0 if how.checkpointing else _casts(shape, how, 0)
    # The last norm's output, what the head reads of it, and the gradient by that, which the forward
    # pass makes.
    hidden = shape.hidden * (how.residual_bytes * (tokens + targets) + how.element_bytes * targets)
    summed, tied, given = 0, 0, []
    if how.full:
        # The gradient of the head's weight: its float32 sum over chunks, and the product of one, of
        # which only the gradient by its logits is left then; at the end in the weight's own dtype.
        summed = 4 * shape.embedding
        of_chunk = how.element_bytes * (shape.embedding + _chunk_of_logits(shape, how, targets))
        logits = max(logits, of_chunk)
        # Autograd adds head and embedding up before it gives the weight its gradient.
        tied = how.weight_bytes * shape.embedding * shape.tied
        given = [Moment("embedding", 0, 3 * tied or how.weight_bytes * shape.embedding)]
    return [
        Moment("forward", kept, hidden + summed, logits, _casts(shape, how, shape.embedding)),
        Moment(
            "head", kept, hidden + summed + how.weight_bytes * shape.embedding * how.full, 0, whole
        ),
        Moment(
            "block", kept + block, working + tied, 0, whole or _casts(shape, how, 0) // shape.layers
        ),
        *given,
    ]


def _casts(shape: ModelShape, how: Computing, others: int) -> int:
    """Bytes of the blocks' matrices, and so many other numbers, cast by autocast."""
    return how.element_bytes * (shape.block_matrices + others) if how.autocast else 0


def activation_bytes(shape: ModelShape, how: Computing, tokens: int) -> tuple[int, int]:
    """Bytes that are kept of a microbatch at the turn from forward to backward; and of the block
    recomputed then.
    """
    # Embedding's output and the last norm; of that one function keeps its input alone.
    fused = how.fused_layers and any(block.scaled for block, _count in shape.blocks)
    ends = (how.residual_bytes if fused else 4 + how.residual_bytes * (1 + how.full)) * shape.hidden
    blocks = [(block_bytes_per_token(block, how), count) for block, count in shape.blocks]
    if how.checkpointing:
        # Each block keeps its input; the one being recomputed keeps everything, which is by one
        # function the input too.
        stream = how.residual_bytes * shape.hidden
        return tokens * (shape.layers * stream + ends), tokens * (max(blocks)[0] - stream * fused)
    return tokens * (sum(bytes_ * count for bytes_, count in blocks) + ends), 0


def working_bytes(shape: ModelShape, how: Computing, tokens: int, longest: int) -> int:
    """Bytes of gradients on their way through a block, and of attention scores where they are made
    whole.

    Args:
        longest: tokens of the longest document.
    """
    parts = [part for block, _count in shape.blocks for part in block.parts if not part.attention]
    # Gate, up and their product; of frozen matrices without casts one less, because nothing waits
    # for its gradient.
    width = how.element_bytes * max(
        part.made + part.inner * (how.full or how.casts_adapters) for part in parts
    )
    # Of experts: what tokens bring to them, the gradient of what they write, and that weighted.
    width = max(width, 3 * how.element_bytes * max(part.routed for part in parts))
    if how.dropout:  # the input in the adapter's dtype, whole and dropped
        width = max(width, 2 * how.adapter_bytes * max(part.inner for part in parts))
    flowing = tokens * (width + 2 * how.residual_bytes * shape.hidden)
    return flowing + shape.softcapped_heads * tokens * longest * (4 + 2 * how.element_bytes)


def loss_bytes(shape: ModelShape, how: Computing, targets: int) -> int:
    """Bytes of logits and of what the loss makes of them, for one chunk of targets."""
    if how.compiled:
        return COMPILED_BYTES_PER_LOGIT * targets * shape.vocabulary
    each = WHOLE_BYTES_PER_LOGIT if how.whole_logits else LOSS_BYTES_PER_LOGIT
    each += SOFTCAP_BYTES_PER_LOGIT * shape.softcapped_logits
    # peft 0.21 TrainableTokensLayer.forward: the head's weight is copied with the trained rows in
    # it.
    copied = how.element_bytes * shape.embedding * how.trained_rows
    return each * _chunk_of_logits(shape, how, targets) + copied


def _chunk_of_logits(shape: ModelShape, how: Computing, targets: int) -> int:
    """Numbers of one chunk of logits; all chunks have one size."""
    return ceil(targets / max(1, ceil(targets / _targets_at_once(shape, how)))) * shape.vocabulary


def _targets_at_once(shape: ModelShape, how: Computing) -> int:
    if how.whole_logits:
        return 2**40
    return max(1, LOGITS_PER_CHUNK * (TRAINED_HEAD_CHUNKS if how.full else 1) // shape.vocabulary)


def most_targets_of_whole_chunks(shape: ModelShape, how: Computing, targets: int) -> int:
    """Of at most so many targets those whose chunks are largest: one more, and all chunks are
    smaller.
    """
    most = _targets_at_once(shape, how)
    return targets // most * most or targets
