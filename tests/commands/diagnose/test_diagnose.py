"""Every example log gets its cause and no other; clean logs get none; any log can be read."""

from __future__ import annotations

import io
import json
import re
import re._constants as constants
import tomllib
from collections import Counter
from pathlib import Path
from re._parser import parse as parse_pattern
from types import SimpleNamespace

import pytest
from launching import ROOT

from finetune.commands.diagnose.command import diagnose_logs, main, render_findings
from finetune.commands.diagnose.document import renewed
from finetune.commands.diagnose.findings import Finding
from finetune.commands.diagnose.knowledge import knowledge
from finetune.errors import ConfigError, DataError, ExitCode
from finetune.plain_text import mask_secrets
from finetune.runtime.language import speaking

LOGS = Path(__file__).parent / "logs"
SYMPTOMS = [entry for entry in knowledge().symptoms if entry.patterns]
CAUSES = set(knowledge().titles) - {"interrupted"}
# Every example: its cause ("clean": none), and its logs; a folder has those of several ranks.
EXAMPLES = [
    (cause.name, sorted(entry.iterdir()) if entry.is_dir() else [entry])
    for cause in sorted(LOGS.iterdir())
    for entry in sorted(cause.iterdir())
]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TIMEOUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran"
)
BROKEN = "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:41234"


@pytest.fixture(scope="module")
def found() -> list[list[Finding]]:
    """What the examples show."""
    return [diagnose_logs(paths) for _, paths in EXAMPLES]


def test_every_example_has_its_cause_and_no_other(found):
    wrong = []
    for (cause, paths), findings in zip(EXAMPLES, found, strict=True):
        causes = [finding.cause for finding in findings]
        if causes != ([] if cause == "clean" else [cause]):
            wrong.append((paths, causes))
    assert not wrong
    count = Counter(cause for cause, _ in EXAMPLES)
    assert set(count) - {"clean"} == CAUSES
    assert min(count.values()) >= 2 and count["clean"] >= 10


def test_other_spellings(causes):
    """Short pieces as other versions and other programs write them."""
    variants = (LOGS.parent / "log_variants.jsonl").read_text(encoding="utf-8").splitlines()
    wrong = []
    for variant in map(json.loads, variants):
        found = causes(variant["log"] + "\n")
        if found != ([variant["cause"]] if variant["cause"] else []):
            wrong.append((variant, found))
    assert not wrong and len(variants) > 250


def begins_unbounded(parts) -> bool:
    """Whether a pattern may begin with any number of characters: it would count them from each."""
    for code, argument in parts:
        if code in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            least, most, inside = argument
            if most is constants.MAXREPEAT or begins_unbounded(inside):
                return True
            if least:
                return False
        elif code is constants.SUBPATTERN:
            return begins_unbounded(argument[3])
        elif code is constants.BRANCH:
            return any(begins_unbounded(branch) for branch in argument[1])
        elif code is not constants.AT or argument is constants.AT_BEGINNING:
            return False
    return False


def test_a_long_line_takes_no_quadratic_time():
    """No pattern may search to the end of a line, nor begin in every place of a word."""
    patterns = [pattern.pattern for symptom in SYMPTOMS for _, pattern in symptom.words]
    assert not [pattern for pattern in patterns if re.search(r"(?<!\\)\.\*", pattern)]
    for path in (ROOT / "finetune" / "commands" / "diagnose" / "entries").glob("*.toml"):
        for cause, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
            found = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
            for pattern in (pattern for entry in found for pattern in entry.get("match", ())):
                assert not begins_unbounded(parse_pattern(pattern)), f"{cause}: {pattern[:80]}"


def test_the_document_is_made_from_the_rules():
    text = (ROOT / "docs" / "reference" / "diagnosis.md").read_text(encoding="utf-8")
    command = "python -m finetune.commands.diagnose.document docs/reference/diagnosis.md"
    assert text == renewed(text), command
    assert all(f"### {cause}\n" in text for cause in CAUSES)


