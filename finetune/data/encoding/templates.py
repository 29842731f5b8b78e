"""Chat templates by name, and the tokenizer with the template that a run uses.

The templates below are written by us after the public prompt formats of the model families they are
named for. They cover what training needs (system, user, assistant turns); where a family has no
system turn, the system text is put before the first question. A model's own template is better
where it has one.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import jinja2
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from finetune.config.fields import did_you_mean
from finetune.config.paths import near_folder, split_revision
from finetune.data.report import first_line
from finetune.errors import DataError

logger = logging.getLogger("finetune")

_CHATML_TURNS = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# Of the others none writes tools' results as its family does: such a record needs the model's own
# template.
_NO_TOOL_TURNS = (
    "{%- if messages | selectattr('role', 'equalto', 'tool') | list -%}"
    "{{ raise_exception('this template has no turns of tools: use the one of the model') }}"
    "{%- endif -%}"
)

# Sets `system` and `turns`, and puts the system text before the first question.
_SYSTEM_INTO_QUESTION = (
    "{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else ''"
    " -%}{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages -%}"
)

_WITHOUT_TOOLS: dict[str, str] = {
    "qwen": (
        "{%- if messages[0]['role'] != 'system' -%}{{ '<|im_start|>system\\nYou are Qwen, created"
        " by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}{%- endif -%}"
        + _CHATML_TURNS
    ),
    "llama3": (
        "{{ bos_token }}{%- for message in messages -%}{{ '<|start_header_id|>' + message['role'] +"
        " '<|end_header_id|>\\n\\n' }}{{ message['content'] | trim + '<|eot_id|>' }}{%- endfor"
        " -%}{%- if add_generation_prompt -%}{{"
        " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"
    ),
    "mistral": (
        _SYSTEM_INTO_QUESTION + "{{ bos_token }}"
        "{%- for message in turns -%}"
        "{%- if message['role'] == 'user' -%}"
        "{{ '[INST] ' + (system if loop.first else '') + message['content'] + '[/INST]' }}"
        "{%- else -%}{{ ' ' + message['content'] | trim + eos_token }}{%- endif -%}"
        "{%- endfor -%}"
    ),
    "gemma": (
        _SYSTEM_INTO_QUESTION + "{{ bos_token }}"
        "{%- for message in turns -%}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' }}"
        "{{ (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
    ),
    "deepseek": (
        "{{ bos_token }}"
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'system' -%}{{ message['content'] }}"
        "{%- elif message['role'] == 'user' -%}{{ '<｜User｜>' + message['content'] }}"
        "{%- else -%}{{ '<｜Assistant｜>' + message['content'] + eos_token }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}"
    ),
    "phi3": (
        "{%- for message in messages -%}"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
    ),
    # GLM-4 ends an answer with the token that opens the next question, so the last answer gets one
    # too.
    "glm4": (
        "{{ '[gMASK]<sop>' }}"
        "{%- for message in messages -%}"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
        "{%- if loop.last and message['role'] == 'assistant' -%}{{ '<|user|>' }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
    ),
    # Plain text and the tokenizer's own first and last token: for any base model. Llama, Mistral
    # and Gemma were never trained without their first token; other tokenizers have none, and
    # nothing is written.
    "alpaca": (
        "{{ bos_token }}{%- for message in messages -%}{%- if message['role'] == 'system' -%}{{"
        " message['content'] + '\\n\\n' }}{%- elif message['role'] == 'user' -%}{{ '###"
        " Instruction:\\n' + message['content'] + '\\n\\n' }}{%- else -%}{{ '### Response:\\n' +"
        " message['content'] + eos_token + '\\n\\n' }}{%- endif -%}{%- endfor -%}{%- if"
        " add_generation_prompt -%}{{ '### Response:\\n' }}{%- endif -%}"
    ),
    "vicuna": (
        "{{ bos_token }}"
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'system' -%}{{ message['content'] + ' ' }}"
        "{%- elif message['role'] == 'user' -%}{{ 'USER: ' + message['content'] + ' ' }}"
        "{%- else -%}{{ 'ASSISTANT: ' + message['content'] | trim + eos_token }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}"
    ),
}

TEMPLATES = {"chatml": _CHATML_TURNS} | {
    name: _NO_TOOL_TURNS + source for name, source in _WITHOUT_TOOLS.items()
}


def template_source(template: str) -> str:
    """Return the text of a template given by name or as a file.

    Raises:
        DataError: neither a known name nor a readable file, or not valid Jinja.
    """
    known = ", ".join(sorted(TEMPLATES))
    if template in TEMPLATES:
        return TEMPLATES[template]
    path = Path(template).expanduser()
    if not path.is_file():
        raise DataError(
            f"{template!r} is neither a template's name nor a"
            f" file{did_you_mean(template, TEMPLATES)}",
            where="--template",
            fix=f"use one of {known}, or a file with a Jinja chat template",
        )
    try:
        source = path.read_text(encoding="utf-8")
        # `{% generation %}` is transformers' own tag, which plain Jinja does not know.
        plain = re.sub(r"{%-? (end)?generation -?%}", "", source)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
        line = f":{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise DataError(
            f"the chat template cannot be read: {error}",
            where=f"{path}{line}",
            fix="correct the Jinja template",
        ) from error
    return source


def load_tokenizer(
    model: str, template: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, local files first, and set the chat template of the run.

    The template is set on the tokenizer, so `save_pretrained` writes it next to the adapter and
    chat reads the same template. A tokenizer without padding token pads with its end token. Masks
    use positions, so the end token is still learned, and no embedding is added. HF_ENDPOINT,
    HF_HUB_OFFLINE and HF_HOME work as in transformers.

    Args:
        model: a folder or a hub id.
        template: a name from `TEMPLATES` or a Jinja file; None: the tokenizer's own.
        trust_remote_code: whether code from the model repository may run.

    Raises:
        DataError: the model has no tokenizer, the template is unknown, or there is no template.
    """
    tokenizer = read_tokenizer(model, trust_remote_code=trust_remote_code)
    if template is not None:
        tokenizer.chat_template = template_source(template)
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template",
            where=model,
            fix=(
                f"pass --template with one of {', '.join(sorted(TEMPLATES))}, or with a Jinja file;"
                " alpaca suits any base model"
            ),
        )
    if tokenizer.pad_token_id is None:
        stand_in = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        tokenizer.pad_token = stand_in
    tokenizer.model_stop_tokens = _stop_tokens(model, tokenizer)
    return tokenizer


