"""What autograd keeps of a microbatch until its backward pass has used it, tensor by tensor as transformers' decoders
make it.

Read off the modelling code of transformers 5.23 (models/*/modeling_*.py, integrations/moe.py), peft 0.21
(tuners/lora/layer.py) and our own attention and loss; blocks are checked against autograd
(tests/planning/test_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.planning.shapes import Block, ModelShape, Part

# As in modeling/loss.py: numbers in one chunk of logits. (That module imports torch; a test compares the two.)
LOGITS_PER_CHUNK = 64 * 2**20
TRAINED_HEAD_CHUNKS = 2
# Logits and their log-softmax, which becomes their gradient in place; both in float32 at most.
LOSS_BYTES_PER_LOGIT = 8
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
    """

    element_bytes: int
    weight_bytes: int
    adapted: frozenset[str] = frozenset()
    adapter_rank: int = 0
    adapter_bytes: int = 0
    dropout: bool = False
    checkpointing: bool = False
    compiled: bool = False

    @property
    def full(self) -> bool:
        """All parameters are trained."""
        return not self.adapted

    @property
    def autocast(self) -> bool:
        """Weights are cast for each product; the residual stream has their dtype."""
        return self.weight_bytes > self.element_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes of a number in the residual stream."""
        return self.weight_bytes if self.autocast else self.element_bytes


def block_bytes_per_token(block: Block, how: Computing) -> int:
    """Bytes that one block keeps per token of a microbatch without checkpointing."""
    size, hidden = how.element_bytes, block.hidden
    if how.compiled:
        # torch's min-cut partitioner keeps what matrix products and attention made, and the residual stream at each
        # norm; it computes again what is element by element (torch/_functorch/partitioners.py). Not measured.
        products = sum(part.made + part.routed + part.inner * part.attention for part in block.parts)
        return 2 * how.residual_bytes * hidden + size * products
    kept = block.norms * 4 * hidden + 4 * block.normed  # RMSNorm computes in float32, and keeps what it got
    if how.full and block.scaled:  # what is multiplied by the trained scale
        kept += block.norms * how.residual_bytes * hidden + size * block.normed
    for part in block.parts:
        # q, k, v and the output of attention: the documents of a microbatch are joined into a copy, which o_proj keeps.
        # Of an MLP gate, silu(gate) and up, or the activation.
        kept += size * (part.made + part.routed + part.inner * (part.attention or part.made >= 2 * part.inner))
        kept += _linear_inputs(part, how)
    return kept


def _linear_inputs(part: Part, how: Computing) -> int:
    """Bytes per token of the inputs that matrices keep for the gradients of their weights."""
    if how.full:
        # Autocast casts the input of each layer anew; without it the layers after one norm share theirs.
        return how.element_bytes * sum(part.inputs(shared=not how.autocast))
    low_rank = how.adapter_bytes * how.adapter_rank * len(part.inputs(how.adapted))
    if how.dropout:
        # Each adapter has its own dropped input, and a mask of a byte.
        return low_rank + (how.adapter_bytes + 1) * sum(part.inputs(how.adapted))
    if how.adapter_bytes != how.element_bytes:
        # peft casts the input of each adapter to the adapter's dtype.
        return low_rank + how.adapter_bytes * sum(part.inputs(how.adapted))
    return low_rank + how.element_bytes * sum(part.inputs(how.adapted, shared=True))


def activation_bytes(shape: ModelShape, how: Computing, tokens: int) -> int:
    """Bytes that all blocks keep of a microbatch at the turn from forward to backward."""
    ends = (4 + how.residual_bytes * (1 + how.full)) * shape.hidden  # embedding's output and the last norm
    blocks = [(block_bytes_per_token(block, how), count) for block, count in shape.blocks]
    if how.checkpointing:
        # Each block keeps its input; the one being recomputed keeps everything.
        return tokens * (shape.layers * how.residual_bytes * shape.hidden + max(blocks)[0] + ends)
    return tokens * (sum(bytes_ * count for bytes_, count in blocks) + ends)


def working_bytes(shape: ModelShape, how: Computing, tokens: int, longest: int) -> int:
    """Bytes of gradients on their way through a block, and of attention scores where they are made whole.

    Args:
        longest: tokens of the longest document.
    """
    # Gate, up and their product.
    width = max(sum(p.made + p.inner for p in block.parts if not p.attention) for block, _count in shape.blocks)
    flowing = tokens * (how.element_bytes * width + 2 * how.residual_bytes * shape.hidden)
    return flowing + shape.softcapped_heads * tokens * longest * (4 + 2 * how.element_bytes)


def loss_bytes(shape: ModelShape, how: Computing, targets: int) -> int:
    """Bytes of logits and of what the loss makes of them, for one chunk of targets."""
    if how.compiled:
        return COMPILED_BYTES_PER_LOGIT * targets * shape.vocabulary
    chunk = LOGITS_PER_CHUNK * (TRAINED_HEAD_CHUNKS if how.full else 1)
    at_once = min(targets, max(1, chunk // shape.vocabulary))
    # The gradient of a trained head: summed in float32, and a chunk's.
    of_head = (4 + how.element_bytes) * shape.vocabulary * shape.hidden if how.full else 0
    return LOSS_BYTES_PER_LOGIT * at_once * shape.vocabulary + how.element_bytes * targets * shape.hidden + of_head
