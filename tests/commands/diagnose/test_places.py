"""What the place of an exception tells where no rule knows its words."""

from __future__ import annotations

import pytest

from finetune.commands.diagnose.command import diagnose_logs
from finetune.commands.diagnose.knowledge import knowledge

PLACES = [entry for entry in knowledge().symptoms if entry.id.startswith("place_")]

LIBRARY = "/opt/conda/lib/python3.11/site-packages/"
OWN = '  File "/data/datasets/train.py", line 9, in main\n    run()\n'


def traceback(*frames: tuple[str, str], end: str, source: str = "x = y") -> str:
    lines = [
        f'  File "{file}", line 12, in {function}\n    {source}\n' for file, function in frames
    ]
    return "".join(["Traceback (most recent call last):\n", OWN, *lines, end, "\n"])


def first(tmp_path, text):
    (tmp_path / "run.log").write_text(text)
    return diagnose_logs(tmp_path / "run.log")[0]


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        ((f"{LIBRARY}datasets/arrow_writer.py", "write"), "data_refused"),
        (("/home/user/train.py", "collate_chats"), "data_refused"),
        ((f"{LIBRARY}transformers/core_model_loading.py", "convert"), "loading_failed"),
        ((f"{LIBRARY}peft/peft_model.py", "save_pretrained"), "saving_failed"),
        (("/w/LLaMA-Factory/src/llamafactory/hparams/parser.py", "get_train_args"), "unknown"),
        ((f"{LIBRARY}trl/trainer/grpo_trainer.py", "__init__"), "unknown"),
        ((f"{LIBRARY}torch/_inductor/graph.py", "run"), "compile_failed"),
        ((f"{LIBRARY}httpx/_client.py", "send"), "hub_offline"),
        (("/data/datasets/train.py", "step"), "program_error"),
    ],
)
def test_the_innermost_place_that_tells_anything_counts(frame, cause, tmp_path):
    found = first(
        tmp_path,
        traceback(frame, end="ValueError: nobody has seen this", source="raise ValueError(text)"),
    )
    assert (found.cause, found.confidence) == (cause, PLACES[0].confidence)
    assert "nobody has seen this" in found.explanation
    assert "`raise ValueError(text)`" in found.explanation, "the source line says what was checked"
    assert frame[1] in found.explanation


def test_an_outer_place_counts_where_the_inner_ones_tell_nothing(tmp_path):
    loads = (f"{LIBRARY}transformers/modeling_utils.py", "from_pretrained")
    inner = ("/root/.cache/huggingface/modules/m/modeling_m.py", "build")
    text = traceback(loads, inner, end="RuntimeError: rope_ratio")
    assert first(tmp_path, text).cause == "loading_failed"


@pytest.mark.parametrize(
    "end",
    [
        "RuntimeError: CUDA error: nobody knows",
        "RuntimeError: it did not work",
        "DistBackendError: NCCL error",
    ],
)
def test_what_a_device_or_another_process_did_is_not_told_by_the_place(end, tmp_path):
    for frame in (("/home/user/train.py", "step"), (f"{LIBRARY}torch/nn/functional.py", "linear")):
        assert first(tmp_path, traceback(frame, end=end)).cause not in {
            place.cause for place in PLACES
        }


def test_a_known_message_counts_more_than_its_place(tmp_path):
    text = traceback(
        (f"{LIBRARY}datasets/builder.py", "x"), end="OSError: [Errno 28] No space left on device"
    )
    assert first(tmp_path, text).cause == "disk_full"


def test_an_exception_with_words_of_a_restart_is_a_failure(tmp_path):
    text = traceback(
        (f"{LIBRARY}accelerate/accelerator.py", "prepare"),
        end="ValueError: Only one is taken when using x",
    )
    assert first(tmp_path, text).cause == "unknown"
