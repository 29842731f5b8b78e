"""`python -m finetune verify`: whether a deployment answers as the model that was trained, and if
not, where it first differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from finetune.commands.verify.options import VerifyOptions
from finetune.config.options import asks_for_json, read_options
from finetune.errors import INTERRUPTED, ConfigError, ExitCode, FinetuneError, Problems
from finetune.plain_text import plain_lines
from finetune.runtime.language import _


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0: the deployment is right; 1: it differs, or failed; 2: refused before;
    130: interrupted.
    """
    words = sys.argv[1:] if argv is None else argv
    as_json = asks_for_json(VerifyOptions, words)
    try:
        options = read_options(VerifyOptions, words)
        from finetune.runtime.launch_environment import probe_torch_npu
        from finetune.storage.run_log import setup_console

        setup_console(0)
        probe_torch_npu()
        report = verify(options)
    except FinetuneError as error:
        if as_json:
            _write_error(error, int(error.exit_code))
        raise
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        if as_json:
            error = FinetuneError("interrupted", "verify", "start it again; nothing was written")
            _write_error(error, INTERRUPTED)
        return INTERRUPTED
    if as_json:
        _write(report)
    else:
        sys.stdout.write(_text(report))
    return int(ExitCode.FAILED if report["findings"] else ExitCode.DONE)


def _write_error(error: FinetuneError, exit_code: int) -> None:
    report = {**_fields(error), "exit_code": exit_code}
    if isinstance(error, Problems):
        report["problems"] = list(map(_fields, error.problems))
    _write({"error": report, "findings": []})


def _fields(error: FinetuneError) -> dict[str, Any]:
    return {
        "what": error.what,
        "where": error.where,
        "fix": error.fix,
    }


def _write(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def verify(options: VerifyOptions) -> dict[str, Any]:
    """Replay and compare; the report as plain JSON.

    Raises:
        ConfigError, DataError: no such model, data or deployment.
        FinetuneError: the deployment failed while it was asked.
    """
    import torch

    from finetune.commands.verify.comparison import ask, compare, refusals
    from finetune.commands.verify.conversations import choose, validation_files
    from finetune.commands.verify.reference import Reference
    from finetune.inference.loading import find_source, load_tokenizer_of
    from finetune.runtime import device as devices

    source = find_source(options.model, options.adapter)
    files = list(options.data) or validation_files(source)
    device = torch.device(devices.choose_device_type(options.device_type))
    trust = options.trust_remote_code
    tokenizer = load_tokenizer_of(source, options.template, trust_remote_code=trust)
    dtype = devices.choose_dtype(options.dtype, device.type)
    reference = Reference(source, tokenizer, device, dtype, trust)
    prompts = choose(files, reference.template, options.prompts, _room(options, reference.config))
    if options.merged is not None:
        from finetune.commands.verify.merged import MergedFolder

        deployment: Any = MergedFolder(options.merged.expanduser(), device, trust_remote_code=trust)
    else:
        from finetune.commands.verify.endpoint import Endpoint

        assert options.endpoint is not None
        deployment = Endpoint(
            options.endpoint,
            options.served_model,
            key_variable=options.api_key_variable,
            timeout_seconds=options.timeout_seconds,
        )
    replays = ask(deployment, prompts, options.max_new_tokens)
    head = {"deployment": {"name": deployment.name, **deployment.facts}, "model": source.name}
    del deployment  # and a folder's model with it
    refused = [one for one in replays if one.response.finish == "refused"]
    answered = [one for one in replays if one.response.finish != "refused"]
    report: dict[str, Any] = {
        "same": 0,
        "compared": {"answers": 0},
        "findings": [],
    }
    if answered:  # else no model is loaded
        expected = options.deployed_dtype
        expected = reference.base_dtype if expected == "auto" else expected
        report = compare(reference, answered, options.max_new_tokens, expected)
    report["findings"] = [*refusals(refused), *report["findings"]]
    return {
        **head,
        "prompts": len(replays),
        **report,
    }


def _room(options: VerifyOptions, config: Any) -> int | None:
    """Maximum tokens of a prompt, so that its answer has room; None if the model has no limit.

    Raises:
        ConfigError: --context-tokens leaves none.
    """
    max_context = getattr(config.get_text_config(), "max_position_embeddings", None)
    context = options.context_tokens or max_context
    if context is not None and context <= options.max_new_tokens:
        raise ConfigError(
            f"a context of {context} tokens has no room for prompts beside {options.max_new_tokens}"
            " of answers",
            "--context-tokens",
            "raise it, or lower --max-new-tokens",
        )
    return None if context is None else context - options.max_new_tokens


def _text(report: dict[str, Any]) -> str:
    compared, total = report["compared"], report["prompts"]
    kinds = {
        "token_ids": _("token ids of prompts"),
        "prompt_lengths": _("lengths of prompts"),
        "answers": _("greedy answers"),
        "logprobs": _("log-probabilities"),
    }
    said = ", ".join(text for name, text in kinds.items() if compared.get(name))
    count = compared["answers"]
    lines = (
        [_("compared on {count} conversations: {what}").format(count=count, what=said)]
        if count
        else []
    )
    if report["deployment"].get("reasoning"):
        lines.append(
            _(
                "the server gives thoughts apart from answers: for this comparison they were put"
                " back"
            )
        )
    if not report["findings"]:
        lines.append(_("the deployment answers as the trained model"))
    if not report.get("shows_adapter", True):
        lines.append(
            _(
                "but so would the base: the adapter changes too little here; ask more with"
                " --prompts or --data"
            )
        )
    for finding in report["findings"]:
        detail = f" ({finding['detail']})" if finding["detail"] else ""
        lines += ["", f"{finding['name']}: {finding['what']}{detail}"]
        lines += [f"  {line}" for line in finding["evidence"]]
        differ = _("{wrong} of {count} conversations differ").format(
            wrong=len(finding["prompts"]), count=total
        )
        lines += [f"  {differ}", _("  mend: {mend}").format(mend=finding["mend"])]
    # Answers come from another machine: nothing of them moves a terminal.
    return "".join(plain_lines(line) + "\n" for line in lines)
