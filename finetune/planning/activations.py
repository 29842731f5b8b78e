"""What autograd keeps of a microbatch until its backward pass has used it, as transformers'
decoders make it.

Read off the modeling code of transformers 5.23 (models/*/modeling_*.py, integrations/moe.py), peft
0.21 (tuners/lora/layer.py) and our own attention and loss. Blocks are checked against autograd
(tests/planning/test_memory.py), the peak of a microbatch against fake tensors
(tests/planning/test_peaks.py), both within 15%.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.planning.shapes import Block, Matrix, ModelShape, Part
from finetune.planning.workload import Computing, Workload

# Logits and their log-softmax, which becomes their gradient in place; both in float32 at most.
LOSS_BYTES_PER_LOGIT = 8
# With torch's own head, which is used if the head is wrapped: the log-softmax, its gradient, and
# the logits' gradient, in float32.
WHOLE_BYTES_PER_LOGIT = 12
# A compiled step fuses head and loss: the logits, and their gradient in float32.
COMPILED_BYTES_PER_LOGIT = 6
# In addition, if logits are soft-capped: the derivative of the cap.
SOFTCAP_BYTES_PER_LOGIT = 4


@dataclass(frozen=True)
class Moment:
    """Bytes at a moment of a microbatch in which its memory may peak, without the training state.

    Attributes:
        kept: tensors that autograd keeps.
        flowing: gradients in flight, and whole gradients of embedding and head.
        logits: logits and what the loss computes from them.
        casts: weights cast by autocast.
    """

    kept: int
    flowing: int = 0
    logits: int = 0
    casts: int = 0

    @property
    def bytes(self) -> int:
        return self.kept + self.flowing + self.logits + self.casts


def worst_moment(work: Workload) -> Moment:
    """Return the moment in which a microbatch needs its peak memory: no two moments coincide."""
    shape, how, tokens, embedding = work.shape, work.computing, work.microbatch_tokens, 0
    kept, block = activation_bytes(shape, how, tokens)
    working, logits = working_bytes(work), loss_bytes(shape, how, work.targets)
    matrices = how.element_bytes * shape.block_matrices * how.autocast
    head_cast = how.element_bytes * shape.embedding * how.autocast
    if how.compiled:  # a compiler's order is not known
        return Moment(kept + block, working, logits, matrices + head_cast)
    # The last norm's output, what the head reads of it, and the gradient by that, which the forward
    # pass makes.
    head = shape.hidden * (
        how.residual_bytes * (tokens + work.targets) + how.element_bytes * work.targets
    )
    tied = 0
    if how.full:
        # The gradient of the head's weight: its float32 sum over chunks, and one chunk's product.
        # Of that chunk only the logits' gradient is left then.
        head += 4 * shape.embedding
        chunk = _logits_at_once(shape, how, work.targets)
        logits = max(logits, how.element_bytes * (shape.embedding + chunk))
        embedding = how.weight_bytes * shape.embedding
        # Autograd adds head and embedding up before it gives the weight its gradient.
        tied = embedding if shape.tied else 0
    # A checkpointed block's casts go with its forward pass, and are made again with it.
    one_block = matrices // shape.layers if how.checkpointing else matrices
    moments = [
        Moment(kept, head, logits, matrices + head_cast),
        Moment(kept, head + embedding, 0, 0 if how.checkpointing else matrices),
        Moment(kept + block, working + tied, 0, one_block),
        Moment(0, embedding + 2 * tied),
    ]
    return max(moments, key=lambda moment: moment.bytes)


def activation_bytes(shape: ModelShape, how: Computing, tokens: int) -> tuple[int, int]:
    """Return the bytes that are kept of a microbatch between forward and backward, and those of the
    block that is recomputed then.
    """
    blocks = [(block_bytes_per_token(block, how), count) for block, count in shape.blocks]
    stream = how.residual_bytes * shape.hidden
    fused = how.fused_layers and shape.blocks[0][0].scaled
    # The embedding's output and the last norm, which as one function keeps its input alone.
    ends = stream if fused else stream + 4 * shape.hidden
    if how.checkpointing:  # each block keeps its input, and the recomputed one everything
        return tokens * (shape.layers * stream + ends), tokens * (max(blocks)[0] - stream * fused)
    return tokens * (sum(kept * count for kept, count in blocks) + ends), 0


def block_bytes_per_token(block: Block, how: Computing) -> int:
    """Bytes that one block keeps per token of a microbatch without checkpointing."""
    if how.compiled:  # the residual stream at each of two norms
        norms = 2 * how.residual_bytes * block.hidden
    elif how.fused_layers and block.scaled:  # the input alone
        norms = how.residual_bytes * block.norm_width
    else:  # RMSNorm computes in float32, and keeps what a trained scale multiplies
        norms = (4 + how.residual_bytes * (how.full and block.scaled)) * block.norm_width
    parts = sum(_part_makes(part, how) + _linear_inputs(part, how) for part in block.parts)
    return norms + how.element_bytes * parts


def _part_makes(part: Part, how: Computing) -> int:
    """Return the elements per token of the matrices' outputs and of what is computed from them.

    The matrices' inputs are not counted.
    """
    if part.attention and how.float32_attention:
        return 2 * (part.made + part.inner)  # twice the width; the 16-bit originals are dropped
    if part.attention:
        # q, k, v and attention's output, which o_proj may keep too. torch's min-cut partitioner
        # keeps what matrix products and attention made, and computes the rest again
        # (torch/_functorch/partitioners.py).
        more = how.compiled or not (part.writer and _keeps_its_input(part.writer, how))
    else:
        # Gate, silu(gate) and up; one function computes silu(gate) again.
        linear = all(matrix.linear for matrix in part.matrices)
        gated = part.made >= 2 * part.inner
        more = gated and not how.compiled and not (how.fused_layers and linear)
    return part.made + part.routed + part.inner * more


def _keeps_its_input(matrix: Matrix, how: Computing) -> bool:
    return how.full or (matrix.linear and matrix.name in how.adapted)


def _linear_inputs(part: Part, how: Computing) -> int:
    """Elements per token of the inputs that matrices keep for the gradients of their weights."""
    if how.compiled:  # they are computed again
        return 0
    widths = [
        (matrix == part.writer, matrix.inputs * matrix.active)
        for matrix in part.matrices
        if not matrix.table and _keeps_its_input(matrix, how)
    ]
    dropped = how.dropout and not how.full
    # Autocast makes a separate input for each layer, and so does peft on a base in 16 bits or with
    # dropout. Otherwise q, k and v share one input, and so do gate and up.
    separate = how.autocast if how.full else how.casts_adapters or dropped
    shared = set(widths) if how.adds_adapters or not separate else widths
    kept = sum(width for _writes, width in shared)
    # A dropped input also has a mask of one byte per element.
    return kept + sum(width for _writes, width in widths) // how.element_bytes * dropped


def working_bytes(work: Workload) -> int:
    """Bytes of gradients on their way through a block, and of attention scores if they are made
    whole.
    """
    shape, how, tokens = work.shape, work.computing, work.microbatch_tokens
    widths = [2 * how.residual_bytes * shape.hidden]
    for part in (part for block, _count in shape.blocks for part in block.parts):
        if not part.attention:
            # Gate, up and their product; of frozen matrices without casts one less, because nothing
            # waits for its gradient.
            made = part.made + part.inner * (how.full or how.casts_adapters)
            # Of experts: what tokens bring to them, the gradient of what they write, and that
            # weighted.
            widths.append(how.element_bytes * max(made, 3 * part.routed))
            # The input in the adapter's dtype, whole and dropped.
            widths.append(2 * how.adapter_bytes * part.inner * how.dropout)
    scores = shape.softcapped_heads * work.longest * (4 + 2 * how.element_bytes)
    return tokens * (widths[0] + max(widths[1:]) + scores)


def loss_bytes(shape: ModelShape, how: Computing, targets: int) -> int:
    """Return the bytes of the logits and the loss's intermediate values, for a chunk of targets."""
    if how.compiled:
        return COMPILED_BYTES_PER_LOGIT * targets * shape.vocabulary
    each = WHOLE_BYTES_PER_LOGIT if how.whole_logits else LOSS_BYTES_PER_LOGIT
    each += SOFTCAP_BYTES_PER_LOGIT * shape.softcapped_logits
    # peft 0.21 TrainableTokensLayer.forward copies the head's weight with the trained rows in it.
    copied = how.element_bytes * shape.embedding * how.trained_rows
    return each * _logits_at_once(shape, how, targets) + copied


def _logits_at_once(shape: ModelShape, how: Computing, targets: int) -> int:
    """Logits of the fullest chunk."""
    from finetune.modeling.loss import LOGITS_PER_CHUNK, TRAINED_HEAD_CHUNKS

    logits = targets * shape.vocabulary
    if how.whole_logits:
        return logits
    return min(logits, LOGITS_PER_CHUNK * (TRAINED_HEAD_CHUNKS if how.full else 1))
