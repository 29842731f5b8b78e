"""What passes as right, and what is named: answers that are empty, cut or repeat the prompt, and small differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deployments import deployment, weights

from finetune.commands.verify import command
from finetune.commands.verify.evidence import Seen
from finetune.commands.verify.merged import MergedFolder

Verify = Callable[..., dict]


def silent(seen: Seen) -> Seen:
    """As of a server that shows texts alone."""
    return replace(seen, answer_ids=None, logprobs=None, prompt_ids=None)


WRONG = {
    "filtered": lambda seen, _text: replace(silent(seen), answer="", finish="content_filter"),
    "unfinished": lambda seen, _text: replace(silent(seen), answer="", finish="None"),
    "empty at full length": lambda seen, _text: replace(silent(seen), answer="", finish="length", answer_tokens=24),
    "empty without a length": lambda seen, _text: replace(silent(seen), answer="", finish="length", answer_tokens=None),
    "empty and ended": lambda seen, _text: replace(silent(seen), answer="", finish="stop", answer_tokens=1),
    "a whole answer, filtered": lambda seen, _text: replace(silent(seen), finish="content_filter"),
    "the prompt before its answer": lambda seen, text: replace(silent(seen), answer=text + seen.answer),
}


@pytest.mark.parametrize("way", WRONG)
def test_no_such_answer_passes(way: str, verify: Verify, adapter: Path, merged: Path, monkeypatch: pytest.MonkeyPatch):
    class Server(MergedFolder):
        def chat(self, messages, max_new_tokens):
            prompt = "\n".join(message["content"] for message in messages)
            return WRONG[way](super().chat(messages, max_new_tokens), f"user\n{prompt}\nassistant\n")

        def complete(self, *_):
            return None

    made = Server(merged, torch.device("cpu"), trust_remote_code=False)
    monkeypatch.setattr(command, "_deployment", lambda *_: made)
    report = verify(adapter, "--merged", merged)
    assert report["code"] == 1 and report["same"] == 0, report
    assert [finding["name"] for finding in report["findings"]] == ["unknown"]


def test_texts_alone_are_right(verify: Verify, adapter: Path, merged: Path, monkeypatch: pytest.MonkeyPatch):
    class Server(MergedFolder):
        def chat(self, messages, max_new_tokens):
            return replace(silent(super().chat(messages, max_new_tokens)), answer_tokens=None)

    made = Server(merged, torch.device("cpu"), trust_remote_code=False)
    monkeypatch.setattr(command, "_deployment", lambda *_: made)
    assert verify(adapter, "--merged", merged)["code"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_full_model_is_right_whatever_it_is_computed_in(dtype: str, verify: Verify, merged: Path):
    report = verify(merged, "--merged", merged, "--dtype", dtype)
    assert report["code"] == 0 and report["findings"] == [], report
    assert report["tolerance"]["logprob"] > 0.005


def test_a_little_noise_has_no_name(verify: Verify, adapter: Path, merged: Path, tmp_path: Path):
    def drawn(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return {n: t + (0.04 * t.float().std() * torch.randn(t.shape)).to(t.dtype) for n, t in tensors.items()}

    report = verify(adapter, "--merged", deployment(merged, tmp_path / "drawn", weights(drawn)))
    assert report["code"] == 1
    assert [(finding["name"], finding["detail"]) for finding in report["findings"]] == [("unknown", "small difference")]
