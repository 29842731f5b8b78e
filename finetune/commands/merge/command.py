"""`python -m finetune merge`: an adapter into its base model, tested, with a model card; the folder
is there whole or not at all.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.commands.merge.options import MergeOptions
from finetune.config.options import read_options
from finetune.errors import INTERRUPTED, ConfigError, ExitCode, FinetuneError, StateError
from finetune.storage import durable_files
from finetune.storage.run_folder import reopen

if TYPE_CHECKING:
    from finetune.commands.merge.self_test import SelfTest
    from finetune.inference.loading import Source

logger = logging.getLogger("finetune")

LARGEST_CONTEXT = 8192  # tokens, where the run was not of longer ones


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: merged and tested; 1: failed, and nothing is left; 2: refused before that;
    130: interrupted.
    """
    options = read_options(MergeOptions, argv)
    output = options.output_dir.expanduser()
    _check_output(output)
    from finetune.runtime.launch_environment import probe_torch_npu
    from finetune.storage.run_log import setup_console, success

    setup_console(0)
    probe_torch_npu()
    from finetune.inference.loading import find_source

    source = find_source(options.model, options.adapter)
    if options.format == "gguf":
        from finetune.commands.merge.gguf import check_architecture, check_end, find_converter

        find_converter(options.llama_cpp)
        check_architecture(source.base, options)
        check_end(source, options)
    try:
        publish(source, output, options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing is left\n")
        return INTERRUPTED
    success(f"merged, output in {output}")
    return int(ExitCode.DONE)


def _check_output(folder: Path) -> None:
    """Raise StateError unless a folder can be put there: the name is free, or an empty folder has
    it.
    """
    taken = durable_files.is_taken(folder)
    if taken and (folder.is_symlink() or not folder.is_dir() or os.listdir(folder)):
        raise StateError(
            "the output folder is there already and not empty",
            str(folder),
            "name a new folder; nothing is overwritten",
        )
    parent = folder.resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StateError(
            "the output folder cannot be made: no permission",
            str(parent),
            "choose another --output-dir",
        )


def publish(source: Source, output: Path, options: MergeOptions) -> None:
    """Write the merged model beside its final name, test it, and give it its name.

    Raises:
        ConfigError, DataError: files that do not fit, or an adapter that cannot be merged.
        FinetuneError: the self-test failed, or the disk is full; nothing is left.
    """
    from finetune.commands.merge.merging import merge_into

    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = output.parent / f".merging-{os.getpid()}-{output.name}"
    durable_files.remove_tree(staging, missing_ok=True)
    staging.mkdir()
    try:
        test = merge_into(staging, source, options, name=output.name)
        if options.format == "gguf":
            make_gguf(staging, source, options, name=output.name, test=test)
        for path in sorted(staging.iterdir()):
            durable_files.share_file(path)
            durable_files.sync_file(path)
            reopen(path)
        durable_files.sync_folder(staging)
        _give_name(staging, output)
    except Exception as error:
        failure = durable_files.os_error_in(error)  # safetensors has its own kind for a full disk
        if failure is None:
            raise
        raise FinetuneError(
            f"the merged model cannot be written: {failure.strerror or failure}",
            str(output),
            "free some space, or choose another --output-dir",
        ) from error
    finally:
        durable_files.remove_tree(staging, missing_ok=True)


def make_gguf(
    folder: Path, source: Source, options: MergeOptions, *, name: str, test: SelfTest
) -> None:
    """Put a tested GGUF file, its Modelfile and its card in the place of a merged folder's files.

    Raises:
        FinetuneError: the converter or the test failed.
    """
    from transformers import AutoConfig

    from finetune.commands.merge import gguf
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
    gguf.name_end(folder, tokenizer, ends)
    dtype = str(config.dtype).removeprefix("torch.")
    gguf.convert(folder, gguf.find_converter(options.llama_cpp), dtype)
    facts, difference = gguf.check_gguf(folder, tokenizer, ends)
    begins = gguf.begins_prompts(facts) and tokenizer.bos_token is not None
    template = ChatTemplate(tokenizer)
    if begins and not writes_first(template, tokenizer.bos_token):
        logger.warning(
            f"the GGUF begins every prompt with {tokenizer.bos_token}, and the chat template does"
            " not: the model was not trained so (fix: --override-kv"
            " tokenizer.ggml.add_bos_token=bool:false of llama.cpp's server)"
        )
    modelfile = write_modelfile(
        template,
        file_name=gguf.FILE_NAME,
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
        folder, source, name=name, dtype=dtype, self_test=asdict(test), gguf_difference=difference
    )
    for path in folder.iterdir():
        if path.name not in gguf.KEPT:
            path.unlink()


def _context_tokens(config: Any, source: Source) -> int | None:
    """What Ollama is to keep room for: it takes the memory at once, and 128k tokens may be more
    than the weights.
    """
    from finetune.inference.loading import find_run

    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is None:
        return None
    run = find_run(source.adapter or Path(source.base))
    trained = run.settings.get("cutoff_len") if run is not None else None
    return min(most, max(LARGEST_CONTEXT, trained if isinstance(trained, int) else 0))


def _give_name(staging: Path, output: Path) -> None:
    try:
        # takes the place of an empty folder, and of nothing else
        durable_files.move(staging, output)
    except OSError as error:
        if not durable_files.is_taken(output):
            raise
        raise ConfigError(
            "something else has been put there meanwhile",
            str(output),
            "name a new folder; nothing is overwritten",
        ) from error
    durable_files.sync_folder(output.parent)
