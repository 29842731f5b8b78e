"""What passes as right, and what is named: answers that are empty, cut or repeat the prompt, and
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

from finetune.commands.verify.conversations import choose
from finetune.commands.verify.diagnosis import Diagnosis
from finetune.commands.verify.evidence import Finding, Replay, Seen
from finetune.commands.verify.judging import Fit, Judge
from finetune.commands.verify.merged import MergedFolder
from finetune.commands.verify.reference import Reference
from finetune.commands.verify.replaying import ask, with_own
from finetune.inference.loading import find_source, load_tokenizer_of
from finetune.runtime.progress import ProgressLine

DATA = ROOT / "data_samples" / "valid.jsonl"
CPU = torch.device("cpu")
MOST = 24  # tokens of an answer
Verify = Callable[..., dict]


@pytest.fixture(scope="module")
def reference(adapter: Path) -> Reference:
    """One for all tests: what it has said once is known."""
    source = find_source(str(adapter), None)
    tokenizer = load_tokenizer_of(source, None, trust_remote_code=False)
    return Reference(source, tokenizer, CPU, "float32", trust_remote_code=False)


def replayed(reference: Reference, folder: Path) -> list[Replay]:
    prompts = choose([str(DATA)], reference.template, 8)
    return with_own(
        reference, ask(MergedFolder(folder, CPU, trust_remote_code=False), prompts, MOST), MOST
    )


@pytest.fixture(scope="module")
def right(reference: Reference, merged: Path) -> list[Replay]:
    return replayed(reference, merged)


def diagnosed(reference: Reference, replays: list[Replay]) -> tuple[list[Finding], Fit]:
    return Diagnosis(Judge(reference, replays, MOST, "bfloat16"), "bfloat16").run()


def silent(seen: Seen) -> Seen:
    """As of a server that shows texts alone."""
    return replace(seen, answer_ids=None, logprobs=None, prompt_ids=None)


WRONG = {
    "filtered": lambda seen, _text: replace(silent(seen), answer="", finish="content_filter"),
    "unfinished": lambda seen, _text: replace(silent(seen), answer="", finish="None"),
    "empty at full length": lambda seen, _text: replace(
        silent(seen), answer="", finish="length", answer_tokens=24
    ),
    "empty without a length": lambda seen, _text: replace(
        silent(seen), answer="", finish="length", answer_tokens=None
    ),
    "empty and ended": lambda seen, _text: replace(
        silent(seen), answer="", finish="stop", answer_tokens=1
    ),
    "a whole answer, filtered": lambda seen, _text: replace(silent(seen), finish="content_filter"),
    "the prompt before its answer": lambda seen, text: replace(
        silent(seen), answer=text + seen.answer
    ),
}


def answered_so(replay: Replay, way: Callable[[Seen, str], Seen]) -> Replay:
    """The same from a server that answers in this way, and takes no prompts that are rendered."""
    contents = "\n".join(message["content"] for message in replay.prompt.messages)
    seen = way(replay.seen, f"user\n{contents}\nassistant\n")
    return replace(replay, seen=seen, again=seen.answer, raw=None)


@pytest.mark.parametrize("way", WRONG)
def test_no_such_answer_passes(way: str, reference: Reference, right: list[Replay]):
    findings, fit = diagnosed(reference, [answered_so(replay, WRONG[way]) for replay in right])
    assert not any(fit.good), fit
    assert [(finding.name, len(finding.prompts)) for finding in findings] == [
        ("unknown", len(right))
    ]


@pytest.mark.parametrize("shows", [True, False], ids=["ids", "lengths"])
def test_a_context_that_is_too_short_is_found(
    shows: bool, reference: Reference, right: list[Replay], merged: Path
):
    class Short(MergedFolder):
        def _answer(self, ids, max_new_tokens, **_shown):
            seen = super()._answer(ids[-64:], max_new_tokens, prompt_ids=tuple(ids[-64:]))
            return seen if shows else silent(seen)

    short = Short(merged, CPU, trust_remote_code=False)
    replays = with_own(reference, ask(short, [replay.prompt for replay in right], MOST), MOST)
    (finding,), _fit = diagnosed(reference, replays)
    assert (finding.name, finding.detail, finding.explained) == (
        "context_cut",
        "the last 64 tokens",
        len(right),
    )
    cut = tuple(replay.number for replay in right if len(replay.prompt.ids) > 64)
    assert finding.prompts == cut and 0 < len(cut) < len(right)


def test_texts_alone_are_right(reference: Reference, right: list[Replay]):
    texts = [
        answered_so(replay, lambda seen, _text: replace(silent(seen), answer_tokens=None))
        for replay in right
    ]
    findings, fit = diagnosed(reference, texts)
    assert findings == [] and all(fit.good)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_full_model_is_right_whatever_it_is_computed_in(dtype: str, verify: Verify, merged: Path):
    report = verify(merged, "--merged", merged, "--dtype", dtype)
    assert report["code"] == 0 and report["findings"] == [], report
    assert report["tolerance"]["logprob"] > 0.005


def test_a_little_noise_has_no_name(
    reference: Reference, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    findings, _fit = diagnosed(reference, replayed(reference, noisy))
    assert [(finding.name, finding.detail) for finding in findings] == [
        ("unknown", "small difference")
    ]
    assert counted and all(done <= total for done, total in counted)