def _stop_tokens(model: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the tokens of `eos_token_id` in the model's generation_config.json, if it has one
    here.
    """
    name, revision = split_revision(model)
    folder = Path(model).expanduser()
    try:
        settings = GenerationConfig.from_pretrained(
            str(folder) if folder.is_dir() else name,
            revision=revision or "main",
            local_files_only=True,
        )
    except (OSError, ValueError):
        return ()
    ids = settings.eos_token_id
    listed = [ids] if isinstance(ids, int) else ids or []
    return tuple(token for token in tokenizer.convert_ids_to_tokens(listed) if token is not None)


def read_tokenizer(model: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id as it is, with or without chat template.

    Raises:
        DataError: no tokenizer there, or one that cannot be loaded.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _from_folder(folder, trust_remote_code)
    is_path = folder.is_absolute() or model.startswith((".", "~"))
    if is_path or model.partition("@")[0].count("/") > 1:
        raise DataError(
            "no such model folder",
            where=model,
            fix="give --model a folder or a hub id (owner/name)",
        )
    name, revision = split_revision(model)
    near = near_folder(name)
    given = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, **given)
    except (OSError, ValueError, KeyError):
        logger.info("the tokenizer of %s is not on this machine; asking the hub", model)
    try:
        return AutoTokenizer.from_pretrained(name, **given)
    except (OSError, ValueError, KeyError) as error:
        endpoint = os.environ.get("HF_ENDPOINT", "the default hub")
        raise DataError(
            f"the tokenizer cannot be loaded: {first_line(error)}",
            where=f"{model} ({endpoint}){near}",
            fix="check the name, or give --model a local folder; HF_ENDPOINT names a mirror",
        ) from error


def _from_folder(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder."""
    patterns = ("tokenizer*", "vocab*", "*.py")
    if not any(any(folder.glob(pattern)) for pattern in patterns):
        raise DataError(
            "the model folder has no tokenizer (no tokenizer.json or tokenizer.model)",
            where=str(folder),
            fix="copy the tokenizer files of the model into the folder",
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    # the tokenizers library raises bare Exception for a broken tokenizer.json
    except Exception as error:
        raise DataError(
            f"the tokenizer cannot be loaded: {first_line(error)}",
            where=str(folder),
            fix=(
                "check the tokenizer files; a tokenizer with its own code needs --trust-remote-code"
            ),
        ) from error
