"""What autograd keeps of a row until its backward pass has used it, tensor by tensor as transformers' decoders make it.

Read off the modelling code of transformers 5.23 (models/*/modeling_*.py), peft 0.21 (tuners/lora/layer.py) and our own
attention and loss; a block is checked against autograd (tests/planning/test_memory.py). No torch here: numbers in,
bytes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.planning.shapes import Matrix, ModelShape

# As in modeling/loss.py: numbers in one chunk of logits. (That module imports torch; a test compares the two.)
LOGITS_PER_CHUNK = 32 * 2**20
# Float32 log-softmax, its gradient, and that of the logits: all there in the backward pass of a chunk.
LOSS_BYTES_PER_LOGIT = 12
# A compiled step fuses head and loss: the logits, and their gradient in float32.
COMPILED_BYTES_PER_LOGIT = 6


@dataclass(frozen=True)
class Computing:
    """How numbers are held while a row is computed.

    Attributes:
        element_bytes: of the compute dtype.
        weight_bytes: of the dtype that trained or frozen weights are held in.
        adapted: linear layers with an adapter, empty without LoRA.
        adapter_rank: rank of the adapters.
        adapter_bytes: of the dtype that adapters are held in.
        dropout: there is dropout in front of the adapters.
        checkpointing: blocks are recomputed in the backward pass.
        compiled: the step is compiled, head and loss included.
    """

    element_bytes: int
    weight_bytes: int
    adapted: tuple[Matrix, ...] = ()
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


def block_bytes_per_token(shape: ModelShape, how: Computing) -> int:
    """Bytes that one block keeps per token of a row without checkpointing."""
    queries, keys, inner = shape.query_width, shape.key_width, shape.intermediate
    if how.compiled:
        # torch's min-cut partitioner keeps what matrix products and attention made, and the residual stream at each
        # norm; it computes again what is element by element (torch/_functorch/partitioners.py). Not measured.
        products = 2 * queries + 2 * keys + inner * (2 if shape.gated else 1)
        return 2 * how.residual_bytes * shape.hidden + how.element_bytes * products
    kept = shape.norms * 4 * shape.hidden  # RMSNorm computes in float32, and keeps what it got
    scaled = how.full and shape.block_vectors > 0
    if scaled:
        kept += shape.norms * how.residual_bytes * shape.hidden  # what is multiplied by the trained scale
    kept += _linear_inputs(shape, how)
    if shape.head_norms:
        kept += 4 * (queries + keys)
        kept += how.element_bytes * (queries + keys) * scaled
    # q, k, v and the outputs of attention; the documents of a row are joined into a copy, which o_proj keeps.
    kept += how.element_bytes * (2 * queries + 2 * keys)
    kept += how.element_bytes * inner * (3 if shape.gated else 1)  # gate, silu(gate), up; or the activation
    return kept


def _linear_inputs(shape: ModelShape, how: Computing) -> int:
    """Bytes per token of the inputs that linear layers keep for the gradients of their weights."""
    if how.full:
        # Autocast casts the input of each layer anew; without it the layers after one norm share theirs.
        if how.autocast:
            return how.element_bytes * sum(matrix.inputs for matrix in shape.matrices)
        return how.element_bytes * sum(_shared_inputs(shape, shape.matrices))
    low_rank = how.adapter_bytes * how.adapter_rank * len(how.adapted)
    if how.dropout:
        # Each adapter has its own dropped input, and a mask of a byte.
        return low_rank + (how.adapter_bytes + 1) * sum(matrix.inputs for matrix in how.adapted)
    if how.adapter_bytes != how.element_bytes:
        # peft casts the input of each adapter to the adapter's dtype.
        return low_rank + how.adapter_bytes * sum(matrix.inputs for matrix in how.adapted)
    return low_rank + how.element_bytes * sum(_shared_inputs(shape, how.adapted))


def _shared_inputs(shape: ModelShape, matrices: tuple[Matrix, ...]) -> list[int]:
    """Widths of the distinct inputs of these layers: one for q, k and v, one for gate and up."""
    outputs = ("o_proj", "down_proj", "fc2", "c_proj")
    of_attention = {"q_proj", "k_proj", "v_proj", "qkv_proj"}
    before_attention = any(matrix.name in of_attention for matrix in matrices)
    before_mlp = any(matrix.name not in of_attention and matrix.name not in outputs for matrix in matrices)
    own = [matrix.inputs for matrix in matrices if matrix.name in outputs]
    return [shape.hidden] * (before_attention + before_mlp) + own


def activation_bytes(shape: ModelShape, how: Computing, tokens: int) -> int:
    """Bytes that all blocks keep of a row at the turn from forward to backward."""
    ends = (4 + how.residual_bytes * (1 + how.full)) * shape.hidden  # embedding's output and the last norm
    block = block_bytes_per_token(shape, how)
    if how.checkpointing:
        # Each block keeps its input; the one being recomputed keeps everything.
        return tokens * (shape.layers * how.residual_bytes * shape.hidden + block + ends)
    return tokens * (shape.layers * block + ends)


def working_bytes(shape: ModelShape, how: Computing, tokens: int, longest: int) -> int:
    """Bytes of gradients on their way through a block, and of attention scores where they are made whole.

    Args:
        longest: tokens of the longest document.
    """
    width = shape.intermediate * (3 if shape.gated else 2)
    flowing = tokens * (how.element_bytes * width + 2 * how.residual_bytes * shape.hidden)
    scores = shape.heads * tokens * longest * (4 + 2 * how.element_bytes) if shape.softcapped else 0
    return flowing + scores


def loss_bytes(shape: ModelShape, how: Computing, targets: int) -> int:
    """Bytes of logits and of what the loss makes of them, for one chunk of targets."""
    if how.compiled:
        return COMPILED_BYTES_PER_LOGIT * targets * shape.vocabulary
    at_once = min(targets, max(1, LOGITS_PER_CHUNK // shape.vocabulary))
    return LOSS_BYTES_PER_LOGIT * at_once * shape.vocabulary + how.element_bytes * targets * shape.hidden
