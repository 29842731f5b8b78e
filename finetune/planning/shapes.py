"""A model's config.json -> the sizes and parameters that a plan needs, read off transformers' own
model of it.

The model is made without values, on torch's meta device, so no weights are needed; code that comes
with a model is never run. A model that transformers cannot make, or whose blocks are not found, is
refused: a wrong count would be a wrong plan.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

# Attention whose work grows with the sequence; `linear_attn` is counted by its matrices alone.
_ATTENTION = re.compile(r"(?<!linear_)attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Matrix:
    """A parameter of two or more dimensions; all experts of a mixture are one matrix.

    Attributes:
        path: of its module within the block; in `ModelShape.matrices` within the model.
        linear: LoRA can adapt it.
        active: experts that compute a token, of `experts`.
        table: looked up and not multiplied; `outputs` are its rows, of `inputs` elements each.
        in_block: it belongs to a block.
        is_end: it is the embedding or the output head.
    """

    path: str
    inputs: int
    outputs: int
    linear: bool = True
    experts: int = 1
    active: int = 1
    table: bool = False
    in_block: bool = True
    is_end: bool = False

    @property
    def name(self) -> str:
        """The name as in `--lora-target-modules`."""
        return self.path.rpartition(".")[2]

    @cached_property
    def size(self) -> int:
        """Parameters."""
        return self.inputs * self.outputs * self.experts


@dataclass(frozen=True)
class Part:
    """The matrices of one module of a block: attention, an MLP, the experts of a mixture.

    Attributes:
        writer: the matrix whose output is added to the residual stream.
    """

    matrices: tuple[Matrix, ...]
    writer: Matrix | None
    attention: bool

    @cached_property
    def made(self) -> int:
        """Elements per token that the other matrices make: q, k and v; gate and up."""
        return sum(
            m.inputs if m.table else m.outputs * m.active for m in self.matrices if m != self.writer
        )

    @cached_property
    def inner(self) -> int:
        """Elements per token that the writer reads."""
        return self.writer.inputs * self.writer.active if self.writer else 0

    @cached_property
    def routed(self) -> int:
        """Elements per token that experts write, before they are weighted and added up."""
        experts = self.writer is not None and self.writer.experts > 1
        return self.writer.outputs * self.writer.active if self.writer and experts else 0


@dataclass(frozen=True)
class Block:
    """One layer of a decoder.

    Attributes:
        norm_width: elements per token that its norms read, of the residual stream, queries and
            keys.
        scaled: the norms have parameters.
    """

    hidden: int
    parts: tuple[Part, ...]
    norm_width: int
    scaled: bool


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder: widths in elements, parameters by kind.

    Attributes:
        blocks: the different blocks, each with how many there are.
        matrices: all of the model, a tied head as well.
        vectors: norms and biases as (path of the module, parameters).
        total: all parameters.
        tied: the output head is the embedding.
        softcapped_heads: heads whose scores are soft-capped, so that they are made whole.
    """

    model_type: str
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    blocks: tuple[tuple[Block, int], ...]
    matrices: tuple[Matrix, ...]
    vectors: tuple[tuple[str, int], ...]
    total: int
    softcapped_heads: int
    softcapped_logits: bool

    @cached_property
    def layers(self) -> int:
        return sum(count for _block, count in self.blocks)

    @cached_property
    def query_width(self) -> int:
        """Elements of a token's queries in all blocks."""
        return sum(
            count * part.inner
            for block, count in self.blocks
            for part in block.parts
            if part.attention
        )

    @cached_property
    def small(self) -> int:
        """Parameters of norms and biases, which ZeRO-3 keeps whole on every device."""
        return sum(size for _path, size in self.vectors)

    @cached_property
    def block_matrices(self) -> int:
        """Parameters in the matrices of all blocks."""
        return sum(m.size for m in self.matrices if m.in_block)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @cached_property
    def idle(self) -> int:
        """Parameters of the experts that do not compute a token, and of tables that are looked
        up.
        """
        return sum(
            m.size if m.table else m.inputs * m.outputs * (m.experts - m.active)
            for m in self.matrices
            if m.in_block
        )

    @property
    def passed(self) -> int:
        """Parameters of the matrices that a token passes: blocks and head; the embedding is only
        looked up.
        """
        return self.block_matrices + self.embedding - self.idle

    @cached_property
    def largest_module(self) -> int:
        """Parameters of the largest module that is gathered at once."""
        return max(m.size for m in self.matrices)

    def adapted(self, targets: str | Sequence[str]) -> frozenset[str]:
        """Return the names of the linear layers that get an adapter.

        Args:
            targets: "all-linear", or names as for `--lora-target-modules`; only the last part of a
                dotted name counts.

        Raises:
            ConfigError: no linear layer has the name; or it names layers next to the experts of a
                mixture, because peft decides by model family which of those get an adapter.
        """
        # The module within its block: "model.layers.3.mlp.experts" -> "mlp".
        owners = [(re.sub(r"^.*?\.\d+\.", "", m.path).partition(".")[0], m) for m in self.matrices]
        mixed = {owner for owner, matrix in owners if matrix.experts > 1}
        known = {m.name for owner, m in owners if m.linear and not m.is_end and owner not in mixed}
        if targets == "all-linear" and not mixed:
            return frozenset(known)
        names = [targets] if isinstance(targets, str) else targets
        chosen = frozenset(name.rpartition(".")[2] for name in names)
        if unknown := sorted(chosen - known - {"lm_head"}):
            problem = (
                "is not counted where a mixture has its experts" if mixed else "is no linear layer"
            )
            raise ConfigError(
                f"LoRA target {', '.join(unknown)} {problem}: {self.model_type}",
                where="--lora-target-modules",
                fix=f"choose from {', '.join(sorted(known))}"
                + ("" if mixed else ", or use all-linear"),
            )
        return chosen


