"""Diagnosis: every example log gets its cause and no other, clean logs get none, and any log can be
read.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fake_runs import sign
from launching import ROOT, environment

from finetune.commands.diagnose.command import diagnose_logs, main, render_findings
from finetune.commands.diagnose.document import renewed
from finetune.commands.diagnose.knowledge import knowledge
from finetune.commands.diagnose.log_facts import facts_in
from finetune.commands.diagnose.prefilter import fixed_words
from finetune.errors import ConfigError, DataError, ExitCode, FinetuneError
from finetune.plain_text import mask_secrets
from finetune.runtime.language import speaking

LOGS = Path(__file__).parent / "logs"
SYMPTOMS = [entry for entry in knowledge().symptoms if entry.patterns]
CAUSES = set(knowledge().titles) - {"interrupted"}


def examples() -> list[tuple[str, str, list[Path]]]:
    """(cause, name, logs) of every example; a folder is the logs of several ranks. Cause "clean":
    none.
    """
    found = []
    for cause in sorted(LOGS.iterdir()):
        for entry in sorted(cause.iterdir()):
            found.append(
                (cause.name, entry.name, sorted(entry.iterdir()) if entry.is_dir() else [entry])
            )
    return found


def causes(*paths: Path | str) -> list[str]:
    return [finding.cause for finding in diagnose_logs(paths)]


def causes_of_text(tmp_path: Path, *texts: str) -> list[str]:
    paths = [tmp_path / f"log-{number}.log" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return causes(*paths)


# ---------------------------------------------------------------- the examples


def test_precision_and_recall_over_all_examples(capsys):
    hits, reported, wanted = Counter[str](), Counter[str](), Counter[str]()
    wrong = []
    for cause, name, paths in examples():
        expected = [] if cause == "clean" else [cause]
        found = causes(*paths)
        reported.update(found)
        wanted.update(expected)
        hits.update(set(found) & set(expected))
        if found != expected:
            wrong.append(f"{cause}/{name}: {found}")
    with capsys.disabled():
        print(f"\n{'cause':34} examples  precision  recall")
        for cause in sorted(wanted | reported):
            precision = hits[cause] / reported[cause] if reported[cause] else 0.0
            print(
                f"{cause:34} {wanted[cause]:8}  {precision:9.2f} "
                f" {hits[cause] / max(1, wanted[cause]):6.2f}"
            )
        precision, recall = hits.total() / reported.total(), hits.total() / wanted.total()
        print(f"{'all':34} {wanted.total():8}  {precision:9.2f}  {recall:6.2f}")
    assert not wrong


def test_there_is_an_example_of_every_cause():
    count = Counter(cause for cause, _, _ in examples())
    assert set(count) - {"clean"} == CAUSES
    assert min(count.values()) >= 2
    assert count["clean"] >= 10


def test_a_rule_is_never_missed_for_its_fixed_words():
    """Every line that a pattern matches holds the words that lines are filtered by."""
    # Compiled here: there are more of them than `re` keeps.
    rules = [
        (symptom, [re.compile(pattern) for pattern in symptom.patterns]) for symptom in SYMPTOMS
    ]
    files = [path for _, _, paths in examples() for path in paths]
    for line in {line for path in files for line in path.read_text(errors="replace").split("\n")}:
        for symptom, patterns in rules:
            if any(pattern.search(line) for pattern in patterns):
                assert symptom.found_in(line, line.lower()), (symptom.cause, line)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"No space left", ["no space left"]),
        (r"\[Errno 24\]|Too many open files", ["[errno 24]", "too many open files"]),
        (r"code is 5070(?:46|48)\b", ["code is 5070"]),
        (r"abcdx?efgh", ["abcd"]),
        (r"ab[cd]efgh.{0,9}i", ["efgh"]),
        (
            r"(?:error|failure)(?: code)? \d|(?P<x>disk (?:full|gone))$",
            ["error", "failure", "disk "],
        ),
    ],
)
def test_fixed_words(pattern, words):
    assert fixed_words(pattern) == words


def test_other_spellings(tmp_path):
    """Short pieces as other versions and other programs write them."""
    variants = [
        json.loads(line) for line in (LOGS.parent / "log_variants.jsonl").read_text().splitlines()
    ]
    found = [causes_of_text(tmp_path, variant["log"] + "\n") for variant in variants]
    assert found == [[variant["cause"]] if variant["cause"] else [] for variant in variants]


def test_a_pattern_without_fixed_words_is_refused():
    with pytest.raises(ValueError, match="no 3 plain characters"):
        fixed_words(r"(?:error|failure)?\d+")


def test_the_document_is_made_from_the_rules():
    text = (ROOT / "docs" / "reference" / "diagnosis.md").read_text(encoding="utf-8")
    assert text == renewed(text), (
        "python -m finetune.commands.diagnose.document docs/reference/diagnosis.md"
    )
    assert all(f"### {cause}\n" in text for cause in CAUSES)


# ---------------------------------------------------------------- roots and what follows from them

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TIMEOUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran"
)
BROKEN = "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:41234"


def test_logs_of_several_ranks_are_merged_by_time_in_any_order(tmp_path):
    rank0 = (
        "2026-11-21 13:30:01,5 [ERROR] x\n[rank0]:[E1121 13:30:01.408271257 P.cpp:683] [Rank 0]"
        f" {TIMEOUT}\n"
    )
    rank1 = (
        "2026-11-21 13:00:01,5 hello\n[rank1]: Traceback (most recent call last):\n[rank1]:"
        f" {OOM}\n"
    )
    for texts in ((rank0, rank1), (rank1, rank0)):
        assert causes_of_text(tmp_path, *texts) == ["device_oom"]
    finding = diagnose_logs([tmp_path / "log-0.log", tmp_path / "log-1.log"])[0]
    assert (finding.rank, finding.consequences) == (1, ["collective_timeout"])


def test_what_came_later_is_no_root(tmp_path):
    """A rank that runs out of memory an hour after the others had given up did not make them
    wait.
    """
    waited = f"[E1121 13:30:01.408271257 ProcessGroupNCCL.cpp:683] [Rank 0] {TIMEOUT}\n"
    later = f"2026-11-21 14:30:01,000 [INFO] x\n{OOM}\n"
    assert causes_of_text(tmp_path, waited, later) == ["collective_timeout", "device_oom"]


def test_a_lost_peer_comes_before_a_timeout_and_after_a_root(tmp_path):
    assert causes_of_text(tmp_path, TIMEOUT, BROKEN) == ["peer_died"]
    assert causes_of_text(tmp_path, TIMEOUT, BROKEN, OOM) == ["device_oom"]


def test_the_rank_that_was_killed_is_named_whatever_torchrun_says():
    finding = diagnose_logs([LOGS / "peer_died" / "torchrun_blames_the_wrong_rank.log"])[0]
    assert finding.rank == 1
    assert "SIGKILL" in finding.explanation


def test_an_error_that_nobody_knows_is_a_root_on_another_rank_only(tmp_path):
    own = "Traceback (most recent call last):\nmine.OwnError: bad\n"
    assert causes_of_text(tmp_path, f"[rank0]: {TIMEOUT}\n", f"[rank1]: {own}") == ["unknown"]
    assert causes_of_text(
        tmp_path, f"[rank0]: RuntimeError: {TIMEOUT}\n[rank0]: mine.OwnError: bad\n"
    ) == ["collective_timeout"]


def test_only_the_last_attempt_counts_unless_it_only_waited(tmp_path):
    restart = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"
    assert causes_of_text(
        tmp_path, f"{OOM}\n{restart}OSError: [Errno 28] No space left on device\n"
    ) == ["disk_full"]
    assert causes_of_text(tmp_path, f"{OOM}\n{restart}{TIMEOUT}\n") == ["device_oom"]


def test_what_a_run_got_over_is_no_failure(tmp_path):
    steps = "".join(f"{{'loss': 2.{n}, 'epoch': 0.{n}}}\n" for n in range(3))
    assert causes_of_text(tmp_path, f"{OOM}\n{steps}") == []
    assert causes_of_text(tmp_path, f"{OOM}\n{steps[: len(steps) // 2]}") == ["device_oom"]
    assert causes_of_text(tmp_path, f"{OOM}\n[SUCCESS] done: 4 steps, output in runs/a\n") == []


def test_quoted_source_code_is_not_matched(tmp_path):
    quoted = (
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    raise X("No space'
        ' left on device")\n'
    )
    assert causes_of_text(tmp_path, f"{quoted}mine.OwnError: bad\n") == ["program_error"]


# ---------------------------------------------------------------- texts


def test_the_runs_own_numbers_are_in_the_remedy(tmp_path):
    log = tmp_path / "x.log"
    log.write_text(
        f"python -m finetune.sft --micro-batch-size 12 --cutoff-len=4096\n[rank3]: {OOM}\n"
    )
    finding = diagnose_logs([log])[0]
    assert "now 12; try 6" in finding.fix
    assert "now 4096; try 2048" in finding.fix
    assert "2.00 GiB" in finding.explanation
    assert finding.rank == 3
    with speaking("zh"):
        chinese = diagnose_logs([log])[0]
        shown = render_findings([chinese])
    assert "当前 12，可试 6" in chinese.fix
    assert shown.startswith("1. 设备内存不足（确定）\n   原因：")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_diagnosis_in_a_log_is_not_diagnosed_again(language, tmp_path):
    with speaking(language):
        findings = [finding for _, _, paths in examples() for finding in diagnose_logs(paths)]
        shown = render_findings(findings)
    assert len(findings) > 100
    assert causes_of_text(tmp_path, f"[INFO] all is well\n{shown}\n") == []
    assert causes_of_text(tmp_path, f"[INFO] all is well\n{shown}\n{OOM}\n") == ["device_oom"]


def test_facts():
    assert facts_in('  "train_micro_batch_size_per_gpu": 4,') == {"micro_batch_size": "4"}
    assert facts_in("MASTER_ADDR=10.0.0.4 MASTER_PORT=29500 torchrun --nproc_per_node=8") == {
        "master_addr": "10.0.0.4",
        "master_port": "29500",
        "nproc": "8",
    }
    assert facts_in("'lr': 2e-05, max_seq_len 2048.") == {
        "learning_rate": "2e-05",
        "cutoff_len": "2048",
    }
    assert facts_in("learning rates matter") == {}


def test_a_device_that_others_fill_is_said(tmp_path):
    log = tmp_path / "x.log"
    for own, said in (("8.02 GiB", True), ("512.00 MiB", True), ("58.02 GiB", False)):
        text = (
            f"NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; {own}"
            " already allocated;"
        )
        log.write_text(f"[rank5]: RuntimeError: {text} 0 bytes free)\n")
        assert (f"only {own} of 60.97 GiB" in diagnose_logs([log])[0].fix) is said


def test_memory_that_is_reserved_and_not_used_is_said(tmp_path):
    log = tmp_path / "x.log"
    for unused, said in (("23.44 GiB", True), ("312.50 MiB", False)):
        text = (
            "CUDA out of memory. Tried to allocate 3.12 GiB. GPU 1 has a total capacity of 47.54"
            f" GiB. {unused} is"
        )
        log.write_text(f"torch.OutOfMemoryError: {text} reserved by PyTorch but unallocated.\n")
        assert (f"{unused} are reserved but not in use" in diagnose_logs([log])[0].fix) is said


@pytest.mark.parametrize("kind", [FinetuneError, ConfigError, DataError])
def test_an_error_of_this_package_speaks_for_itself(kind, tmp_path):
    log = tmp_path / "x.log"
    log.write_text(f"[ERROR] {kind('the moon is 5, and must be 4', 'sky.yaml:3', 'write 4')}\n")
    finding = diagnose_logs([log])[0]
    assert finding.cause == "explained_by_run"
    assert "the moon is 5, and must be 4" in finding.explanation
    assert "sky.yaml:3" in finding.explanation
    assert finding.fix == "write 4"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWx",
        "sk-proj-0123456789abcdef",
        "ghp_0123456789abcdefghij",
        "0123456789abcdef0123456789abcdef01234567",
        "AKIA0123456789ABCDEF",
    ],
)
def test_secrets_are_masked(secret, tmp_path):
    for line in (
        f"RuntimeError: CUDA out of memory. {secret}",
        f"ValueError: token={secret} refused",
    ):
        log = tmp_path / "x.log"
        log.write_text(line + "\n")
        findings = diagnose_logs([log])
        assert findings
        assert secret not in json.dumps([vars(finding) for finding in findings])
    assert (
        mask_secrets("https://me:pass1234@host/x WANDB_API_KEY='abcdefgh'")
        == "https://***@host/x WANDB_API_KEY='***'"
    )
    assert mask_secrets("Authorization: Bearer abc.def-ghi0123") == "Authorization: Bearer ***"
    assert mask_secrets("token 5 is 99999999, rank 3") == "token 5 is 99999999, rank 3"


# ---------------------------------------------------------------- the command


@pytest.mark.frozen
def test_json_does_not_swallow_the_log(capsys):
    log = LOGS / "device_oom" / "cuda.log"
    assert main(["--json", str(log)]) == ExitCode.FAILED
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["findings"]
    assert (
        list(shown["findings"][0])
        == (ROOT / "tests" / "frozen" / "diagnosis.txt").read_text().split("\n")[0].split()
    )
    assert shown["findings"][0]["cause"] == "device_oom"


@pytest.mark.frozen
def test_cause_names_are_public():
    assert (ROOT / "tests" / "frozen" / "diagnosis.txt").read_text().split()[
        -len(CAUSES) :
    ] == sorted(CAUSES)


def test_exit_codes(capsys, tmp_path):
    assert main([str(LOGS / "clean" / "own_run.log")]) == ExitCode.DONE
    assert capsys.readouterr().out == "No failure found (lines read: 9).\n"
    assert main(["--json", str(LOGS / "clean" / "own_run.log")]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == {"findings": []}
    with pytest.raises(ConfigError, match="logs") as nothing:
        main([])
    assert nothing.value.exit_code == ExitCode.REFUSED
    with pytest.raises(DataError, match="cannot be read") as missing:
        main([str(tmp_path / "none.log")])
    assert missing.value.exit_code == ExitCode.REFUSED
    with pytest.raises(DataError, match="not a run's"):
        main([str(tmp_path)])


def test_the_command_loads_no_torch_and_reads_standard_input():
    program = (
        "import sys; from finetune.__main__ import main; code = main(['diagnose', '--lang', 'zh',"
        " '-'])\nheavy = [name for name in ('torch', 'transformers', 'deepspeed', 'numpy') if name"
        " in sys.modules]\nsys.exit(f'loaded {heavy}' if heavy else code)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, input=b"all is well\n", capture_output=True, env=environment(), check=False
    )
    assert (result.returncode, result.stdout.decode()) == (
        0,
        "没有发现故障（已读 1 行）。这些内容不像训练日志：请给出失败进程的日志。\n",
    ), result.stderr


# ---------------------------------------------------------------- run folders


def run_folder(folder: Path, **status: object) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "run_identity.json").write_text("{}")
    (folder / "run.yaml").write_text("micro_batch_size: 6\ncutoff_len: 1024\n")
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def test_a_run_folder_tells_its_own_numbers(tmp_path):
    error = "out of memory at step 13 (microbatches of at most 8192 tokens): CUDA out of memory."
    folder = run_folder(tmp_path / "run", state="failed", exit_code=4, error=error, step=12)
    (folder / "oom.json").write_text(
        '{"step": 13, "token_budget": 4096, "old": "microbatches of at most 8192 tokens"}'
    )
    finding = diagnose_logs([folder])[0]
    assert finding.cause == "device_oom"
    assert "now 6; try 3" in finding.fix
    assert "microbatches of at most 8192 tokens did not fit" in finding.fix


def test_a_run_that_disappeared_was_where_its_log_ends(tmp_path):
    folder = run_folder(tmp_path / "run", state="running", step=0, pid=7)
    sign(folder, 2**22 + 1)  # no process has this id
    (folder / "trainer_log.jsonl").write_text(
        "".join(f'{{"step": {step}}}\n' for step in (40, 54, 41, 45)) + '{"step'
    )
    assert "disappeared at or after step 45" in diagnose_logs([folder])[0].evidence[0], (
        "resumed from 40"
    )
    (folder / "trainer_log.jsonl").unlink()
    assert "disappeared at or after step 0" in diagnose_logs([folder])[0].evidence[0]


def test_only_the_logs_of_the_last_start_are_read(tmp_path):
    folder = run_folder(
        tmp_path / "run", state="failed", exit_code=1, error="KeyError: 'output'", step=12
    )
    (folder / "logs" / "20261120-100000-41-rank0.log").write_text(
        "2026-11-20 10:00:01,0 [ERROR] CUDA out of memory.\n"
    )
    (folder / "logs" / "20261121-100000-51-rank0.log").write_text(
        "2026-11-21 10:00:01,0 [ERROR] KeyError: 'output'\n"
    )
    (folder / "logs" / "20261121-100004-52-rank1.log").write_text(
        "2026-11-21 10:00:02,0 [ERROR] KeyError: 'output'\n"
    )
    assert causes(folder) == ["dataset_missing_field"]
    sources = {
        line.split(":")[0].rsplit("/", 1)[-1] for line in diagnose_logs([folder])[0].evidence
    }
    assert {"20261121-100000-51-rank0.log", "20261121-100004-52-rank1.log"} <= sources


def test_a_finished_run_has_no_finding(tmp_path):
    folder = run_folder(tmp_path / "run", state="done", exit_code=0, step=12)
    (folder / "logs" / "20261120-100000-41-rank0.log").write_text(
        "2026-11-20 10:00:01,0 [ERROR] CUDA out of memory.\n"
    )
    assert causes(folder) == []


def test_standard_input_is_a_log(monkeypatch):
    class Input:
        buffer = io.BytesIO(b"RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB\n")

    monkeypatch.setattr(sys, "stdin", Input)
    assert causes("-") == ["device_oom"]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Memory cgroup out of memory: Killed process 4246 (pt_main_thread)", "host_oom"),
        ("Bus error (core dumped)", "dataloader_worker_killed_shm"),
        ("tar: write error: disk full", "disk_full"),
        ("Worker proc VllmWorker-5 died unexpectedly.", "peer_died"),
        ("Task was killed due to the node running low on memory.", "host_oom"),
        ("Device[6] lost heartbeat", "illegal_memory_or_ecc"),
    ],
)
def test_one_line_that_was_copied_is_enough(line: str, cause: str, tmp_path: Path) -> None:
    """People paste what they take for the cause; nothing else says that it is of a run."""
    log = tmp_path / "log"
    log.write_text(line + "\n")
    assert [finding.cause for finding in diagnose_logs([log])] == [cause]


def test_a_long_line_takes_no_quadratic_time() -> None:
    """By the steps that patterns may take from one place: none may search to the end of a line."""
    unbounded = [
        pattern.pattern
        for symptom in SYMPTOMS
        for _, pattern in symptom.words
        if re.search(r"(?<!\\)\.\*", pattern.pattern)
    ]
    assert not unbounded


PASTED = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    x()\n'
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
)


@pytest.mark.parametrize(
    "text",
    [
        f"My run fails with:\n```\n{PASTED}```\n",
        "".join(f"> {line}\n" for line in PASTED.splitlines()),
        "".join(f"    {line}\n" for line in PASTED.splitlines()),
    ],
    ids=["fenced", "quoted", "indented"],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gb18030"])
def test_a_paste_is_read_as_its_program_wrote_it(text: str, encoding: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(text.replace("My run fails", "训练失败").encode(encoding))
    assert [finding.cause for finding in diagnose_logs([log])] == ["device_oom"]


@pytest.mark.parametrize(
    "text",
    [
        "foo: RuntimeError: something bad happened",
        "- RuntimeError: boom",
        "报错了：显存不足",
        "exit status 1",
        "npu-smi: command not found",
        'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    x',
    ],
)
def test_text_that_speaks_of_an_error_is_quoted(text: str, tmp_path: Path) -> None:
    assert causes_of_text(tmp_path, text + "\n") != []


@pytest.mark.parametrize(
    "text",
    [
        "evaluating\nword error rate: 0.12",
        "epoch 1 train error 0.3 val error 0.4",
        "Failed: 0\nSucceeded: 10",
        "There was no error.",
        "connection failed, will try again\nconnected\nmodel loaded",
    ],
)
def test_text_that_only_names_errors_is_no_failure(text: str, tmp_path: Path) -> None:
    assert causes_of_text(tmp_path, text + "\n") == []


@pytest.mark.parametrize(
    "text",
    [
        f"Parameter indices which did not receive grad for rank {'1' * 5000}: 1 2",
        f"micro_batch_size={'1' * 5000}\nCUDA out of memory. Tried to allocate 2.00 GiB",
        f"failed to listen port: {'1' * 5000}, EADDRINUSE",
        "CUDA out of memory. Tried to allocate 2.00GiB (GPU 0; 79.15GiB total capacity;"
        " 70.0GiB already allocated; 1 free)",
    ],
)
def test_odd_numbers_end_in_no_traceback(text: str, tmp_path: Path) -> None:
    assert causes_of_text(tmp_path, text + "\n") != []


def test_what_a_library_prints_at_its_import_is_no_cause_of_an_exception(tmp_path: Path) -> None:
    notice = "Please install flash-attn for faster attention\n"
    frame = 'Traceback (most recent call last):\n  File "/w/t.py", line 3, in <module>\n    x()\n'
    text = f"{notice}{frame}IndexError: pop from empty list\n"
    assert causes_of_text(tmp_path, text)[0] == "program_error"
