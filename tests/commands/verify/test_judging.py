"""What passes as right, and what does not: answers that are empty, cut or repeat the prompt, and
small differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deployments import deployment, weights
from launching import ROOT

from finetune.commands.verify.comparison import ask, compare
from finetune.commands.verify.conversations import choose
from finetune.commands.verify.evidence import EngineResponse, Replay
from finetune.commands.verify.merged import MergedFolder
from finetune.commands.verify.reference import Reference
from finetune.inference.loading import find_source, load_tokenizer_of
from finetune.runtime.progress import ProgressLine

DATA = ROOT / "data_samples" / "valid.jsonl"
CPU = torch.device("cpu")
MAX_TOKENS = 24  # of an answer
Make = Callable[[], Reference]
Verify = Callable[..., dict]


@pytest.fixture(scope="module")
def make(adapter: Path) -> Make:
    """A reference; one for each comparison, which rounds its weights."""
    source = find_source(str(adapter), None)
    tokenizer = load_tokenizer_of(source, None, trust_remote_code=False)
    return lambda: Reference(source, tokenizer, CPU, "float32", trust_remote_code=False)


def replayed(make: Make, merged: MergedFolder) -> list[Replay]:
    return ask(merged, choose([str(DATA)], make().template, 8), MAX_TOKENS)


@pytest.fixture(scope="module")
def right(make: Make, merged: Path) -> list[Replay]:
    return replayed(make, MergedFolder(merged, CPU, trust_remote_code=False))


def compared(make: Make, replays: list[Replay]) -> dict:
    return compare(make(), [replace(replay) for replay in replays], MAX_TOKENS, "bfloat16")


def silent(response: EngineResponse) -> EngineResponse:
    """As of a server that shows texts alone."""
    return replace(response, logprobs=None, prompt_ids=None)


WRONG = {
    "filtered": lambda response, _text: replace(
        silent(response), answer="", finish="content_filter"
    ),
    "unfinished": lambda response, _text: replace(silent(response), answer="", finish="None"),
    "empty at full length": lambda seen, _text: replace(
        silent(seen), answer="", finish="length", answer_tokens=24
    ),
    "empty without a length": lambda seen, _text: replace(
        silent(seen), answer="", finish="length", answer_tokens=None
    ),
    "empty and ended": lambda seen, _text: replace(
        silent(seen), answer="", finish="stop", answer_tokens=1
    ),
    "a whole answer, filtered": lambda response, _text: replace(
        silent(response), finish="content_filter"
    ),
    "the prompt before its answer": lambda response, text: replace(
        silent(response), answer=text + response.answer
    ),
}


def answered_so(replay: Replay, way: Callable[[EngineResponse, str], EngineResponse]) -> Replay:
    """The same from a server that answers in this way."""
    contents = "\n".join(message["content"] for message in replay.prompt.messages)
    response = way(replay.response, f"user\n{contents}\nassistant\n")
    return replace(replay, response=response, again=response.answer)


@pytest.mark.parametrize("way", WRONG)
def test_no_such_answer_passes(way: str, make: Make, right: list[Replay]):
    report = compared(make, [answered_so(replay, WRONG[way]) for replay in right])
    (finding,) = report["findings"]
    assert report["same"] == 0 and finding["name"] == "unknown"
    assert len(finding["prompts"]) == len(right)


@pytest.mark.parametrize("shows", [True, False], ids=["ids", "lengths"])
def test_a_context_that_is_too_short_is_found(
    shows: bool, make: Make, right: list[Replay], merged: Path
):
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
    if not shows:
        replays = [replace(replay, response=silent(replay.response)) for replay in replays]
    (finding,) = compared(make, replays)["findings"]
    cut = [replay.number for replay in right if len(replay.prompt.ids) > 64]
    assert finding["name"] == "template" and finding["prompts"] == cut
    assert 0 < len(cut) < len(right)


def test_texts_alone_are_right(make: Make, right: list[Replay]):
    texts = [
        answered_so(replay, lambda one, _text: replace(silent(one), answer_tokens=None))
        for replay in right
    ]
    report = compared(make, texts)
    assert report["findings"] == [] and report["same"] == len(right)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_full_model_is_right_whatever_it_is_computed_in(dtype: str, verify: Verify, merged: Path):
    report = verify(merged, "--merged", merged, "--dtype", dtype)
    assert report["code"] == 0 and report["findings"] == [], report
    assert report["tolerance"]["logprob"] > 0.005


def test_a_little_noise_is_found(
    make: Make, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def drawn(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return {
            n: t + (0.04 * t.float().std() * torch.randn(t.shape)).to(t.dtype)
            for n, t in tensors.items()
        }

    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        ProgressLine, "update", lambda self, done, **_: counted.append((done, self.total_steps))
    )
    noisy = deployment(merged, tmp_path / "drawn", weights(drawn))
    replays = replayed(make, MergedFolder(noisy, CPU, trust_remote_code=False))
    (finding,) = compared(make, replays)["findings"]
    assert finding["name"] == "unknown" and finding["evidence"]
    assert counted == [(number, 8) for number in range(1, 9)]
