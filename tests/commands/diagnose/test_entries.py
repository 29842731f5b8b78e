"""The entries of diagnose: each is whole, in both languages, and answers its own example."""

from __future__ import annotations

import re

import pytest

from finetune.commands.diagnose.knowledge import Symptom, fill, knowledge
from finetune.commands.diagnose.line_kinds import matching_symptom
from finetune.commands.diagnose.log_facts import FACTS, facts_of, with_next_values
from finetune.commands.diagnose.log_prefixes import strip_prefixes

ENTRIES = knowledge().symptoms
PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)\}")
CHINESE = re.compile(r"[一-鿿]")
# A frame for each pattern of frames.
EXAMPLE_FRAMES = {
    pattern: frame
    for pattern in {pattern for entry in ENTRIES for pattern in entry.frames}
    for frame in (
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
    if re.search(pattern, frame)
}
# Values that the program gives to the entries that it asks for by their names.
GIVEN = {"line": "l", "error": "e", "pid": "7", "peer": "b", "batches": "2, 3", "frame": "f"}


def name(entry: Symptom) -> str:
    return entry.id or f"{entry.cause}-{(entry.match or entry.codes or entry.returns)[0][:30]}"


@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_an_entry_answers_its_own_example(entry: Symptom) -> None:
    if not entry.patterns:
        assert entry.id, "an entry without patterns is asked for by its name"
        return
    text, _, _ = strip_prefixes(entry.example)
    facts = facts_of(entry.example) | {entry.when}
    frames = [EXAMPLE_FRAMES[pattern] for pattern in entry.frames]
    found = matching_symptom(text, facts, frames)
    assert found is not None
    assert found[0] is entry, f"{found[0].cause}: {found[0].patterns}"
    if entry.clean:
        assert matching_symptom(strip_prefixes(entry.clean)[0], facts) is None


@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_an_entry_is_whole_in_both_languages(entry: Symptom) -> None:
    assert entry.cause in knowledge().titles
    assert {*entry.outranks} <= {*knowledge().titles} - {entry.cause}
    assert entry.when in ("", *FACTS)
    assert entry.source or entry.cause == "unknown"
    groups = [set(re.compile(pattern).groupindex) for pattern in entry.patterns]
    named = {group.rstrip("_") for names in groups for group in names}
    always = {name.rstrip("_") for name in set.intersection(*groups)} if groups else set()
    everything = with_next_values(dict.fromkeys([*named, *GIVEN, *KNOWN], "9"))
    texts = {}
    for language in ("en", "zh"):
        said = getattr(entry, language)
        steps = said["do"]
        assert len(steps) >= 1
        assert len([step for step in steps if not step.startswith("[[")]) <= 3
        texts[language] = [said["why"], *steps]
        for text in texts[language]:
            given = GIVEN | {"signal": "SIGTERM", "step": "3", "error_fix": "f"}
            for values in (given | dict.fromkeys(always, "9"), everything):
                filled = fill(text, values)
                assert not re.search(r"\[\[|\]\]|\{\w+\}(?!\})|  ", filled), filled
    for english, chinese in zip(texts["en"], texts["zh"], strict=True):
        assert not CHINESE.search(english)
        assert set(PLACEHOLDER.findall(chinese)) == set(PLACEHOLDER.findall(english))
        assert not re.search(r"[一-鿿][,;:?!()]|[,;:?!(][一-鿿]", chinese), chinese


# Settings and sizes that a log or a run folder may tell.
KNOWN = [
    "rank",
    "error_fix",
    "timeout_seconds",
    "micro_batch_size",
    "cutoff_len",
    "master_addr",
    "master_port",
    "port",
    "nproc",
    "dataloader_num_workers",
    "learning_rate",
    "oom_old",
    "nonfinite_records",
]


def test_causes_have_titles_in_both_languages() -> None:
    shown = {entry.cause for entry in ENTRIES}
    assert set(knowledge().titles) == shown
    for cause in knowledge().titles.values():
        assert not CHINESE.search(cause["en"])
        assert CHINESE.search(cause["zh"])
