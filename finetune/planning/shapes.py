"""A model's config.json -> the sizes and parameters that a plan needs, read off transformers' own
model of it.

The model is made without numbers, on torch's meta device, so no weights are needed; code that comes
with a model is never run. What transformers cannot make, or has no blocks that can be found, is
refused: a wrong count would be a wrong plan.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

# Attention whose work grows with the sequence; a `linear_attn` is counted by its matrices alone.
_ATTENTION = re.compile(r"(?<!linear_)attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Matrix:
    """A parameter of two or more dimensions; those of all experts of a mixture are one.

    Attributes:
        path: of its module within the block; outside the blocks, within the model.
        linear: LoRA can adapt it.
        active: experts that compute a token, of `experts`.
        table: looked up and not multiplied; `outputs` are its rows, of `inputs` numbers each.
    """

    path: str
    inputs: int
    outputs: int
    linear: bool = True
    experts: int = 1
    active: int = 1
    table: bool = False

    @property
    def name(self) -> str:
        """As in `--lora-target-modules`."""
        return self.path.rpartition(".")[2]

    @property
    def numbers(self) -> int:
        return self.inputs * self.outputs * self.experts


@dataclass(frozen=True)
class Part:
    """The matrices of one module of a block: attention, MLP, the experts of a mixture. Widths are
    of a token.

    Attributes:
        writer: the one whose output is added to the residual stream.
    """

    matrices: tuple[Matrix, ...]
    writer: Matrix | None
    attention: bool

    @cached_property
    def made(self) -> int:
        """Numbers that the others make: q, k and v; gate and up."""
        return sum(
            m.inputs if m.table else m.outputs * m.active for m in self.matrices if m != self.writer
        )

    @cached_property
    def inner(self) -> int:
        """Numbers that the writer reads."""
        return self.writer.inputs * self.writer.active if self.writer else 0

    @cached_property
    def routed(self) -> int:
        """Numbers that experts write, before they are weighted and added up."""
        return (
            self.writer.outputs * self.writer.active
            if self.writer and self.writer.experts > 1
            else 0
        )

    @cached_property
    def is_swiglu(self) -> bool:
        """By its names, as in modeling/layers.py; which activation it has is not looked at."""
        return sorted(matrix.name for matrix in self.matrices if matrix.linear) == [
            "down_proj",
            "gate_proj",
            "up_proj",
        ]

    def inputs(self, adapted: frozenset[str] | None = None, *, shared: bool = False) -> list[int]:
        """Widths of the inputs of the matrices (with an adapter).

        Args:
            shared: one for q, k and v, and one for gate and up.
        """
        found = [
            m
            for m in self.matrices
            if not m.table and (adapted is None or (m.linear and m.name in adapted))
        ]
        widths = [(m == self.writer, m.inputs * m.active) for m in found]
        return [width for _writes, width in (set(widths) if shared else widths)]


@dataclass(frozen=True)
class Block:
    """One layer of a decoder.

    Attributes:
        norms: norms of the residual stream; `scaled`: they have parameters.
        normed: numbers of a token's queries and keys that are normalised.
    """

    hidden: int
    parts: tuple[Part, ...]
    norms: int
    scaled: bool
    normed: int


@dataclass(frozen=True)
class ModelShape:
    """What counts about a decoder: sizes in numbers, parameters by kind.

    Attributes:
        blocks: the different ones, each with how many there are.
        others: matrices outside the blocks, without embedding and head.
        total: all parameters; `small` of them are norms and biases, which ZeRO-3 keeps whole on
            every device.
        tied: the output head is the embedding.
        softcapped_heads: heads whose scores are squashed, so that they are made whole.
        softcapped_logits: logits are squashed.
        named: all matrices by their paths in the model, the head's also where it is tied.
        vectors: norms and biases as (path of the module, numbers).
    """

    model_type: str
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    blocks: tuple[tuple[Block, int], ...]
    others: tuple[Matrix, ...]
    total: int
    small: int
    softcapped_heads: int
    softcapped_logits: bool
    named: tuple[Matrix, ...]
    vectors: tuple[tuple[str, int], ...]

    @cached_property
    def layers(self) -> int:
        return sum(count for _block, count in self.blocks)

    @cached_property
    def query_width(self) -> int:
        """Numbers of a token's queries in all blocks."""
        return sum(
            n * part.inner for block, n in self.blocks for part in block.parts if part.attention
        )

    @cached_property
    def in_blocks(self) -> tuple[tuple[Matrix, int], ...]:
        """The matrices of all blocks, each with how many there are."""
        return tuple(
            (m, n) for block, n in self.blocks for part in block.parts for m in part.matrices
        )

    @cached_property
    def matrices(self) -> tuple[tuple[Matrix, int], ...]:
        """The same with those outside the blocks; without embedding and head."""
        return (*self.in_blocks, *((matrix, 1) for matrix in self.others))

    @cached_property
    def block_matrices(self) -> int:
        """Numbers in the matrices of all blocks."""
        return sum(count * matrix.numbers for matrix, count in self.in_blocks)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @cached_property
    def idle(self) -> int:
        """Parameters of the experts that do not compute a token, and of tables that are looked
        up.
        """
        experts = sum(n * m.inputs * m.outputs * (m.experts - m.active) for m, n in self.in_blocks)
        return experts + sum(n * m.numbers for m, n in self.in_blocks if m.table)

    @property
    def passed(self) -> int:
        """Numbers in matrices that a token passes: blocks and head; the embedding is only looked
        up.
        """
        return self.block_matrices + self.embedding - self.idle

    @cached_property
    def largest_module(self) -> int:
        """Parameters of the largest module that is gathered at once: embedding, head, or a
        matrix.
        """
        return max(self.embedding, *(matrix.numbers for matrix, _count in self.matrices))

    def adapted(self, targets: str | Sequence[str]) -> frozenset[str]:
        """Names of the linear layers that get an adapter.

        Args:
            targets: "all-linear", or names as of `--lora-target-modules`; a dotted name counts by
                its last part.

        Raises:
            ConfigError: a name that no linear layer has; layers beside the experts of a mixture,
                because which of those get an adapter peft decides by the family.
        """
        mixed = {
            matrix.path.partition(".")[0] for matrix, _count in self.in_blocks if matrix.experts > 1
        }
        linear = [matrix for matrix, _count in self.matrices if matrix.linear]
        known = {matrix.name for matrix in linear if matrix.path.partition(".")[0] not in mixed}
        if targets == "all-linear" and not mixed:
            targets = tuple(known)
        names = [targets] if isinstance(targets, str) else targets
        wanted = {name.rpartition(".")[2] for name in names}
        if unknown := sorted(wanted - known - {"lm_head"}):
            problem = (
                "is not counted where a mixture has its experts" if mixed else "is no linear layer"
            )
            raise ConfigError(
                f"LoRA target {', '.join(unknown)} {problem}: {self.model_type}",
                where="--lora-target-modules",
                fix=f"choose from {', '.join(sorted(known))}"
                + ("" if mixed else ", or use all-linear"),
            )
        return frozenset(wanted)

    def lora_tensors(self, rank: int, adapted: frozenset[str]) -> list[int]:
        """Numbers of each tensor of a LoRA adapter (Hu et al. 2021, section 4.1), two a linear
        layer.
        """
        layers = [
            (m.name, m.inputs, m.outputs)
            for m, n in self.matrices
            if m.linear and m.name in adapted
            for _ in range(n)
        ]
        layers += [("lm_head", self.hidden, self.vocabulary)] if "lm_head" in adapted else []
        return [rank * width for _name, *widths in layers for width in widths]


