"""What passes as right, and which conversations are asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deployments import deployment, weights
from launching import ROOT

from finetune.commands.verify.comparison import ask, compare
from finetune.commands.verify.conversations import choose
from finetune.commands.verify.evidence import Replay
from finetune.commands.verify.merged import MergedFolder
from finetune.errors import DataError
from finetune.runtime.progress import ProgressLine

DATA = [str(ROOT / "data_samples" / "valid.jsonl")]
CPU = torch.device("cpu")
MAX_TOKENS = 24  # of an answer


def replayed(make, folder: MergedFolder) -> list[Replay]:
    return ask(folder, choose(DATA, make().template, 8), MAX_TOKENS)


@pytest.fixture(scope="module")
def right(make, merged: Path) -> list[Replay]:
    return replayed(make, MergedFolder(merged, CPU, trust_remote_code=False))


def compared(make, replays: list[Replay]) -> dict:
    return compare(make(), [replace(replay) for replay in replays], MAX_TOKENS, "bfloat16")


def answered(replay: Replay, **changes: Any) -> Replay:
    """The same from a server that shows texts alone, and answers otherwise."""
    silent = replace(replay.response, logprobs=None, prompt_ids=None, **changes)
    return replace(replay, response=silent, again=silent.answer)


def test_no_such_answer_passes(make, right: list[Replay]):
    turns = [[one["content"] for one in replay.prompt.messages] for replay in right]
    prompts = ["user\n" + "\n".join(words) + "\nassistant\n" for words in turns]
    wrong = [
        {"answer": "", "finish": "content_filter"},
        {"answer": "", "finish": "None"},
        {"answer": "", "finish": "length", "answer_tokens": 24},
        {"answer": "", "finish": "length", "answer_tokens": None},
        {"answer": "", "finish": "stop", "answer_tokens": 1},
        {"finish": "content_filter"},
        {"answer": prompts[6] + right[6].response.answer},  # the prompt before its answer
        {"answer": prompts[7] + right[7].response.answer},
    ]
    replays = [answered(*pair[:1], **pair[1]) for pair in zip(right, wrong, strict=True)]
    report = compared(make, replays)
    (finding,) = report["findings"]
    assert report["same"] == 0 and finding["name"] == "unknown"
    assert finding["prompts"] == [1, 2, 3, 4, 5, 6, 7, 8]
    report = compared(make, [answered(replay, answer_tokens=None) for replay in right])
    assert report["findings"] == [] and report["same"] == 8


def test_a_context_that_is_too_short_is_found(make, right: list[Replay], merged: Path):
    folder = MergedFolder(merged, CPU, trust_remote_code=False)
    tokenizer = folder.tokenizer

    class Short:
        chat_template = tokenizer.chat_template
        apply_chat_template = tokenizer.apply_chat_template
        decode = tokenizer.decode

        def __call__(self, text: str, **settings: object) -> dict:
            return {"input_ids": tokenizer(text, **settings)["input_ids"][-64:]}

    folder.tokenizer = Short()
    replays = replayed(make, folder)
    cut = [replay.number for replay in right if len(replay.prompt.ids) > 64]
    assert 0 < len(cut) < len(right)
    # a server that shows lengths alone
    (finding,) = compared(make, [answered(replay) for replay in replays])["findings"]
    assert finding["name"] == "template" and finding["prompts"] == cut


def test_a_full_model_is_right(verify, merged: Path):
    report = verify(merged, "--merged", merged, "--dtype", "bfloat16")
    assert report["code"] == 0 and report["findings"] == [], report
    assert report["tolerance"]["logprob"] > 0.005


def test_a_little_noise_is_found(make, merged: Path, tmp_path: Path, monkeypatch):
    def drawn(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        spread = {name: 0.04 * tensor.float().std() for name, tensor in tensors.items()}
        return {n: t + (spread[n] * torch.randn(t.shape)).to(t.dtype) for n, t in tensors.items()}

    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        ProgressLine, "update", lambda self, done, **_: counted.append((done, self.total_steps))
    )
    noisy = deployment(merged, tmp_path / "drawn", weights(drawn))
    replays = replayed(make, MergedFolder(noisy, CPU, trust_remote_code=False))
    (finding,) = compared(make, replays)["findings"]
    assert finding["name"] == "unknown" and finding["evidence"]
    assert counted == [(number, 8) for number in range(1, 9)]


def test_prompts_fit_the_context(make):
    template = make().template
    longest = sorted(len(prompt.ids) for prompt in choose(DATA, template, 8))[4]
    fitting = choose(DATA, template, 8, longest)
    assert len(fitting) > 4 and max(len(prompt.ids) for prompt in fitting) == longest
    with pytest.raises(DataError, match="longer than the context"):
        choose(DATA, template, 8, 3)
