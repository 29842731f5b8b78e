"""`python -m finetune verify`: whether a deployment answers as the model that was trained, and if
not, why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune.commands.verify.options import VerifyOptions
from finetune.config.options import asks_for_json, read_options
from finetune.errors import INTERRUPTED, ConfigError, ExitCode, FinetuneError, Problems
from finetune.plain_text import plain_lines
from finetune.runtime.language import _

if TYPE_CHECKING:
    from finetune.commands.verify.evidence import Deployment, Finding, Replay
    from finetune.commands.verify.reference import Reference


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: the deployment is right; 1: it differs, or failed; 2: refused before; 130:
    interrupted.
    """
    words = sys.argv[1:] if argv is None else argv
    as_json = asks_for_json(VerifyOptions, words)
    try:
        return _main(words)
    except FinetuneError as error:
        if as_json:
            _write_error(error, int(error.exit_code))
        raise
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        if as_json:
            _write_error(
                FinetuneError("interrupted", "verify", "start it again; nothing was written"),
                INTERRUPTED,
            )
        return INTERRUPTED


def _main(words: Sequence[str]) -> int:
    options = read_options(VerifyOptions, words)
    from finetune.runtime.launch_environment import probe_torch_npu
    from finetune.storage.run_log import setup_console

    setup_console(0)
    probe_torch_npu()
    report = verify(options)
    if options.as_json:
        _write(report)
    else:
        sys.stdout.write(_text(report))
    return int(ExitCode.FAILED if report["findings"] else ExitCode.DONE)


def _told(error: FinetuneError) -> dict[str, Any]:
    return {"what": error.what, "where": error.where, "fix": error.fix}


def _write_error(error: FinetuneError, exit_code: int) -> None:
    problems = (
        {"problems": [_told(one) for one in error.problems]} if isinstance(error, Problems) else {}
    )
    _write({"error": {**_told(error), "exit_code": exit_code, **problems}, "findings": []})


def _write(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def verify(options: VerifyOptions) -> dict[str, Any]:
    """Replay and compare; the report as plain JSON.

    Raises:
        ConfigError, DataError: no such model, data or deployment.
        FinetuneError: the deployment failed while it was asked.
    """
    import torch

    from finetune.commands.verify.conversations import choose, validation_files
    from finetune.commands.verify.diagnosis import refusals
    from finetune.commands.verify.reference import Reference
    from finetune.commands.verify.replaying import ask
    from finetune.inference.loading import find_source, load_tokenizer_of
    from finetune.runtime import device as devices

    source = find_source(options.model, options.adapter)
    files = list(options.data) or validation_files(source)
    device = torch.device(devices.choose_device_type(options.device_type))
    tokenizer = load_tokenizer_of(
        source, options.template, trust_remote_code=options.trust_remote_code
    )
    dtype = devices.choose_dtype(options.dtype, device.type)
    reference = Reference(source, tokenizer, device, dtype, options.trust_remote_code)
    prompts = choose(files, reference.template, options.prompts, _room(options, reference))
    deployment = _deployment(options, device)
    asked = ask(deployment, prompts, options.max_new_tokens)
    name, facts = deployment.name, deployment.facts
    del deployment  # and a folder's model with it
    findings = refusals([one for one in asked if one.seen.finish == "refused"])
    report = _judged(options, reference, [one for one in asked if one.seen.finish != "refused"])
    findings += report.pop("findings", [])
    return {
        "deployment": {"name": name, **facts},
        "model": source.name,
        "prompts": len(asked),
        **report,
        "findings": [_as_json(finding) for finding in findings],
    }


def _judged(
    options: VerifyOptions, reference: Reference, answered: Sequence[Replay]
) -> dict[str, Any]:
    """What is reported of the conversations that were answered; without one no model is loaded."""
    if not answered:
        return {"same": 0, "compared": {"answers": 0}}
    from finetune.commands.verify.diagnosis import Diagnosis
    from finetune.commands.verify.judging import Judge
    from finetune.commands.verify.replaying import with_own

    expected = reference.base_dtype if options.deployed_dtype == "auto" else options.deployed_dtype
    replays = with_own(reference, answered, options.max_new_tokens)
    judge = Judge(reference, replays, options.max_new_tokens, expected)
    diagnosis = Diagnosis(judge, expected)
    findings, right = diagnosis.run()
    return {
        "same": sum(right.good),
        "compared": {
            "token_ids": sum(one.seen.prompt_ids is not None for one in replays),
            "prompt_lengths": sum(one.seen.prompt_tokens is not None for one in replays),
            "answers": len(replays),
            "logprobs": sum(one.seen.logprobs is not None for one in replays),
        },
        "deployed_dtype": expected,
        "tolerance": {"logprob": judge.tolerance.logprob, "gap": judge.tolerance.gap},
        "shows_adapter": not diagnosis.hides_adapter,
        "findings": findings,
    }


def _room(options: VerifyOptions, reference: Reference) -> int | None:
    """Most tokens of a prompt, so that its answer has room; None where the model has no limit.

    Raises:
        ConfigError: --context-tokens leaves none.
    """
    made_for = getattr(reference.config.get_text_config(), "max_position_embeddings", None)
    context = options.context_tokens or made_for
    if context is not None and context <= options.max_new_tokens:
        raise ConfigError(
            f"a context of {context} tokens has no room for prompts beside {options.max_new_tokens}"
            " of answers",
            "--context-tokens",
            "raise it, or lower --max-new-tokens",
        )
    return None if context is None else context - options.max_new_tokens


def _deployment(options: VerifyOptions, device: Any) -> Deployment:
    if options.merged is not None:
        from finetune.commands.verify.merged import MergedFolder

        return MergedFolder(
            options.merged.expanduser(), device, trust_remote_code=options.trust_remote_code
        )
    from finetune.commands.verify.endpoint import Endpoint

    assert options.endpoint is not None
    return Endpoint(
        options.endpoint,
        options.served_model,
        key_variable=options.api_key_variable,
        timeout_seconds=options.timeout_seconds,
    )


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "what": _(finding.what),
        "detail": finding.detail,
        "mend": _(finding.mend),
        "evidence": list(finding.evidence),
        "prompts": list(finding.prompts),
        "explains": finding.explained,
        **finding.extra,
    }


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
        if finding["explains"]:
            differ += "; " + _("with this fault {explained} are explained").format(
                explained=finding["explains"]
            )
        lines += [f"  {differ}", _("  mend: {mend}").format(mend=finding["mend"])]
    # Answers come from another machine: nothing of them moves a terminal.
    return "".join(plain_lines(line) + "\n" for line in lines)
