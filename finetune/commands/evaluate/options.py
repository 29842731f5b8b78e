"""The options of `eval`. Needs no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from finetune.config.fields import Columns, PathOption, Paths, Text, rule_broken, setting
from finetune.inference.options import Count, ModelOptions

GENERATIONS_NAME, RESULT_NAME, TABLE_NAME = "generations.jsonl", "evaluation.json", "table.md"


class EvalOptions(ModelOptions):
    usage: ClassVar[str] = (
        "python -m finetune eval --model FOLDER|ID [--data FILE...] [--text FILE...] [--tasks"
        " NAME...] [--flag ...]"
    )
    summary: ClassVar[str] = (
        "Loss, perplexity and exact answers on held-out records, bits per byte of texts, tasks of"
        " lm_eval:\nof a model, its adapters, its base, and whether they differ by more than"
        " chance.\nAnswers are greedy, and given to records that have an answer to compare with."
    )
    epilog: ClassVar[str] = (
        "Exit code: 0 evaluated; 1 failed while evaluating; 2 refused before that; 130 interrupted."
    )
    groups: ClassVar[tuple[str, ...]] = ("model", "data", "answers", "text", "tasks", "output")

    base: bool = setting(
        False,
        group="model",
        description="Evaluate the model without adapter (or training) as well.",
    )
    adapter: Paths = setting(
        (),
        group="model",
        unit="FOLDER|ID",
        description="LoRA adapters for --model; without --model on their base.",
    )
    data: Paths = setting(
        (),
        group="data",
        unit="FILE...",
        description="Held-out records.",
    )
    columns: Columns | None = setting(
        None,
        group="data",
        unit="prompt=question,response=answer",
        shown_default="the same",
        description="What the data calls the keys of our formats.",
    )
    max_samples: Count | None = setting(
        None,
        group="data",
        unit="N",
        shown_default="all",
        description="Of so many samples only, difficulties in turn.",
    )
    cutoff_len: Annotated[int, Field(ge=2)] | None = setting(
        None,
        group="data",
        unit="N",
        shown_default="the run's",
        description="Longest sample in tokens.",
    )
    difficulty_field: Text | None = setting(
        None,
        group="data",
        unit="NAME",
        shown_default="the run's",
        description="Field with a record's difficulty.",
    )
    answer_field: Text = setting(
        "answer", group="data", unit="NAME", description="Field with the answer."
    )
    on_bad_row: Literal["refuse", "drop"] = setting(
        "refuse", group="data", description="What to do with bad records."
    )
    on_media: Literal["refuse", "drop-row", "drop-media"] = setting(
        "refuse",
        group="data",
        description="What to do with records that have images, video or sound.",
    )
    cache_dir: Text | None = setting(
        None,
        group="data",
        unit="FOLDER",
        shown_default="that of training",
        description="For tokenized data.",
    )
    generate: Annotated[int, Field(ge=0)] | Literal["answered", "all"] = setting(
        "answered",
        group="answers",
        unit="N|answered|all",
        description="Answer N records, difficulties in turn, those with an answer, or all.",
    )
    max_new_tokens: Count = setting(
        512, group="answers", unit="N", description="Most tokens of an answer."
    )
    batch_size: Count = setting(
        32,
        group="answers",
        unit="N",
        description="Answers at a time.",
    )
    text: Paths = setting(
        (),
        group="text",
        unit="FILE...",
        description="Text, or records with text, for bits per byte of each.",
    )
    text_field: Text = setting(
        "text", group="text", unit="NAME", description="Field of records that holds the text."
    )
    max_seq_len: Annotated[int, Field(ge=2)] | None = setting(
        None,
        group="text",
        unit="N",
        shown_default="the pretraining run's, else the model's up to 2,048",
        description="Longest window in tokens.",
    )
    stride: Count | None = setting(
        None,
        group="text",
        unit="N",
        shown_default="a window",
        description=(
            "New tokens of each further window of a document; fewer leave more context to each."
        ),
    )
    tasks: Paths = setting(
        (), group="tasks", unit="NAME[,NAME]", description="Tasks or groups of lm_eval."
    )
    tasks_path: PathOption | None = setting(
        None,
        group="tasks",
        unit="FOLDER",
        description=(
            "Tasks of your own, as lm_eval's YAML; such files are programs: use those that you"
            " trust."
        ),
    )
    num_fewshot: Annotated[int, Field(ge=0)] | None = setting(
        None,
        group="tasks",
        unit="N",
        shown_default="the task's",
        description="Solved examples before each question.",
    )
    limit: Count | None = setting(
        None,
        group="tasks",
        unit="N",
        shown_default="all",
        description="First documents of each task only.",
    )
    apply_chat_template: bool = setting(
        False,
        group="tasks",
        description="Ask a task's questions by the chat template, as a user does.",
    )
    output: PathOption | None = setting(
        None,
        group="output",
        unit="FOLDER",
        description=f"New folder for {GENERATIONS_NAME}, {RESULT_NAME} and {TABLE_NAME}.",
    )
    as_json: bool = setting(
        False,
        alias="json",
        group="output",
        description="Print one JSON object instead of the table.",
    )

    @model_validator(mode="after")
    def _something_to_measure(self) -> Self:
        if not (self.data or self.text or self.tasks):
            fix = "give --data FILE (held-out records), --text FILE or --tasks NAME"
            raise rule_broken(("there is nothing to evaluate on", fix))
        if self.tasks_path is not None and not self.tasks:
            what = f"tasks_path is {self.tasks_path}, but no task of it is named"
            raise rule_broken((what, "give --tasks NAME"))
        return self
