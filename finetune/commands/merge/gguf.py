"""A merged folder as one GGUF file, by llama.cpp's own converter; read back by transformers' reader
and compared.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError, FinetuneError

if TYPE_CHECKING:
    from finetune.commands.merge.options import MergeOptions
    from finetune.commands.merge.self_test import SelfTest
    from finetune.inference.loading import Source

logger = logging.getLogger("finetune")

CONVERTER = "convert_hf_to_gguf.py"
FILE_NAME = "model.gguf"
OUT_TYPES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
}
KEPT = ("README.md", "chat_template.jinja", FILE_NAME, "Modelfile")
VARIABLE = "LLAMA_CPP"
LARGEST_CONTEXT = 8192  # tokens, where the run was not of longer ones


def find_converter(given: Path | None) -> Path:
    """Return llama.cpp's converter: the file or its folder, the variable LLAMA_CPP, or PATH.

    Raises:
        ConfigError: it is missing, or the package that reads GGUF is not installed.
    """
    if find_spec("gguf") is None:
        raise ConfigError(
            "GGUF files are checked with a package that is not installed",
            "--format",
            "pip install gguf",
        )
    named = given or os.environ.get(VARIABLE) or shutil.which(CONVERTER) or ""
    path = Path(named).expanduser()
    path = path / CONVERTER if path.is_dir() else path
    if named and path.is_file():
        return path.resolve()
    raise ConfigError(
        f"llama.cpp's {CONVERTER} is not there",
        str(named) or f"--llama-cpp, {VARIABLE}, PATH",
        "clone llama.cpp and name its folder with --llama-cpp",
    )


def make_gguf(
    folder: Path, source: Source, options: MergeOptions, *, name: str, test: SelfTest
) -> None:
    """Replace a merged folder's files by a tested GGUF file, its Modelfile and its card.

    Raises:
        FinetuneError: the converter or the test failed.
    """
    from transformers import AutoConfig

    from finetune.commands.merge.model_card import write_card
    from finetune.commands.merge.modelfile import write_modelfile, writes_first
    from finetune.data.encoding.render import stop_token_ids, trained_end_ids
    from finetune.data.encoding.spans import ChatTemplate
    from finetune.inference.loading import load_tokenizer_of

    tokenizer = load_tokenizer_of(
        source, options.template, trust_remote_code=options.trust_remote_code
    )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    ends = set(trained_end_ids(tokenizer))
    name_end(folder, tokenizer, ends)
    dtype = str(config.dtype).removeprefix("torch.")
    convert(folder, find_converter(options.llama_cpp), dtype)
    facts, difference = check_gguf(folder, tokenizer, ends)
    begins = begins_prompts(facts) and tokenizer.bos_token is not None
    template = ChatTemplate(tokenizer)
    if begins and not writes_first(template, tokenizer.bos_token):
        logger.warning(
            f"the GGUF begins every prompt with {tokenizer.bos_token}, and the chat template does"
            " not: the model was not trained so (fix: --override-kv"
            " tokenizer.ggml.add_bos_token=bool:false of llama.cpp's server)"
        )
    modelfile = write_modelfile(
        template,
        file_name=FILE_NAME,
        begins=begins,
        context_tokens=_context_tokens(config, source),
        ends=[str(tokenizer.convert_ids_to_tokens(end)) for end in stop_token_ids(tokenizer)],
    )
    if modelfile is None:
        logger.warning(
            "no template of Ollama's was shown to write what this chat template writes: there is no"
            " Modelfile (fix: serve the file with llama.cpp's server, which takes the chat template"
            " as it is)"
        )
    else:
        (folder / "Modelfile").write_text(modelfile, encoding="utf-8")
    write_card(
        folder,
        source,
        name=name,
        dtype=dtype,
        test=test,
        gguf_difference=difference,
    )
    for path in folder.iterdir():
        if path.name not in KEPT:
            path.unlink()


def _context_tokens(config: Any, source: Source) -> int | None:
    """Return the context for which Ollama allocates memory, at once: 128k tokens may take more than
    the weights.
    """
    from finetune.inference.loading import find_run

    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is None:
        return None
    run = find_run(source.adapter or Path(source.base))
    trained = run.settings.get("cutoff_len") if run is not None else 0
    return min(longest, max(LARGEST_CONTEXT, trained or 0))


def check_architecture(base: str, options: MergeOptions) -> None:
    """Raise ConfigError for models whose GGUF nothing here can read back."""
    from gguf import MODEL_ARCH_NAMES
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    from finetune.modeling.model_config import load_model_config

    kind = (
        load_model_config(base, trust_remote_code=options.trust_remote_code)
        .get_text_config()
        .model_type
    )
    name = _plain(kind.removesuffix("_text"))
    read_back = {_plain(known) for known in (*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS)}
    # which is written as a llama
    written = {_plain(known) for known in MODEL_ARCH_NAMES.values()} | {"mistral"}
    if name not in read_back & written:
        raise ConfigError(
            f"a GGUF of a {kind} cannot be read back here, so it could not be tested",
            base,
            "merge without --format gguf, and convert the folder with llama.cpp's own tools",
        )


def check_end(source: Source, options: MergeOptions) -> None:
    """Raise ConfigError where the template writes the EOS, and another token ends answers: a GGUF
    has one for both.
    """
    from finetune.data.encoding.render import trained_end_ids
    from finetune.inference.loading import load_tokenizer_of

    tokenizer = load_tokenizer_of(
        source, options.template, trust_remote_code=options.trust_remote_code
    )
    ends, template = trained_end_ids(tokenizer), str(tokenizer.chat_template)
    if ends and tokenizer.eos_token_id not in ends and "eos_token" in template:
        raise ConfigError(
            f"the chat template writes {tokenizer.eos_token} as eos_token, and ends answers with"
            " another token: a GGUF would lose one of them",
            source.name,
            "merge without --format gguf; or write the token itself into the chat template, in the"
            " place of eos_token",
        )


def _plain(name: str) -> str:
    """llama.cpp's qwen35moe is transformers' qwen3_5_moe."""
    return name.replace("_", "").replace("-", "")


def name_end(folder: Path, tokenizer: Any, ends: set[int]) -> None:
    """Call the token that ends an answer the folder's EOS, before it is converted.

    The converter takes EOS from there and no other end, and a base's own (<|endoftext|>) ends
    documents.
    """
    if not ends or tokenizer.eos_token_id in ends:
        return
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["eos_token"] = tokenizer.convert_ids_to_tokens(min(ends))
    path.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


def convert(folder: Path, converter: Path, dtype: str) -> Path:
    """Write the GGUF file of a folder into it.

    Raises:
        FinetuneError: the converter failed; with its own last words.
    """
    target = folder / FILE_NAME
    words = [
        sys.executable,
        str(converter),
        str(folder),
        "--outfile",
        str(target),
        "--outtype",
        OUT_TYPES[dtype],
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        words, capture_output=True, encoding="utf-8", errors="replace", env=environment, check=False
    )  # fmt: skip
    if done.returncode != 0 or not target.is_file():
        raise FinetuneError(
            f"llama.cpp's converter failed: {_why(done)}",
            str(converter),
            "merge without --format gguf; a newer llama.cpp may know this model or its tokenizer",
        )
    return target


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """Return how the converter ended, and its own last words."""
    ended = f"exit code {done.returncode}" if done.returncode else "wrote no file"
    if done.returncode < 0:
        ended = f"ended by {signal.Signals(-done.returncode).name}"
    last_words = f"{done.stdout}\n{done.stderr}".strip().splitlines()[-1:]
    return ": ".join([ended, *(line.strip()[:300] for line in last_words)])


def begins_prompts(facts: dict[str, Any]) -> bool:
    """Return whether llama.cpp puts BOS before a text; if the file does not specify it, only before
    SentencePiece's.
    """
    return bool(
        facts.get("tokenizer.ggml.add_bos_token", facts.get("tokenizer.ggml.model") == "llama")
    )


def check_gguf(folder: Path, tokenizer: Any, ends: set[int]) -> tuple[dict[str, Any], float]:
    """Compare the GGUF file with the merged model next to it.

    Compared are logits, settings, template, tokens and end.

    Args:
        ends: tokens that the template ends an answer with.

    Returns:
        The metadata of the file without its tokens, and the distance of the logits.

    Raises:
        FinetuneError: one of them differs.
    """
    from finetune.commands.merge.self_test import (
        TOLERANCES,
        distance,
        load_written,
        logits,
        self_test_prompts,
    )

    facts = _metadata(folder / FILE_NAME)
    if facts.get("tokenizer.chat_template") != tokenizer.chat_template:
        raise _failed("its chat template is not the run's")
    tokens = facts.pop("tokenizer.ggml.tokens", [])
    ours = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), len(tokens)))))
    if len(tokens) < len(tokenizer) or list(tokens[: len(ours)]) != ours:
        place = next(
            (n for n, (a, b) in enumerate(zip(tokens, ours, strict=False)) if a != b), len(tokens)
        )
        raise _failed(f"token {place} is another one than the tokenizer's")
    known = {facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    if ends and not ends & known:
        raise _failed("it does not know the token that ends an answer")
    merged = load_written(folder)
    _check_settings(folder / FILE_NAME, facts, merged.config.get_text_config())
    prompts, config = self_test_prompts(merged, tokenizer), merged.config
    expected = logits(merged, prompts)
    del merged
    # With the folder's settings: transformers does not read all that the file has, rope scaling for
    # one.
    apart = distance(
        logits(load_written(folder, gguf_file=FILE_NAME, config=config), prompts), expected
    )
    if not apart <= TOLERANCES["float32"]:
        raise _failed(f"its logits differ from the merged model's by {apart:.1e} of their norm")
    return facts, apart


def _check_settings(path: Path, facts: Mapping[str, Any], config: Any) -> None:
    """Compare the sizes and positions in the file with the merged model's settings."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    rope = getattr(config, "rope_parameters", None) or {}
    own = {**config.to_dict(), "rope_theta": rope.get("rope_theta")}
    stated = load_gguf_checkpoint(path)["config"]
    for name in stated.keys() & own.keys():
        value, ours = stated[name], own[name]
        is_size = {type(value), type(ours)} <= {int, float} and not name.endswith(
            ("_id", "vocab_size")
        )
        if is_size and not math.isclose(value, ours, rel_tol=1e-6):
            raise _failed(f"{name} is {value:g}, in the merged model {ours:g}")
    scaled = facts.get(f"{facts['general.architecture']}.rope.scaling.type", "none")
    if (kind := rope.get("rope_type")) in ("linear", "yarn") and scaled != kind:
        raise _failed(f"it scales positions by {scaled}, the merged model by {kind}")


def _metadata(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    left_out = ("tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")
    return {
        name: field.contents()
        for name, field in GGUFReader(path).fields.items()
        if name not in left_out
    }


def _failed(what: str) -> FinetuneError:
    return FinetuneError(
        f"self-test of the GGUF failed: {what}",
        FILE_NAME,
        "merge without --format gguf; report this",
    )
