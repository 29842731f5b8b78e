"""A model's folder as a deployment: transformers alone, with the folder's own settings, template
and tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jinja2
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from finetune.commands.verify.evidence import EngineResponse, Messages
from finetune.errors import ConfigError

GGUF = "model.gguf"  # of merge --format gguf
SHOWN_CHARACTERS = 200  # of a template's own message


class MergedFolder:
    """A folder that was merged, or copied, or converted.

    Raises:
        ConfigError: transformers cannot load it, or it has no chat template.
    """

    def __init__(self, folder: Path, device: torch.device, *, trust_remote_code: bool) -> None:
        self.name = folder.name
        if (folder / GGUF).is_file() and not list(folder.glob("*.safetensors")):
            fix = (
                f"serve it with llama.cpp (llama-server -m {GGUF}), and give the server's address"
                " to --endpoint"
            )
            raise ConfigError(
                "the folder holds a GGUF, which other engines run", str(folder / GGUF), fix
            )
        if not (folder / "config.json").is_file():
            raise ConfigError(
                "no model is there (no config.json)",
                str(folder),
                "name the folder that merge wrote",
            )
        if not sys.stderr.isatty():
            disable_progress_bar()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", use_safetensors=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"transformers cannot load it: {first}", str(folder), "merge again"
            ) from error
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "the folder has no chat template",
                str(folder),
                "copy chat_template.jinja of the run into it",
            )
        self.model.to(device).eval()
        self.facts: dict[str, Any] = {
            "engine": "transformers",
            "model": self.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def chat(self, messages: Messages, max_new_tokens: int) -> EngineResponse:
        """Return the greedy answer to a conversation, by the folder's own generation settings."""
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            words = str(error)[:SHOWN_CHARACTERS]
            self.facts.setdefault("refused", words)
            return EngineResponse("", "refused", words=words)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = torch.tensor([ids], device=self.model.device)
        generated = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        answer = generated.sequences[0, len(ids) :]
        logprobs = torch.cat(generated.logits).float().log_softmax(-1)
        ends = self.model.generation_config.eos_token_id
        finished = answer[-1].item() in ([ends] if isinstance(ends, int) else ends or [])
        return EngineResponse(
            answer=self.tokenizer.decode(
                answer[: len(answer) - finished], skip_special_tokens=True
            ),
            finish="stop" if finished else "length",
            answer_tokens=len(answer),
            logprobs=tuple(logprobs.gather(1, answer[:, None])[:, 0].tolist()),
            prompt_ids=tuple(ids),
            prompt_tokens=len(ids),
        )
