"""The options of `verify`. Needs no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from finetune.config.fields import PathOption, Paths, Text, setting
from finetune.config.options import SpokenOptions
from finetune.inference.options import Count, ModelOptions


class VerifyOptions(ModelOptions, SpokenOptions):
    usage: ClassVar[str] = (
        "python -m finetune verify --model FOLDER|ID (--endpoint URL | --merged FOLDER) [--flag"
        " value ...]"
    )
    summary: ClassVar[str] = (
        "Replay prompts through another engine, and compare what it reads and answers with what was"
        " trained:\nrendered prompts, token ids, greedy answers and their log-probabilities. Says"
        " what differs and how to mend it."
    )
    epilog: ClassVar[str] = (
        "Exit code: 0 the deployment answers as the trained model; 1 it differs, or failed; 2"
        " refused; 130 interrupted."
    )
    groups: ClassVar[tuple[str, ...]] = ("model", "deployment", "prompts", "output")

    endpoint: Text | None = setting(
        None,
        group="deployment",
        unit="URL",
        description="A server of the OpenAI protocol, e.g. http://host:8000/v1.",
    )
    served_model: Text | None = setting(
        None,
        group="deployment",
        unit="NAME",
        shown_default="its only one",
        description="The server's name of the model.",
    )
    api_key_variable: Text = setting(
        "OPENAI_API_KEY",
        group="deployment",
        unit="NAME",
        description="Environment variable with the server's key.",
    )
    merged: PathOption | None = setting(
        None,
        group="deployment",
        unit="FOLDER",
        description="Instead: a model's folder, through transformers alone.",
    )
    deployed_dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "auto",
        group="deployment",
        description="Number format that it is to have; auto: the base's own.",
    )
    timeout_seconds: Annotated[float, Field(gt=0)] = setting(
        120.0, group="deployment", unit="SECONDS", description="Longest silence of the server."
    )
    data: Paths = setting(
        (),
        group="prompts",
        unit="FILE...",
        shown_default="the run's validation data",
        description="Records to ask.",
    )
    prompts: Count = setting(
        16, group="prompts", unit="N", description="Conversations that are replayed."
    )
    max_new_tokens: Count = setting(
        48, group="prompts", unit="N", description="Most tokens of an answer."
    )

    def problems(self) -> list[tuple[str, str]]:
        found = super().problems()
        if (self.endpoint is None) == (self.merged is None):
            found.append(
                ("there must be one deployment", "give either --endpoint URL or --merged FOLDER")
            )
        if self.endpoint is not None:
            if "@" in self.endpoint:
                found.append(
                    (
                        "--endpoint has a password in it",
                        "put the key into the variable OPENAI_API_KEY",
                    )
                )
            elif not _is_address(self.endpoint):
                found.append(("--endpoint is no address", "write it as http://host:port/v1"))
        return found


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        sendable = url.isascii() and url.isprintable() and " " not in url
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and sendable
    except ValueError:  # of brackets, a port, or a name
        return False
