"""Bad input is refused with what, where and fix: exit code 2, no traceback, nothing written.

Cases that are refused before torch is imported run as the real command. The others call `main` in
this process, and some of them the real command as well; one on two ranks, which find the same thing
and one says it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
from conftest import make_records
from launching import run_cli, said

from finetune.errors import ExitCode


@dataclass
class Place:
    """A folder of a user's own: what a case puts there is there before the command starts."""

    folder: Path
    model: Path
    data: Path
    cache: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def write(self, name: str, content: Any) -> Path:
        """A file; a dict or list becomes JSON, a list of dicts JSON Lines."""
        path = self.folder / name
        if isinstance(content, list):
            content = "".join(
                row if isinstance(row, str) else json.dumps(row) + "\n" for row in content
            )
        path.write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )
        return path

    def copy_model(self, **changes: Any) -> Path:
        """The model with other values in its config.json."""
        model = shutil.copytree(self.model, self.folder / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))
        return model

    def flags(self, **changes: Any) -> list[str]:
        """A run that is fine, with these changes; None takes a flag out."""
        given = {
            "model": self.model,
            "data": self.data,
            "output_dir": self.output,
            "cache_dir": self.cache,
            "device_type": "cpu",
            "dtype": "float32",
            "max_steps": 2,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "cutoff_len": 128,
            "report_to": "none",
        } | changes
        words: list[str] = []
        for name, value in given.items():
            if value is not None:
                words += [
                    f"--{name.replace('_', '-')}",
                    *map(str, value if isinstance(value, list) else [value]),
                ]
        return words

    def listing(self) -> dict[str, bytes]:
        """Everything in the folder, with the content of files."""
        paths = sorted(self.folder.rglob("*"))
        return {
            str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else b""
            for path in paths
        }


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, tiny_data: Path, cache: Path) -> Place:
    (tmp_path / "user").mkdir()
    return Place(tmp_path / "user", tiny_model, tiny_data, cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def in_process(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call `main` here; returns the exit code and what was printed. The environment is put back
    afterwards.
    """
    before = dict(os.environ)

    def call(flags: list[str]) -> tuple[int, str]:
        from finetune.sft import main

        monkeypatch.chdir(place.folder)
        code = main(flags)
        printed = capsys.readouterr()
        return int(code), printed.out + printed.err

    yield call
    os.environ.clear()
    os.environ.update(before)


def assert_refused(code: int, printed: str, *texts: str) -> None:
    assert code == ExitCode.REFUSED, printed
    assert "Traceback" not in printed
    for text in texts:
        assert text in printed, f"{text!r} is not in:\n{printed}"
    assert "[ERROR]" in printed and "fix:" in printed
    assert "where:" in printed or ".jsonl:" in printed  # bad rows stand in the list as file:line


# ---------------------------------------------------------------- refused before torch is imported

Case = Callable[[Place], tuple[list[str], tuple[str, ...]]]


def unknown_flag(place: Place):
    return place.flags(learning_rat=1e-3), ("--learning-rat", "did you mean --learning-rate?")


def name_of_another_package(place: Place):
    return place.flags(per_device_train_batch_size=4), ("--micro-batch-size",)


def unknown_key(place: Place):
    config = place.write("run.yaml", "max_step: 4\nlora_rr: 8\n")
    return ["--config", str(config), *place.flags()], (
        "max_step",
        "did you mean max_steps?",
        "lora_r",
        str(config),
    )


def unknown_key_in_the_finetune_block(place: Place):
    config = place.write(
        "zero.json", {"zero_optimization": {"stage": 2}, "finetune": {"cutof_len": 64}}
    )
    return ["--config", str(config), *place.flags()], (
        "cutof_len",
        "did you mean cutoff_len?",
        "zero.json",
    )


def misspelt_deepspeed_key(place: Place):
    zero = {"stage": 3, "offload_optimiser": {"device": "cpu"}}
    config = place.write(
        "zero.json", {"zero_optimization": zero, "train_micro_batch_size_per_gpus": 1}
    )
    return ["--config", str(config), *place.flags()], (
        "offload_optimiser",
        "offload_optimizer",
        "train_micro_batch_size_per_gpu",
        "2. ",  # both are reported
    )


def contradicting_numbers(place: Place):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
    }
    path = place.write(
        "zero.json", config | {"finetune": {"micro_batch_size": 8, "max_grad_norm": 1.0}}
    )
    # Refused although the flag settles the micro-batch: the file says two things.
    return ["--config", str(path), *place.flags(micro_batch_size=2)], (
        "micro_batch_size is given twice and differently",
        "4",
        "8",
        "train_micro_batch_size_per_gpu",
        "max_grad_norm is given twice and differently",
        "gradient_clipping",
    )


def batch_sizes_that_do_not_divide(place: Place):
    return place.flags(global_batch_size=30, micro_batch_size=4), (
        "global_batch_size 30 is not a multiple of micro_batch_size 4",
        "global_batch_size 28 or 32",
    )


def three_batch_numbers_that_contradict(place: Place):
    flags = place.flags(global_batch_size=30, micro_batch_size=5, gradient_accumulation_steps=4)
    return flags, (
        "5 x gradient_accumulation_steps 4 x 1 process is 20",
        "not global_batch_size 30",
    )


def missing_files(place: Place):
    flags = place.flags(
        data=["trian.jsonl", place.data], model=place.folder / "no" / "such" / "model"
    )
    return flags, (
        "trian.jsonl does not exist",
        "such/model does not exist",
        "2. ",
        "--data",
        "--model",
    )


def missing_config_file(place: Place):
    place.write("zero3.json", {})
    return ["--config", str(place.folder / "zero33.json"), *place.flags()], (
        "zero33.json",
        "zero3.json",
    )


def broken_config_file(place: Place):
    config = place.write("zero.json", '{"finetune": {"max_steps": 3,}}')
    return ["--config", str(config), *place.flags()], ("zero.json",)


def values_of_the_wrong_kind(place: Place):
    return place.flags(
        learning_rate="fast", finetuning="qlora", packing="maybe", save_total_limit=1
    ), (
        "learning_rate is 'fast'",
        "lora, full",
        "'maybe' belongs to no flag",
        "save_total_limit is 1",
        "4. ",
    )


def nothing_given(place: Place):
    return [], ("model is not set", "data is not set", "output_dir is not set", "3. ")


def no_data_file_matches(place: Place):
    return place.flags(data=place.folder / "*.csv"), ("*.csv does not exist",)


def weights_that_are_none(place: Place):
    entries = [
        {"path": "a", "weight": -1},
        {"weight": 2},
        {"path": "b", "weight": 0},
        {"path": "c", "wait": 1},
    ]
    config = place.write("run.json", json.dumps({"data": entries}))
    texts = (
        "a weight is -1",
        "a weight is 0",
        "data[1].path is not set",
        "did you mean 'weight'?",
        "run.json: data",
    )
    return ["--config", str(config), *place.flags(data=None)], texts


def more_weights_than_files(place: Place):
    return place.flags(data_weights=[3, 1]), ("data_weights has 2 weights for 1 entries of data",)


def output_is_a_file(place: Place):
    place.write("out", "not a folder")
    return place.flags(), ("out is a file",)


def a_checkpoint_that_is_not_there(place: Place):
    return place.flags(resume=place.folder / "checkpoint-7"), ("checkpoint-7", "--resume")


BEFORE_TORCH = [
    unknown_flag,
    name_of_another_package,
    unknown_key,
    unknown_key_in_the_finetune_block,
    misspelt_deepspeed_key,
    contradicting_numbers,
    batch_sizes_that_do_not_divide,
    three_batch_numbers_that_contradict,
    missing_files,
    missing_config_file,
    broken_config_file,
    values_of_the_wrong_kind,
    nothing_given,
    no_data_file_matches,
    weights_that_are_none,
    more_weights_than_files,
    output_is_a_file,
    a_checkpoint_that_is_not_there,
]


@pytest.mark.parametrize("case", BEFORE_TORCH, ids=lambda case: case.__name__)
def test_refused_before_torch_is_imported(case: Case, place: Place):
    flags, texts = case(place)
    before = place.listing()
    result = run_cli(flags, cwd=place.folder, launcher="python", launcher_args=["-X", "importtime"])
    imports = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    printed = result.stdout + "\n".join(
        line for line in result.stderr.splitlines() if line not in set(imports)
    )
    assert_refused(result.returncode, printed, *texts)
    assert place.listing() == before
    loaded = {line.rpartition("|")[2].strip() for line in imports}
    assert not loaded & {"torch", "transformers", "deepspeed", "datasets"}


# ------------------------------------------------------------ found in the data, tokenizer or model


def good_rows(place: Place, count: int = 12) -> list[Any]:
    return make_records(count)


def broken_lines(place: Place):
    rows = good_rows(place)
    rows[4] = '{"instruction": "half a line", "output": \n'
    del rows[7]["output"]
    data = place.write("bad.jsonl", rows)
    return place.flags(data=data), (
        "2 of 12 records",
        f"{data}:5: broken JSON",
        f"{data}:8: no answer",
        "--on-bad-row drop",
    )


def more_than_ten_bad_rows(place: Place):
    rows = [
        {"instruction": "a question without an answer", "difficulty": "explain"} for _ in range(25)
    ]
    data = place.write("bad.jsonl", good_rows(place) + rows)
    return place.flags(data=data), (
        "25 of 37 records",
        f"{data}:13: ",
        f"{data}:22: ",
        "and 15 more",
    )


def unknown_level(place: Place):
    rows = good_rows(place)
    rows[3]["difficulty"] = "reasonning"
    data = place.write("bad.jsonl", rows)
    return place.flags(data=data), (f"{data}:4: ", "reasonning", "reasoning")


def level_without_rows(place: Place):
    data = place.write(
        "bad.jsonl", [row for row in good_rows(place) if row["difficulty"] != "topology"]
    )
    return place.flags(data=data), (
        "difficulty 'topology' has weight",
        "no sample of it",
        "weight 0",
    )


def rows_without_level_among_rows_with_one(place: Place):
    rows = good_rows(place)
    del rows[2]["difficulty"], rows[9]["difficulty"]
    data = place.write("bad.jsonl", rows)
    return place.flags(data=data), (
        "2 of 12 records",
        "no difficulty",
        f"{data}:3: ",
        f"{data}:10: ",
        "'difficulty'",
    )


def empty_data(place: Place):
    return place.flags(data=place.write("empty.jsonl", "\n\n")), ("no record", "empty.jsonl")


def only_bad_rows_are_left_out(place: Place):
    data = place.write("bad.jsonl", [{"instruction": "q"}, "nothing\n"])
    return place.flags(data=data, on_bad_row="drop"), (
        "no record is left",
        "1 no answer",
        "1 broken JSON",
    )


def bad_validation_data(place: Place):
    data = place.write("valid.jsonl", [{"instruction": "q"}])
    return place.flags(valid_data=data), (f"{data}:1: ", "no answer")


def no_chat_template(place: Place):
    model = place.copy_model()
    (model / "chat_template.jinja").unlink()
    return place.flags(model=model), ("no chat template", "--template", "alpaca", str(model))


def unknown_template(place: Place):
    return place.flags(template="chatlm"), ("chatlm", "chatml")


def broken_template(place: Place):
    return place.flags(template=place.write("mine.jinja", "{% for m in messages %}")), (
        "mine.jinja",
        "template",
    )


def cutoff_shorter_than_the_template(place: Place):
    return place.flags(cutoff_len=8), (
        "cutoff_len 8 is too short",
        "the chat template alone takes",
        "at least",
    )


def model_without_tokenizer(place: Place):
    model = place.copy_model()
    for path in model.glob("tokenizer*"):
        path.unlink()
    return place.flags(model=model), ("the model folder has no tokenizer", str(model))


def broken_tokenizer(place: Place):
    model = place.copy_model()
    (model / "tokenizer.json").write_text('{"version": "1.0"')
    return place.flags(model=model), ("tokenizer cannot be loaded", str(model))


def fewer_embeddings_than_tokens(place: Place):
    return place.flags(model=place.copy_model(vocab_size=300)), ("only 300 embeddings", "ids up to")


def model_without_config(place: Place):
    model = place.copy_model()
    (model / "config.json").unlink()
    return place.flags(model=model), ("configuration cannot be read", str(model))


def unknown_architecture(place: Place):
    return place.flags(model=place.copy_model(model_type="qwen33")), (
        "configuration cannot be read",
        "qwen33",
    )


def model_without_weights(place: Place):
    model = place.copy_model()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return place.flags(model=model), ("safetensors", str(model))


def model_without_a_shard(place: Place):
    model = place.copy_model()
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shards})
    )
    return place.flags(model=model), (
        "1 of 2 shards, first model-00002-of-00002.safetensors",
        str(model),
    )


def lora_target_that_matches_nothing(place: Place):
    flags = place.flags(lora_target_modules=["q_proj", "v_prj"])
    return flags, ("v_prj", "matches no linear module", "v_proj", "--lora-target-modules")


def device_that_is_not_there(place: Place):
    return place.flags(device_type="mps"), ("'mps' is not available", "--device-type")


def float16_on_a_cpu(place: Place):
    return place.flags(dtype="float16"), ("float16", "--dtype", "bfloat16")


def folder_with_something_else(place: Place):
    place.output.mkdir()
    (place.output / "thesis.tex").write_text("years of work")
    return place.flags(), ("not empty and not a run", str(place.output), "--output-dir")


def checkpoint_that_is_none(place: Place):
    (place.folder / "checkpoint-7").mkdir()
    return place.flags(resume=place.folder / "checkpoint-7"), (
        "checkpoint is not valid",
        "checkpoint-7",
    )


def a_source_without_samples(place: Place):
    empty = place.write("empty.jsonl", '{"instruction": "q"}\n')
    flags = place.flags(data=[place.data, empty], data_weights=[1, "natural"], on_bad_row="drop")
    return flags, ("no sample of this source is left to be mixed", "empty")


FOUND_LATER = [
    a_source_without_samples,
    broken_lines,
    more_than_ten_bad_rows,
    unknown_level,
    level_without_rows,
    rows_without_level_among_rows_with_one,
    empty_data,
    only_bad_rows_are_left_out,
    bad_validation_data,
    no_chat_template,
    unknown_template,
    broken_template,
    cutoff_shorter_than_the_template,
    model_without_tokenizer,
    broken_tokenizer,
    fewer_embeddings_than_tokens,
    model_without_config,
    unknown_architecture,
    model_without_weights,
    model_without_a_shard,
    lora_target_that_matches_nothing,
    device_that_is_not_there,
    float16_on_a_cpu,
    folder_with_something_else,
    checkpoint_that_is_none,
]


@pytest.mark.parametrize("case", FOUND_LATER, ids=lambda case: case.__name__)
def test_refused_before_anything_is_written(case: Case, place: Place, in_process):
    flags, texts = case(place)
    before = place.listing()
    assert_refused(*in_process(flags), *texts)
    assert place.listing() == before


def test_the_real_command_refuses(place: Place):
    flags, texts = no_chat_template(place)
    before = place.listing()
    result = run_cli(flags, cwd=place.folder)
    assert_refused(result.returncode, said(result), *texts)
    assert place.listing() == before


def test_two_ranks_are_refused_together_and_one_speaks(place: Place):
    flags, texts = broken_lines(place)
    before = place.listing()
    wanted = {
        "patch": run_patches.long_quiet,
        "patch_arguments": (600.0,),
        "arguments": list(map(str, flags)),
    }
    ranks = run_helpers.start({"output_dir": str(place.folder.parent / "ranks")}, 2, **wanted)
    ranks.processes[0].join(run_helpers.DEFAULT_TIMEOUT_SECONDS)
    ranks.processes[1].terminate()  # as an elastic launcher does when one has exited
    assert ranks.wait()[0] == 2
    printed = ranks.output()
    assert printed.count("[ERROR]") == 1 and printed.count(texts[1]) == 1, printed
    assert "Traceback" not in printed
    assert place.listing() == before


def test_a_rank_that_is_refused_alone_says_why(place: Place):
    """It ended without a word, and the others waited for it until their time was over."""
    wanted = {
        "patch": run_patches.environment_of_one_rank,
        "patch_arguments": (1, "ACCELERATE_USE_DEEPSPEED", "true"),
    }
    ranks = run_helpers.start(
        {"output_dir": str(place.folder.parent / "ranks")}, 2, arguments=place.flags(), **wanted
    )
    ranks.processes[1].join(run_helpers.DEFAULT_TIMEOUT_SECONDS)
    ranks.kill()
    assert ranks.processes[1].exitcode == 2
    assert "[ERROR] rank 1: the launcher asked for DeepSpeed" in ranks.output()


def test_bad_rows_can_be_dropped_and_are_counted(place: Place, in_process):
    rows = good_rows(place, 30)
    rows[4] = "{\n"
    del rows[7]["output"]
    code, printed = in_process(
        place.flags(
            data=place.write("bad.jsonl", rows), on_bad_row="drop", max_steps=1, log_samples="true"
        )
    )
    assert code == 0, printed
    assert "broken JSON" in printed and "no answer" in printed
    ids = [
        json.loads(line)["ids"]
        for line in (place.output / "samples.jsonl").read_text().splitlines()
    ]
    assert not {4, 7} & {row for step in ids for row in step}


# ---------------------------------------------------------------- a folder that holds a run


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path, cache: Path
) -> Path:
    """The folder of a finished run of two steps."""
    place = Place(tmp_path_factory.mktemp("finished"), tiny_model, tiny_data, cache)
    run_helpers.train(
        {"output_dir": str(place.output)}, arguments=[str(word) for word in place.flags()]
    )
    return place.output


@pytest.fixture
def with_run(place: Place, finished: Path) -> Place:
    shutil.copytree(finished, place.output)
    return place


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_a_finished_run_says_so(with_run: Place, in_process):
    before = with_run.listing()
    code, printed = in_process(with_run.flags())
    assert code == 0
    assert "finished" in printed and str(with_run.output) in printed and "[ERROR]" not in printed
    assert changed(before, with_run.listing()) == set()


def test_a_finished_run_says_so_whatever_executes_it(with_run: Place, in_process):
    """The micro-batch, packing and DeepSpeed are not the run."""
    code, printed = in_process(with_run.flags(micro_batch_size=4, packing="false"))
    assert code == 0 and "finished" in printed


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"learning_rate": 1e-3}, ("learning_rate: 0.0088 in the folder, 0.001 now",)),
        ({"max_steps": 3}, ("total_steps: 2 in the folder, 3 now",)),
        (
            {"lora_r": 4, "seed": 1},
            ("lora_r: 16 in the folder, 4 now", "seed: 42 in the folder, 1 now"),
        ),
        ({"data": "other"}, ("data:",)),
        ({"curriculum_seed": 7}, ("schedule:",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_run_in_the_folder_is_refused(
    change: dict, texts: tuple[str, ...], with_run: Place, in_process
):
    if "data" in change:
        change = {"data": with_run.write("other.jsonl", make_records(60, seed=9))}
    before = with_run.listing()
    code, printed = in_process(with_run.flags(**change))
    assert_refused(
        code, printed, "not the run in the folder", *texts, str(with_run.output), "--output-dir"
    )
    assert changed(before, with_run.listing()) == set()


def test_resume_never_refuses_a_run_that_is_there(with_run: Place, in_process):
    before = with_run.listing()
    code, printed = in_process(with_run.flags(resume="never"))
    assert_refused(code, printed, "holds a run already", "--resume is never", "--output-dir")
    assert changed(before, with_run.listing()) == set()


def test_a_folder_with_a_broken_identity_is_refused(with_run: Place, in_process):
    (with_run.output / "run_identity.json").write_text('{"kind": ')
    before = with_run.listing()
    assert_refused(*in_process(with_run.flags()), "run_identity.json", "broken")
    assert changed(before, with_run.listing()) == set()


def test_checkpoint_of_another_run_is_refused(with_run: Place, in_process):
    flags = with_run.flags(
        resume=with_run.output / "checkpoint-2", output_dir=with_run.folder / "new", lora_r=4
    )
    assert_refused(*in_process(flags), "lora_r: 16 in the folder, 4 now", "checkpoint-2")
    assert not (with_run.folder / "new").exists()


# ---------------------------------------------------------------- the same from Python


def test_finetune_run_raises_with_what_where_and_fix(place: Place, monkeypatch: pytest.MonkeyPatch):
    import finetune

    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(finetune.FinetuneError) as caught:
        finetune.run(
            {"model": str(place.model), "data": "nowhere.jsonl", "output_dir": str(place.output)}
        )
    assert "nowhere.jsonl" in caught.value.what and caught.value.fix and caught.value.where
    with pytest.raises(finetune.FinetuneError, match="did you mean"):
        finetune.run(
            {"modle": str(place.model), "data": str(place.data), "output_dir": str(place.output)}
        )
    assert not place.output.exists()
