"""The real command as the official client meets it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import ROOT
from serve_helpers import Served, real_server

from finetune.__main__ import main as finetune

openai = pytest.importorskip("openai", reason="the openai client is not installed")

MODEL = ROOT / "data_samples" / "tiny-qwen3"
QUESTIONS = ("Explain the meaning of 100.64.0.0/10.", "什么是自治系统？", "What is NAT?")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with real_server(MODEL, "--max-batch", 4, "--max-queue", 8) as server:
        yield server


def test_the_official_client_whole_and_streamed(served: Served):
    """One after another and together. That the answers are the model's: inference/."""
    api = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=60)
    assert [model.id for model in api.models.list()] == [served.model] == ["tiny-qwen3"]
    assert api.models.retrieve(served.model).id == served.model

    def whole(question: str, **more: Any) -> tuple[str, str, int]:
        messages = [{"role": "user", "content": question}]
        settings = {"model": served.model, "messages": messages, "max_tokens": 12, **more}
        answer = api.chat.completions.create(**settings)
        usage, choice = answer.usage, answer.choices[0]
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        return choice.message.content, choice.finish_reason, usage.completion_tokens

    def streamed(question: str) -> tuple[str, str, int]:
        messages = [{"role": "user", "content": question}]
        settings = {"model": served.model, "messages": messages, "max_completion_tokens": 12}
        settings |= {"stream": True, "stream_options": {"include_usage": True}}
        first, *chunks, last, counts = api.chat.completions.create(**settings)
        assert first.choices[0].delta.role == "assistant" and counts.choices == []
        text = "".join(chunk.choices[0].delta.content for chunk in chunks)
        return text, last.choices[0].finish_reason, counts.usage.completion_tokens

    expected = list(map(whole, QUESTIONS))
    assert len({text for text, _, _ in expected}) == len(QUESTIONS)
    with ThreadPoolExecutor(6) as pool:
        answers, streams = pool.map(whole, QUESTIONS), pool.map(streamed, QUESTIONS)
        assert list(answers) == list(streams) == expected
    seeded = {whole(QUESTIONS[0], temperature=1.0, seed=11) for _ in range(3)}
    assert len(seeded) == 1
    raw = api.completions.create(model=served.model, prompt="BGP", max_tokens=4)
    assert raw.object == "text_completion" and raw.usage.completion_tokens == 4
    pieces = api.completions.create(model=served.model, prompt="BGP", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == raw.choices[0].text
    # the model's template, which is a program, is run by another process
    (pid,) = served.worker_pids()
    children = [" ".join(child.cmdline()) for child in psutil.Process(pid).children()]
    assert any("limited_template" in words for words in children)

    user = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    long = [{"role": "user", "content": "BGP " * 3000}]
    for error, code, request in (
        (openai.BadRequestError, "empty_array", {"messages": []}),
        (openai.BadRequestError, "unsupported_parameter", {"messages": user, "n": 3}),
        (openai.BadRequestError, "context_length_exceeded", {"messages": long}),
        (openai.BadRequestError, "invalid_value", {"messages": user, "tools": tools}),
        (openai.NotFoundError, "model_not_found", {"messages": user, "model": "gpt-4"}),
    ):
        for stream in (False, True):
            with pytest.raises(error) as caught:
                api.chat.completions.create(**{"model": served.model, "stream": stream, **request})
            assert (caught.value.code, caught.value.type) == (code, "invalid_request_error")
            assert "tools" not in request or "writes no calls of tools" in str(caught.value)


def test_refused_before_anything_is_served(tmp_path: Path, served: Served, capsys, monkeypatch):
    monkeypatch.delenv("FINETUNE_SERVE_TOKEN", raising=False)
    for flags, message in (
        (f"--port {served.port}", "cannot be used"),
        ("--body-seconds nan", "body_seconds is 'nan'"),
        ("--num-gpus 2 --num-workers 2", "are both given"),
        (f"--model {tmp_path / 'no'} --port 0", "no such model folder"),
    ):
        words = f"serve --model {MODEL} --device-type cpu {flags}".split()
        assert finetune(words) == 2
        err = capsys.readouterr().err
        assert message in err and "Traceback" not in err, flags
