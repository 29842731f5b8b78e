"""The faults that a deployment is tested for. One entry of `CAUSES` is all that a new one needs.

A fault of the prompt says what the model would have read instead, one of the weights which model
would have answered; what the trained model makes of that is compared with what the deployment
answered (`diagnosis`). A fault of the decoding is either of the same kind (a penalty), or seen in
the answers themselves (`diagnosis.SEEN_IN_ANSWERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from finetune.commands.verify import changes
from finetune.commands.verify.changes import AS_TRAINED, Change, Ids
from finetune.commands.verify.evidence import Prompt
from finetune.commands.verify.reference import Reference
from finetune.runtime.language import N_


@dataclass(frozen=True)
class Cause:
    """A fault: its name in JSON, what it is, how it is mended, and the forms it may have."""

    name: str
    what: str
    mend: str
    forms: Callable[[Reference], Iterable[Change]] | None = None


# In the order in which a deployment meets them; of two that explain the same, the first is named.
CAUSES = (
    Cause(
        "refused",
        N_("the deployment refuses conversations"),
        N_(
            "use the run's chat_template.jinja: the deployed one refuses what training has rendered"
        ),
    ),
    Cause(
        "bos_missing",
        N_("the prompt lacks the token that begins it (BOS)"),
        N_(
            "let the engine add BOS, or keep it in the template: add_bos_token,"
            " tokenizer.ggml.add_bos_token"
        ),
        changes.bos_missing,
    ),
    Cause(
        "bos_added",
        N_("the prompt begins with a BOS that training did not have, or with two"),
        N_(
            "take BOS out of the template or let the engine add none: send add_special_tokens false"
        ),
        changes.bos_added,
    ),
    Cause(
        "generation_prompt",
        N_("the prompt does not open the answer (no generation prompt)"),
        N_("render with add_generation_prompt=true; let the template write the assistant's header"),
        changes.no_generation_prompt,
    ),
    Cause(
        "system_left_out",
        N_("the system turn does not reach the model"),
        N_("use the run's chat_template.jinja: the deployed one leaves out the role system"),
        changes.system_left_out,
    ),
    Cause(
        "system_added",
        N_("the engine writes a system turn that training did not have"),
        N_("take the default system prompt out of the template, the Modelfile or the proxy"),
        changes.system_added,
    ),
    Cause(
        "history",
        N_("earlier turns of the conversation do not reach the model"),
        N_(
            "raise the context (num_ctx, --max-model-len, -c), and let the client and the template"
            " keep all turns"
        ),
        changes.history,
    ),
    Cause(
        "context_cut",
        N_("the beginning of long prompts is cut off"),
        N_(
            "raise the context: num_ctx, --max-model-len or -c to the longest conversation with its"
            " answer"
        ),
        changes.cut_front,
    ),
    Cause(
        "contents_trimmed",
        N_("white space around messages is cut off"),
        N_("use the run's chat_template.jinja: the deployed one, or the engine, trims contents"),
        changes.trimmed,
    ),
    Cause(
        "date",
        N_("the template writes today's date, training wrote a fixed one"),
        N_(
            "set the date that training used (26 Jul 2024) in the template or as its variable"
            " date_string"
        ),
        changes.date,
    ),
    Cause(
        "thinking",
        N_("the template's thinking is switched otherwise than in training"),
        N_("send or set chat_template_kwargs so that enable_thinking is as in training"),
        changes.thinking,
    ),
    Cause(
        "special_tokens_as_text",
        N_("the template's control tokens are read as plain text"),
        N_(
            "copy tokenizer.json and tokenizer_config.json of the run; let the engine parse special"
            " tokens"
        ),
        changes.specials_as_text,
    ),
    Cause(
        "template",
        N_("another chat template writes the prompt"),
        N_(
            "copy chat_template.jinja of the run beside the model, or pass it: --chat-template"
            " (vLLM), --chat-template-file (llama.cpp), TEMPLATE (Ollama)"
        ),
        changes.templates,
    ),
    Cause(
        "repetition_penalty",
        N_("a repetition penalty changes the greedy answer"),
        N_(
            "send repetition_penalty 1, and take it out of generation_config.json or the Modelfile"
            " (repeat_penalty 1)"
        ),
        changes.penalties,
    ),
    Cause(
        "adapter_left_out",
        N_("the base model answers: the adapter is not applied"),
        N_(
            "name the adapter in the request (vLLM: --lora-modules), or serve the folder that merge"
            " wrote"
        ),
        changes.no_adapter,
    ),
    Cause(
        "adapter_scale",
        N_("the adapter is applied with another strength"),
        N_("merge once, from the base, with the adapter's own lora_alpha, r and use_rslora"),
        changes.scales,
    ),
    Cause(
        "rope_scaling",
        N_("positions are scaled otherwise than in training"),
        N_(
            "serve with the rope parameters of the merged config.json: no --rope-scaling,"
            " --rope-freq-base or overrides"
        ),
        changes.rope,
    ),
    Cause(
        "dtype",
        N_("the weights have fewer bits than they are to have"),
        N_("serve with --dtype as trained, or merge again with merge --dtype"),
        changes.dtypes,
    ),
    Cause(
        "arithmetic",
        N_("the engine computes in fewer bits than it is to"),
        N_(
            "serve with --dtype float32, or accept its rounding: verify with --deployed-dtype as it"
            " is served"
        ),
        changes.arithmetic,
    ),
    Cause(
        "quantised",
        N_("the weights are quantised"),
        N_("serve unquantised weights, or accept it: this is what the quantisation changes"),
        changes.quantised,
    ),
    Cause(
        "reasoning_parser",
        N_("a reasoning parser takes text out of the answers that training has in them"),
        N_(
            "serve without it: no --reasoning-parser (vLLM, SGLang), --reasoning-format none"
            " (llama.cpp), think false (Ollama)"
        ),
    ),
    Cause(
        "end_ignored",
        N_("answers run on behind their end"),
        N_(
            "add the end of turn to eos_token_id of generation_config.json (merge writes it), or"
            " send it as stop"
        ),
    ),
    Cause(
        "stops_early",
        N_("answers end before their end"),
        N_(
            "take stop texts or extra eos ids out of the request, generation_config.json or the"
            " Modelfile"
        ),
    ),
    Cause(
        "answers_cut",
        N_("the server cuts answers off"),
        N_("raise its own limit: max_tokens, num_predict, or the context"),
    ),
    Cause(
        "not_greedy",
        N_("the answer to the same prompt changes: the server draws it, in spite of temperature 0"),
        N_("let the server take temperature 0: no sampling defaults that override the request"),
    ),
    Cause(
        "unknown",
        N_("the deployment differs, and no known cause explains it"),
        N_(
            "compare model, tokenizer and engine settings by hand; --merged FOLDER tells files from"
            " engine"
        ),
    ),
)
BY_NAME = {cause.name: cause for cause in CAUSES}


@dataclass(frozen=True)
class Hypothesis:
    """A fault in one of its forms, or two faults at once; without any it is the deployment as it
    should be.
    """

    causes: tuple[tuple[Cause, str], ...] = ()
    change: Change = AS_TRAINED

    def reads(self, prompt: Prompt) -> Ids:
        return prompt.ids if self.change.reads is None else self.change.reads(prompt)

    def joined(self, other: Hypothesis) -> Hypothesis:
        """A fault of the prompt and one behind it."""
        change = replace(other.change, reads=self.change.reads, opens=self.change.opens)
        return Hypothesis(self.causes + other.causes, change)


def hypotheses(reference: Reference, prompts: Sequence[Prompt]) -> list[Hypothesis]:
    """All forms of all faults that would change anything for these prompts, each once."""
    found: list[Hypothesis] = []
    known = {tuple(prompt.ids for prompt in prompts)}
    for cause in CAUSES:
        for change in cause.forms(reference) if cause.forms else ():
            if change.reads is not None:
                read = tuple(change.reads(prompt) for prompt in prompts)
                if read in known:
                    continue
                known.add(read)
                table = dict(zip([prompt.ids for prompt in prompts], read, strict=True))
                change = replace(change, reads=lambda prompt, table=table: table[prompt.ids])
            found.append(Hypothesis(((cause, change.detail),), change))
    return found