def test_logs_of_several_ranks_are_merged_by_time_in_any_order(causes, diagnose):
    """Lines that tell no year are of that of the others."""
    rank0 = (
        f"2019-11-21 13:30:01,5 [INFO] x\n[rank0]:[E1121 13:30:01.4 P.cpp:6] [Rank 0] {TIMEOUT}\n"
    )
    rank1 = f"[W1121 13:00:01.1 y.cpp:1] torch warns\n[rank1]: {OOM}\n"
    for texts in ((rank0, rank1), (rank1, rank0)):
        assert causes(*texts) == ["device_oom"]
    finding = diagnose(rank0, rank1)[0]
    assert (finding.rank, finding.consequences) == (1, ["collective_timeout"])
    # what came an hour after the others had given up did not make them wait
    later = f"2019-11-21 14:30:01,000 [INFO] x\n{OOM}\n"
    assert causes(rank0, later) == ["collective_timeout", "device_oom"]


def test_an_error_that_nobody_knows_is_a_root_on_another_rank_only(causes):
    assert causes(TIMEOUT, BROKEN) == ["peer_died"]
    assert causes(TIMEOUT, BROKEN, OOM) == ["device_oom"]
    own = "Traceback (most recent call last):\nmine.OwnError: bad\n"
    assert causes(f"[rank0]: {TIMEOUT}\n", f"[rank1]: {own}") == ["unknown"]
    both = f"[rank0]: RuntimeError: {TIMEOUT}\n[rank0]: mine.OwnError: bad\n"
    assert causes(both) == ["collective_timeout"]


def test_the_runs_own_numbers_are_in_the_remedy(diagnose):
    text = f"python -m finetune.sft --micro-batch-size 12 --cutoff-len=4096\n[rank3]: {OOM}\n"
    finding = diagnose(text)[0]
    assert "now 12; try 6" in finding.fix and "now 4096; try 2048" in finding.fix
    assert "2.00 GiB" in finding.explanation and finding.rank == 3
    with speaking("zh"):
        chinese = diagnose(text)[0]
        shown = render_findings([chinese])
    assert "当前 12，可试 6" in chinese.fix
    assert shown.startswith("1. 设备内存不足（确定）\n   原因：")


def test_evidence_is_counted_and_cut_around_what_was_matched(diagnose):
    finding = diagnose(f"[rank3]: {OOM}\n" * 5)[0]
    assert len(finding.evidence) == 3 and finding.evidence[-1].endswith("2.00 GiB. (x3)")
    (line,) = diagnose(f"{'x ' * 500}RuntimeError: CUDA out of memory.{' y' * 500}\n")[0].evidence
    assert "CUDA out of memory" in line and ": ...  x" in line and line.endswith("y ...")


def test_a_diagnosis_in_a_log_is_not_diagnosed_again(found, causes):
    with speaking("zh"):
        one_each = [diagnose_logs(paths) for paths in dict(EXAMPLES).values()]
    for language, findings in (("en", sum(found, [])), ("zh", sum(one_each, []))):
        with speaking(language):
            shown = render_findings(findings)
        assert len(findings) >= len(CAUSES)
        assert causes(f"[INFO] all is well\n{shown}\n") == []
        assert causes(f"[INFO] all is well\n{shown}\n{OOM}\n") == ["device_oom"]


def test_memory_that_others_hold_or_nobody_uses_is_said(diagnose):
    for own, said in (("8.02 GiB", True), ("512.00 MiB", True), ("58.02 GiB", False)):
        sizes = f"(NPU 0; 60.97 GiB total capacity; {own} already allocated; 0 bytes free)"
        text = f"RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB {sizes}\n"
        assert (f"only {own} of 60.97 GiB" in diagnose(text)[0].fix) is said
    for unused, said in (("23.44 GiB", True), ("312.50 MiB", False)):
        sizes = f"of 47.54 GiB. {unused} is reserved by PyTorch but unallocated."
        text = f"{OOM.replace('2.00', '3.12')} GPU 1 has a total capacity {sizes}\n"
        assert (f"{unused} are reserved but not in use" in diagnose(text)[0].fix) is said


def test_an_error_of_this_package_speaks_for_itself(diagnose):
    error = ConfigError("the moon is 5, and must be 4", "sky.yaml:3", "write 4")
    finding = diagnose(f"[ERROR] {error}\n")[0]
    assert finding.cause == "explained_by_run" and finding.fix == "write 4"
    assert error.what in finding.explanation and "sky.yaml:3" in finding.explanation


