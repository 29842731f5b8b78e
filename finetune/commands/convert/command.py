"""`python -m finetune convert`: a run of LLaMA-Factory, TRL, Axolotl or ms-swift as a run file of
ours.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field

from finetune.commands.convert.draft import Draft, convert
from finetune.commands.convert.read import read_run
from finetune.config.fields import HUB_PREFIXES, PathOption, Text, ordered_fields, setting
from finetune.config.kinds import RunKind, run_kind
from finetune.config.options import Options, read_options
from finetune.config.resolution import resolve_object
from finetune.config.run_config import RunConfig
from finetune.data.preference.reader import reader_of
from finetune.data.reading.files import expand_sources
from finetune.data.report import RecordProblem
from finetune.errors import ConfigError, ExitCode, FinetuneError
from finetune.plain_text import mask_secrets
from finetune.storage import durable_files

_WIDTH = 118
# Options that hold a secret by their name, of any tool and also where they are keys of a value.
_SECRET = re.compile(r"(?i)(?:^|[_\W])(?:api[_-]?key|token|secret|password|webhook_url)$")
_SECTIONS = {
    "no counterpart, and it changes what is trained": "unsupported",
    "means something else here": "different",
    "no counterpart; it only says how a run is executed": "harmless",
}
_TOKENS_OF_TEXT = ("eos_token", "pad_token", "bos_token", "unk_token")


class ConvertOptions(Options):
    usage: ClassVar[str] = "python -m finetune convert RUN [--flag value ...]"
    summary: ClassVar[str] = (
        "Writes the run file of a run of LLaMA-Factory, TRL, Axolotl or ms-swift: a YAML file, a"
        " shell script,\nor a command line in quotes. What has no counterpart, or means something"
        " else here, is named."
    )
    epilog: ClassVar[str] = "Exit code: 0 written; 2 refused, nothing written."
    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: Text = setting(
        group="options", unit="FILE|COMMAND", description="The run, or - for standard input."
    )
    origin: Literal["llamafactory", "llamafactory-v1", "trl", "axolotl", "ms-swift"] | None = (
        setting(
            None,
            alias="from",
            group="options",
            shown_default="recognised",
            description="The tool that the run is for.",
        )
    )
    devices: Annotated[int, Field(ge=1)] | None = setting(
        None,
        group="options",
        unit="N",
        shown_default="the launcher's number, or 1",
        description="Devices that the run was on: their samples make the global batch.",
    )
    output: PathOption | None = setting(
        None,
        group="output",
        unit="FILE",
        shown_default="standard output",
        description="New run file; never overwritten.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(ConvertOptions, arguments)
    if options.output is not None and durable_files.is_taken(options.output):
        raise ConfigError(
            "the file exists, and nothing is overwritten", str(options.output), "name a new file"
        )
    tool, given, source, processes = read_run(options.run, options.origin)
    devices = options.devices or processes or 1
    try:
        draft = convert(tool, given, devices)
    # a word where a number belongs, a text for a list
    except (TypeError, ValueError, AttributeError) as error:
        what = f"an option has a value that {tool.title} does not take: {mask_secrets(str(error))}"
        raise ConfigError(
            what, source, f"see whether {tool.title} itself starts with it"
        ) from error
    if processes not in (None, devices):
        draft.note("the launcher's processes", processes, f"--devices {devices} is what counts")
    draft.settings.setdefault("output_dir", "runs/converted")
    # Validate the run file now, so that errors are reported here and not when the run starts.
    kind = run_kind(draft.settings)
    config = resolve_object(draft.settings, devices, kind.config_class).config
    sections = list(_sections(draft))
    text = _run_file(f"{tool.title}: {source}", kind, draft.settings, sections)
    if options.output is None:
        sys.stdout.write(text)
    else:
        durable_files.write_new(options.output, text.encode())
    for title, lines in sections:
        sys.stderr.write("\n".join([f"{title}:", *(f"  {line}" for line in lines), ""]))
    start = f"; start it: python -m {kind.module} --config {options.output}"
    if options.output is None:
        start = ""
    if problem := data_problem(config):
        sys.stderr.write(
            f"[WARNING] converted from {tool.title}, and a start would be refused:\n{problem}\n"
        )
    else:
        sys.stderr.write(f"[SUCCESS] converted from {tool.title}{start}\n")
    return int(ExitCode.DONE)


def data_problem(config: RunConfig) -> str | None:
    """Return why a start would refuse the run's data; None if nothing is known against it.

    Files and folders are looked up from here, and the first records of each are read. Data sets of
    a hub are not: a start downloads them.
    """
    sources = [
        source
        for source in (*config.sources, *config.valid_sources)
        if not source.path.startswith(HUB_PREFIXES)
    ]
    try:
        for file in expand_sources(sources) if sources else ():
            reader = reader_of(config.preference_form)(
                None, config.difficulty_field, file.source, config.on_media
            )
            found = [found for _, _, found in itertools.islice(reader.file(file.path), 100)]
            if found and all(isinstance(each, RecordProblem) for each in found):
                return f"{file.path}: {found[0]}"
    except FinetuneError as error:
        return str(error)
    return None


def _sections(draft: Draft) -> Iterable[tuple[str, list[str]]]:
    """Yield the sections to print, most important first: a title, and a line for each option."""
    for title, kind in _SECTIONS.items():
        lines = [
            f"{name} {_shown(_without_secrets(name, value))}: {reason}"
            for name, value, reason in draft.named[kind]
        ]
        if lines:
            yield title, list(dict.fromkeys(lines))


def _without_secrets(name: str, value: Any) -> Any:
    if _SECRET.search(name) and name not in _TOKENS_OF_TEXT:
        return "(not shown)"
    if isinstance(value, dict):
        return {key: _without_secrets(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets("", inner) for inner in value]
    return value


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    text = mask_secrets(" ".join(text.split()))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _run_file(
    source: str, kind: RunKind, values: dict[str, Any], sections: list[tuple[str, list[str]]]
) -> str:
    lines = [f"# From {source}. Start it: python -m {kind.module} --config THIS_FILE"]
    for title, named in sections:
        lines += ["#", f"# {title[0].upper()}{title[1:]}:", *(f"#   {line}" for line in named)]
    ordered = {
        name: values[name]
        for name in ("kind", *ordered_fields(kind.config_class))
        if name in values
    }
    return (
        "\n".join(lines)
        + "\n"
        + yaml.safe_dump(
            ordered,
            sort_keys=False,
            allow_unicode=True,
            width=_WIDTH,
        )
    )
