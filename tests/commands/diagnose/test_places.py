"""What the place of an exception tells where no rule knows its words."""

from __future__ import annotations

import pytest

from finetune.commands.diagnose.knowledge import knowledge

PLACES = [entry for entry in knowledge().symptoms if entry.id.startswith("place_")]
LIBRARY = "/opt/conda/lib/python3.11/site-packages/"
OWN = '  File "/data/datasets/train.py", line 9, in main\n    run()\n'


def traceback(*frames: tuple[str, str], end: str, source: str = "x = y") -> str:
    lines = [f'  File "{file}", line 12, in {name}\n    {source}\n' for file, name in frames]
    return "".join(["Traceback (most recent call last):\n", OWN, *lines, end, "\n"])


@pytest.mark.parametrize(
    ("file", "function", "cause"),
    [
        (f"{LIBRARY}datasets/arrow_writer.py", "write", "data_refused"),
        ("/home/user/train.py", "collate_chats", "data_refused"),
        (f"{LIBRARY}transformers/core_model_loading.py", "convert", "loading_failed"),
        (f"{LIBRARY}peft/peft_model.py", "save_pretrained", "saving_failed"),
        ("/w/LLaMA-Factory/src/llamafactory/hparams/parser.py", "get_train_args", "unknown"),
        (f"{LIBRARY}trl/trainer/grpo_trainer.py", "__init__", "unknown"),
        (f"{LIBRARY}torch/_inductor/graph.py", "run", "compile_failed"),
        (f"{LIBRARY}httpx/_client.py", "send", "hub_offline"),
        ("/data/datasets/train.py", "step", "program_error"),
    ],
)
def test_the_innermost_place_that_tells_anything_counts(file, function, cause, diagnose):
    end, source = "ValueError: nobody has seen this", "raise ValueError(text)"
    found = diagnose(traceback((file, function), end=end, source=source))[0]
    assert (found.cause, found.confidence) == (cause, PLACES[0].confidence)
    # the source line says what was checked
    for said in ("nobody has seen this", f"`{source}`", function):
        assert said in found.explanation