def test_secrets_are_masked(diagnose):
    for secret in (
        "hf_AbCdEfGhIjKlMnOpQrStUvWx",
        "0123456789abcdef0123456789abcdef01234567",
        "AKIA0123456789ABCDEF",
    ):
        for line in (f"{OOM} {secret}\n", f"ValueError: token={secret} refused\n"):
            findings = diagnose(line)
            assert findings and secret not in json.dumps([vars(finding) for finding in findings])
    shown = "https://***@host/x WANDB_API_KEY='***'"
    assert mask_secrets("https://me:pass1234@host/x WANDB_API_KEY='abcdefgh'") == shown
    assert mask_secrets("Authorization: Bearer abc.def-ghi0123") == "Authorization: Bearer ***"
    assert mask_secrets("token 5 is 99999999, rank 3") == "token 5 is 99999999, rank 3"


@pytest.mark.frozen
def test_what_is_public(capsys):
    frozen = (ROOT / "tests" / "frozen" / "diagnosis.txt").read_text()
    assert frozen.split()[-len(CAUSES) :] == sorted(CAUSES)
    assert main(["--json", str(LOGS / "device_oom" / "cuda.log")]) == ExitCode.FAILED
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["findings"] and shown["findings"][0]["cause"] == "device_oom"
    assert list(shown["findings"][0]) == frozen.split("\n")[0].split()


def test_exit_codes(capsys, tmp_path):
    clean = str(LOGS / "clean" / "own_run.log")
    assert main([clean]) == ExitCode.DONE
    assert capsys.readouterr().out == "No failure found (lines read: 9).\n"
    assert main(["--json", clean]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == {"findings": []}
    for words, kind, said in (
        ([], ConfigError, "logs"),
        ([str(tmp_path / "none.log")], DataError, "cannot be read"),
        ([str(tmp_path)], DataError, "not a run's"),
    ):
        with pytest.raises(kind, match=said) as refused:
            main(words)
        assert refused.value.exit_code == ExitCode.REFUSED


def test_standard_input_is_read(monkeypatch):
    log = io.BytesIO(b"RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB\n")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=log))
    assert [finding.cause for finding in diagnose_logs("-")] == ["device_oom"]


def run_folder(folder: Path, **status: object) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "run_identity.json").write_text("{}")
    (folder / "run.yaml").write_text("micro_batch_size: 6\ncutoff_len: 1024\n")
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def test_a_run_folder_tells_its_own_numbers(tmp_path):
    error = "out of memory at step 13 (microbatches of at most 8192 tokens): CUDA out of memory."
    folder = run_folder(tmp_path / "run", state="failed", exit_code=4, error=error, step=12)
    note = {"step": 13, "token_budget": 4096, "old": "microbatches of at most 8192 tokens"}
    (folder / "oom.json").write_text(json.dumps(note))
    finding = diagnose_logs([folder])[0]
    assert finding.cause == "device_oom" and "now 6; try 3" in finding.fix
    assert "microbatches of at most 8192 tokens did not fit" in finding.fix


def test_only_the_logs_of_the_last_start_are_read(tmp_path):
    folder = run_folder(tmp_path / "run", state="failed", error="KeyError: 'output'", step=12)
    for name, line in {
        "20261120-100000-41-rank0.log": "CUDA out of memory.",
        "20261121-100000-51-rank0.log": "KeyError: 'output'",
        "20261121-100004-52-rank1.log": "KeyError: 'output'",
    }.items():
        (folder / "logs" / name).write_text(f"2026-11-21 10:00:01,0 [ERROR] {line}\n")
    (finding,) = diagnose_logs([folder])
    assert finding.cause == "dataset_missing_field" and finding.rank == 0  # by the log's name
    evidence = " ".join(finding.evidence)
    assert "51-rank0.log:1 (rank 0)" in evidence and "52-rank1.log:1 (rank 1)" in evidence
    (folder / "status.json").write_text(json.dumps({"state": "done", "step": 12}))
    assert diagnose_logs([folder]) == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gb18030"])
def test_a_paste_is_read_as_its_program_wrote_it(encoding: str, tmp_path: Path):
    frame = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    x()\n'
    lines = f"{frame}{OOM}\n".splitlines(True)
    for text in (
        f"训练失败 with:\n```\n{''.join(lines)}```\n",
        "".join(f"> {line}" for line in lines),
        "".join(f"    {line}" for line in lines),
    ):
        (tmp_path / "log").write_bytes(text.encode(encoding))
        assert [found.cause for found in diagnose_logs(tmp_path / "log")] == ["device_oom"]
