"""`python -m finetune merge`: an adapter into its base model, tested, with a model card; the folder is there whole or
not at all."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import ConfigError, ExitCode, FinetuneError, StateError
from finetune.inference.flags import with_dashes
from finetune.runtime.device import DEVICE_KINDS
from finetune.storage import durable_files

if TYPE_CHECKING:
    from finetune.inference.loading import Source

EXIT_CODES = "Exit code: 0 merged and tested; 1 failed, and nothing is left; 2 refused before that; 130 interrupted."
DESCRIPTION = """Merge a LoRA adapter into its base model: a folder that transformers and whatever serves its models
load without this package or peft. The folder is tested before it gets its name: its answers must be the adapter's."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit codes: see `EXIT_CODES`."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    output = Path(options.output_dir).expanduser()
    _check_output(output)
    from finetune.runtime.device import probe_torch_npu
    from finetune.storage.run_log import setup_console, success

    setup_console(0)
    probe_torch_npu()
    from finetune.inference.loading import find_source

    source = find_source(options.model, options.adapter)
    assert source.adapter is not None  # as --adapter is required
    try:
        publish(source, output, options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing is left\n")
        return 130
    success(f"merged, output in {output}")
    return int(ExitCode.DONE)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune merge", description=DESCRIPTION, epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.add_argument(
        "--adapter", required=True, metavar="FOLDER|ID", help="output or checkpoint of a LoRA run, or a hub id"
    )
    parser.add_argument("--model", metavar="FOLDER|ID", help="its base; default: the one that the adapter names")
    parser.add_argument("--output-dir", required=True, metavar="FOLDER", help="new folder for the merged model")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"), help="default: the base's own"
    )
    parser.add_argument(
        "--device-type", default="cpu", choices=("auto", *DEVICE_KINDS), help="where to compute; default: cpu"
    )
    parser.add_argument("--template", metavar="NAME|FILE", help="chat template, where the adapter has none of its own")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return parser.parse_args(with_dashes(arguments))


def _check_output(folder: Path) -> None:
    """Raise StateError unless a folder can be put there: the name is free, or an empty folder has it."""
    taken = durable_files.is_taken(folder)
    if taken and (folder.is_symlink() or not folder.is_dir() or os.listdir(folder)):
        raise StateError(
            "the output folder is there already and not empty", str(folder), "name a new folder; nothing is overwritten"
        )
    parent = folder.resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StateError("the output folder cannot be made: no permission", str(parent), "choose another --output-dir")


def publish(source: Source, output: Path, options: argparse.Namespace) -> None:
    """Write the merged model beside its place, test it, and give it its name.

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
        merge_into(
            staging,
            source,
            name=output.name,
            dtype=options.dtype,
            device_type=options.device_type,
            template=options.template,
            trust_remote_code=options.trust_remote_code,
        )
        for path in sorted(staging.iterdir()):
            durable_files.share_file(path)
            durable_files.sync_file(path)
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


def _give_name(staging: Path, output: Path) -> None:
    try:
        os.rename(staging, output)  # takes the place of an empty folder, and of nothing else
    except OSError as error:
        if not durable_files.is_taken(output):
            raise
        raise ConfigError(
            "something else has been put there meanwhile", str(output), "name a new folder; nothing is overwritten"
        ) from error
    durable_files.sync_folder(output.parent)