# ---------------------------------------------------------------- from a configuration


def read_shape(path: Path) -> ModelShape:
    """The shape that a config.json (or the folder that holds one) describes.

    Raises:
        ConfigError: no such file, not JSON, or not the configuration of a decoder that transformers
            can make.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"the model's configuration cannot be read: {reason}",
            where=str(file),
            fix=(
                "give --model a folder with config.json, or --model-config FILE; weights are not"
                " needed"
            ),
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            "the model's configuration is not a JSON object", str(file), "copy the file again"
        )
    return shape_of_config(content, str(file))


def shape_of_config(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape of a config.json's content.

    Raises:
        ConfigError: see `read_shape`.
    """
    from transformers import CONFIG_MAPPING

    from finetune.modeling.lfm2_value import register
    from finetune.modeling.scratch import make_empty_model

    register()
    kind = config.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"model_type {kind!r} is not among the models of transformers, and a model's own code"
            " is not run here",
            where,
            "for a model that is made like another, give --model-config FILE with that one's"
            " model_type and the sizes",
        )
    try:
        # Without the reference to code that came with the model.
        made = CONFIG_MAPPING[kind].from_dict(
            {name: value for name, value in config.items() if name != "auto_map"}
        )
        return shape_of_model(make_empty_model(made))
    except Exception as error:  # whatever a model's code makes of values that do not fit
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise ConfigError(
            f"no plan can be made of this {kind} configuration: {reason}",
            where,
            "compare the file with the one that the model was published with; a decoder of text is"
            " needed",
        ) from error


def shape_of_model(model: PreTrainedModel) -> ModelShape:
    """The shape of a model, which may be on the meta device.

    Raises:
        ValueError: its blocks are not found, or how many experts compute a token.
    """
    config = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings().weight
    head: nn.Parameter = model.get_output_embeddings().weight
    layers = _decoder_layers(model, config.num_hidden_layers)
    active = getattr(config, "num_experts_per_tok", None)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()} | {
        id(embedding),
        id(head),
    }
    blocks = Counter(_block(layer, config.hidden_size, active) for layer in layers)
    parameters = list(model.parameters())
    softcapped = bool(getattr(config, "attn_logit_softcapping", None))
    return ModelShape(
        model_type=str(model.config.model_type),
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=embedding.shape[0],
        tied=head is embedding,
        blocks=tuple(blocks.items()),
        others=tuple(_matrices(model, config.hidden_size, active, inside)),
        total=sum(parameter.numel() for parameter in parameters),
        small=sum(parameter.numel() for parameter in parameters if parameter.ndim < 2),
        softcapped_heads=config.num_attention_heads if softcapped else 0,
        softcapped_logits=bool(getattr(config, "final_logit_softcapping", None)),
        named=tuple(_matrices(model, config.hidden_size, active)),
        vectors=tuple(
            (name.rpartition(".")[0], p.numel())
            for name, p in model.named_parameters()
            if p.ndim < 2
        ),
    )


