"""The entries of diagnose: each is whole, in both languages, and answers its own example."""

from __future__ import annotations

import re

from finetune.commands.diagnose.knowledge import Kind, Symptom, fill, knowledge
from finetune.commands.diagnose.line_kinds import matching_symptom
from finetune.commands.diagnose.log_facts import FACTS, facts_of, with_next_values
from finetune.commands.diagnose.log_prefixes import strip_prefixes

ENTRIES = knowledge().symptoms
PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)\}")
CHINESE = re.compile(r"[一-鿿]")
# A frame for each pattern of frames.
FRAMES = (
    'File "/w/fit.py", line 31, in collate',
    'File "/e/modeling_bert.py", line 218, in forward: embeddings += position_embeddings',
    'File "/e/trainer_pt_utils.py", line 3, in nested_concat',
    'File "/e/torch/serialization.py", line 3, in _cuda_deserialize',
    'File "/e/accelerator.py", line 3, in get_state_dict',
    'File "/e/engine.py", line 3, in _zero3_consolidated_16bit_state_dict',
    'File "/c/transformers_modules/Qwen/modeling_qwen.py", line 800, in forward',
    'File "/e/site-packages/unsloth/models/rl.py", line 3, in patch',
    'File "/e/site-packages/datasets/arrow_dataset.py", line 3, in select',
    'File "/e/site-packages/transformer_engine/common.py", line 3, in _load_cudnn',
    'File "/e/site-packages/bitsandbytes/functional.py", line 3, in int8_mm',
    'File "/e/modeling_utils.py", line 3, in _load_state_dict_into_meta_model',
    'File "/e/vllm/entrypoints/openai/api_server.py", line 5, in run_server',
)
# Values that the program gives to the entries that it asks for by their names.
GIVEN = {"line": "l", "error": "e", "pid": "7", "peer": "b", "batches": "2, 3", "frame": "f"}
# Settings and sizes that a log or a run folder may tell.
KNOWN = (
    "rank error_fix timeout_seconds micro_batch_size cutoff_len master_addr master_port port"
    " nproc dataloader_num_workers learning_rate oom_old nonfinite_records"
)


def test_an_entry_answers_its_own_example() -> None:
    for entry in ENTRIES:
        if not entry.patterns:
            assert entry.id, "an entry without patterns is asked for by its name"
            continue
        facts = facts_of(entry.example) | {entry.when}
        frames = [
            next(frame for frame in reversed(FRAMES) if re.search(pattern, frame))
            for pattern in entry.frames
        ]
        found = matching_symptom(strip_prefixes(entry.example)[0], facts, frames)
        assert found is not None and found[0] is entry, f"{entry.cause}: {entry.patterns}"
        if entry.clean:
            assert matching_symptom(strip_prefixes(entry.clean)[0], facts) is None, entry.clean


def assert_whole(entry: Symptom) -> None:
    assert {*entry.outranks} <= {*knowledge().titles} - {entry.cause}
    assert entry.when in ("", *FACTS) and (entry.source or entry.cause == "unknown")
    groups = [set(re.compile(pattern).groupindex) for pattern in entry.patterns]
    named = {group.rstrip("_") for names in groups for group in names}
    always = {name.rstrip("_") for name in set.intersection(*groups)} if groups else set()
    everything = with_next_values(dict.fromkeys([*named, *GIVEN, *KNOWN.split()], "9"))
    least = (
        GIVEN | {"signal": "SIGTERM", "step": "3", "error_fix": "f"} | dict.fromkeys(always, "9")
    )
    texts = {}
    for language in ("en", "zh"):
        said = getattr(entry, language)
        assert said["do"] and len([step for step in said["do"] if step[:2] != "[["]) <= 3
        texts[language] = [said["why"], *said["do"]]
        for filled in (
            fill(text, values) for text in texts[language] for values in (least, everything)
        ):
            assert not re.search(r"\[\[|\]\]|\{\w+\}(?!\})|  ", filled), filled
    for english, chinese in zip(texts["en"], texts["zh"], strict=True):
        assert not CHINESE.search(english)
        assert set(PLACEHOLDER.findall(chinese)) == set(PLACEHOLDER.findall(english))
        assert not re.search(r"[一-鿿][,;:?!()]|[,;:?!(][一-鿿]", chinese), chinese


def test_entries_and_causes_are_whole_in_both_languages() -> None:
    for entry in ENTRIES:
        assert_whole(entry)
    assert set(knowledge().titles) == {entry.cause for entry in ENTRIES}
    for title in knowledge().titles.values():
        assert not CHINESE.search(title["en"]) and CHINESE.search(title["zh"])
    order = ["MACHINE", "ROOT", "KILLED", "VAGUE", "UNEXPLAINED", "PEER_LOST", "TIMEOUT", "CASCADE"]
    assert [kind.name for kind in sorted(Kind)] == order, "from the root outwards"