# ---------------------------------------------------------------- from a configuration


def read_shape(path: Path) -> ModelShape:
    """Return the shape that a config.json (or the folder that holds one) describes.

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
    """Return the shape of a config.json's content.

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
    except Exception as error:  # a model's code raises any type for values that do not fit
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
    """Return the shape of a model, which may be on the meta device.

    Raises:
        ValueError: its blocks are not found, or how many experts compute a token.
    """
    config = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings().weight
    head: nn.Parameter = model.get_output_embeddings().weight
    layers = _decoder_layers(model, config.num_hidden_layers)
    reader = _MatrixReader(
        config.hidden_size,
        getattr(config, "num_experts_per_tok", None),
        ends=frozenset((id(embedding), id(head))),
        in_blocks=frozenset(id(p) for layer in layers for p in layer.parameters()),
    )
    softcapped = bool(getattr(config, "attn_logit_softcapping", None))
    return ModelShape(
        model_type=str(model.config.model_type),
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=embedding.shape[0],
        tied=head is embedding,
        blocks=tuple(Counter(_block(layer, reader) for layer in layers).items()),
        matrices=tuple(reader.matrices(model)),
        vectors=tuple(
            (name.rpartition(".")[0], parameter.numel())
            for name, parameter in model.named_parameters()
            if parameter.ndim < 2
        ),
        total=sum(parameter.numel() for parameter in model.parameters()),
        softcapped_heads=config.num_attention_heads if softcapped else 0,
        softcapped_logits=bool(getattr(config, "final_logit_softcapping", None)),
    )


def _decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """Return the list of `count` modules that holds most of the model's parameters: a vision tower
    may have as many modules.
    """
    from torch import nn

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim >= 2)

    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    found = max(lists, key=size, default=None)
    tables = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)
    )
    head: nn.Parameter = model.get_output_embeddings().weight
    if found is None or 2 * size(found) < size(model) - tables - head.numel():
        raise ValueError(f"the {count} blocks of a {type(model).__name__} are not found")
    return found


def _block(layer: nn.Module, reader: _MatrixReader) -> Block:
    by_module: dict[str, list[Matrix]] = {}
    for matrix in reader.matrices(layer):
        by_module.setdefault(matrix.path.rpartition(".")[0], []).append(matrix)
    norms = {
        path: module for path, module in layer.named_modules() if "Norm" in type(module).__name__
    }
    own = [module for path, module in norms.items() if "." not in path]
    normed = {path.rpartition(".")[0] for path in norms}
    parts, norm_width = [], len(own) * reader.hidden
    for path, matrices in by_module.items():
        writers = [m for m in matrices if m.outputs == reader.hidden and not m.table]
        part = Part(
            tuple(matrices), writers[-1] if writers else None, bool(_ATTENTION.search(path))
        )
        parts.append(part)
        if part.attention and path in normed:
            # Norms of q and k: q, k and v are made, and as much is read as q has.
            norm_width += (part.made + part.inner) // 2
    scaled = any(list(norm.parameters()) for norm in own)
    return Block(reader.hidden, tuple(parts), norm_width, scaled)


@dataclass(frozen=True)
class _MatrixReader:
    """Reads the matrices of modules of one model.

    Attributes:
        active: experts that compute a token; None if the configuration does not say.
        ends: ids of the parameters of embedding and head.
        in_blocks: ids of the parameters of the blocks.
    """

    hidden: int
    active: int | None
    ends: frozenset[int]
    in_blocks: frozenset[int]

    def matrices(self, root: nn.Module) -> Iterator[Matrix]:
        """Yield the matrices of a module, their paths within it."""
        for path, module in root.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2 and "bias" not in name:
                    full = path if name == "weight" else f"{path}.{name}".lstrip(".")
                    yield self._matrix(full, module, parameter)

    def _matrix(self, path: str, module: nn.Module, parameter: nn.Parameter) -> Matrix:
        from torch import nn

        place = {
            "in_block": id(parameter) in self.in_blocks,
            "is_end": id(parameter) in self.ends,
        }
        first, second, *third = parameter.shape
        if third and "Expert" in type(module).__name__:
            if self.active is None:
                raise ValueError(
                    "num_experts_per_tok is not set: how many experts compute a token?"
                )
            # Stacked; in some families (experts, inputs, outputs), in others the other way round.
            inner = third[0] if second == self.hidden else second
            down = "down" in path or "output" in path
            inputs, outputs = (inner, self.hidden) if down else (self.hidden, inner)
            active = min(self.active, first)
            return Matrix(
                path,
                inputs,
                outputs,
                False,
                experts=first,
                active=active,
                **place,
            )
        if type(module).__name__ == "Conv1D":  # GPT-2's linear layer
            return Matrix(path, first, second, **place)
        if isinstance(module, nn.Embedding):
            return Matrix(path, second, first, False, table=True, **place)
        inputs = parameter.numel() // first
        return Matrix(path, inputs, first, isinstance(module, nn.Linear), **place)


# ---------------------------------------------------------------- public models

# From each model's public config.json, so that a plan needs neither network nor file.
_CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).with_name("known_models.json")).read_text(encoding="utf-8")
)
KNOWN_MODELS = tuple(_CONFIGS)


def known_config(name: str) -> dict[str, Any] | None:
    """Return the configuration of a public model, `-Base` and `-Instruct` included; None for an
    unknown one.
    """
    return _CONFIGS.get(name.removesuffix("-Instruct").removesuffix("-Base"))