def _decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The list of so many modules that holds most of the model's parameters: a vision tower may
    have as many.
    """
    from torch import nn

    def numbers(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim >= 2)

    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    found = max(lists, key=numbers, default=None)
    tables = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)
    )
    head: nn.Parameter = model.get_output_embeddings().weight
    if found is None or 2 * numbers(found) < numbers(model) - tables - head.numel():
        raise ValueError(f"the {count} blocks of a {type(model).__name__} are not found")
    return found


def _block(layer: nn.Module, hidden: int, active: int | None) -> Block:
    modules: dict[str, list[Matrix]] = {}
    for matrix in _matrices(layer, hidden, active):
        modules.setdefault(matrix.path.rpartition(".")[0], []).append(matrix)
    norms = {
        path: module for path, module in layer.named_modules() if "Norm" in type(module).__name__
    }
    own = [module for path, module in norms.items() if "." not in path]
    with_norms = {path.rpartition(".")[0] for path in norms}
    parts, normed = [], 0
    for path, found in modules.items():
        writer = next(
            (matrix for matrix in reversed(found) if matrix.outputs == hidden and not matrix.table),
            None,
        )
        parts.append(part := Part(tuple(found), writer, bool(_ATTENTION.search(path))))
        # of q and k: q, k and v are made, and as much is read as q
        if part.attention and path in with_norms:
            normed += (part.made + part.inner) // 2
    return Block(
        hidden, tuple(parts), len(own), any(list(norm.parameters()) for norm in own), normed
    )


def _matrices(
    root: nn.Module, hidden: int, active: int | None, skipped: Collection[int] = ()
) -> Iterator[Matrix]:
    """The matrices of a module, without the parameters whose ids are `skipped`."""
    from torch import nn

    for path, module in root.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or id(parameter) in skipped or "bias" in name:
                continue
            full = path if name == "weight" else f"{path}.{name}".lstrip(".")
            first, second, *third = parameter.shape
            if third and "Expert" in type(module).__name__:
                if active is None:
                    raise ValueError(
                        "num_experts_per_tok is not set: how many experts compute a token?"
                    )
                # Stacked; in some families (experts, inputs, outputs), in others the other way
                # round.
                inner = third[0] if second == hidden else second
                inputs, outputs = (
                    (inner, hidden) if "down" in full or "output" in full else (hidden, inner)
                )
                yield Matrix(
                    full, inputs, outputs, linear=False, experts=first, active=min(active, first)
                )
            elif type(module).__name__ == "Conv1D":  # GPT-2's linear layer
                yield Matrix(full, first, second)
            elif isinstance(module, nn.Embedding):
                yield Matrix(full, second, first, linear=False, table=True)
            else:
                yield Matrix(full, parameter.numel() // first, first, isinstance(module, nn.Linear))


# ---------------------------------------------------------------- public models

# From each model's public config.json, so that a plan needs neither network nor file. name: layers,
# width, heads, key-value heads, width of the MLP, vocabulary, whether head and embedding are tied
_QWEN3 = {
    "Qwen/Qwen3-0.6B": (28, 1024, 16, 8, 3072, 151936, True),
    "Qwen/Qwen3-1.7B": (28, 2048, 16, 8, 6144, 151936, True),
    "Qwen/Qwen3-4B": (36, 2560, 32, 8, 9728, 151936, True),
    "Qwen/Qwen3-8B": (36, 4096, 32, 8, 12288, 151936, False),
    "Qwen/Qwen3-14B": (40, 5120, 40, 8, 17408, 151936, False),
    "Qwen/Qwen3-32B": (64, 5120, 64, 8, 25600, 151936, False),
}
_QWEN25 = {
    "Qwen/Qwen2.5-0.5B": (24, 896, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (28, 1536, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": (36, 2048, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": (28, 3584, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-14B": (48, 5120, 40, 8, 13824, 152064, False),
    "Qwen/Qwen2.5-32B": (64, 5120, 40, 8, 27648, 152064, False),
    "Qwen/Qwen2.5-72B": (80, 8192, 64, 8, 29568, 152064, False),
}
KNOWN_MODELS = (*_QWEN3, *_QWEN25)
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def known_config(name: str) -> dict[str, Any] | None:
    """The configuration of a public model, `-Base` and `-Instruct` included; None for one that is
    not known.
    """
    plain = name.removesuffix("-Instruct").removesuffix("-Base")
    kind = {"model_type": "qwen3", "head_dim": 128} if plain in _QWEN3 else {"model_type": "qwen2"}
    sizes = (_QWEN3 | _QWEN25).get(plain)
    return sizes and {
        **kind,
        **dict(zip((*_SIZES, "vocab_size", "tie_word_embeddings"), sizes, strict=True)),
    }
