"""Held-out records: samples and prompts made once, and what a model makes of them: losses and
answers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.batching.steps import AnswerBatches, StepBatches
from finetune.commands.evaluate.measure_loss import progress, sample_sums
from finetune.commands.evaluate.options import EvalOptions
from finetune.commands.evaluate.prompts import (
    EvalPrompt,
    find_answer,
    find_difficulties,
    has_pairs,
    read_prompts,
    same_answer,
    spread,
    warn_of_other_answers,
)
from finetune.commands.evaluate.scores import ModelScores, Score, ratios
from finetune.config.fields import as_sources, with_columns
from finetune.data.dataset import prepare_samples
from finetune.data.preference.reader import PreferenceForm, reader_of
from finetune.data.reading.files import expand_sources
from finetune.data.samples import PreferenceSamples
from finetune.inference.answer import Answer, AnswerStream
from finetune.inference.generation import Generator, PromptTooLong
from finetune.inference.sampling import Sampling
from finetune.storage.run_log import JsonLines

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

DEFAULT_CUTOFF_TOKENS = 2048  # that of training
BATCHES_WAITING = 4  # answers begun ahead, in batches: the engine always has the next one


class HeldOutRecords:
    """The samples and prompts of `--data`; what the options leave open is as in the run that made
    the model.

    Args:
        run: that run's settings; empty where there is none.

    Raises:
        FinetuneError: data, template or tokenizer are wrong.
    """

    def __init__(
        self, options: EvalOptions, tokenizer: PreTrainedTokenizerBase, run: Mapping[str, Any]
    ) -> None:
        self.options = options
        self.tokenizer = tokenizer
        cutoff, field, curriculum = (
            run.get("cutoff_len"),
            run.get("difficulty_field"),
            run.get("curriculum"),
        )
        self.cutoff_len = options.cutoff_len or (
            cutoff if isinstance(cutoff, int) else DEFAULT_CUTOFF_TOKENS
        )
        field = options.difficulty_field or (field if isinstance(field, str) else "difficulty")
        known = curriculum.get("levels") if isinstance(curriculum, dict) else None
        sources = with_columns(as_sources(options.data), options.columns)
        paths = [file.path for file in expand_sources(sources)]
        difficulties = find_difficulties(
            paths, field, tuple(map(str, known)) if isinstance(known, list) else ()
        )
        pairs: PreferenceForm | None = "pairs" if has_pairs(paths[0], sources[0].columns) else None
        self.samples = prepare_samples(
            sources,
            self.tokenizer,
            cutoff_len=self.cutoff_len,
            difficulties=difficulties or None,
            difficulty_field=field,
            on_bad_row=options.on_bad_row,
            on_media=options.on_media,
            train_thinking=run.get("train_thinking") is not False,
            cache_dir=options.cache_dir,
            preference=pairs,
        )
        self.chosen = spread(self.samples.difficulties, options.max_samples)
        records = np.unique(self.samples.record_ids[self.chosen]).tolist()
        # All sources have the same columns.
        reader = reader_of(pairs)(difficulties or None, field, sources[0], options.on_media)
        self.prompts = self._asked(
            read_prompts([(path, reader) for path in paths], options.answer_field, records)
        )

    def _asked(self, prompts: list[EvalPrompt]) -> list[EvalPrompt]:
        """Those that `--generate` asks for."""
        wanted = self.options.generate
        if wanted == "answered":
            prompts = [prompt for prompt in prompts if prompt.answer is not None]
        elif isinstance(wanted, int):
            # A prompt whose answer can be checked tells more than one whose answer cannot.
            prompts = sorted(prompts, key=lambda prompt: prompt.answer is None)
            names = [prompt.difficulty for prompt in prompts]
            numbers = np.array([names.index(name) for name in names], dtype=np.int64)
            prompts = [prompts[position] for position in spread(numbers, wanted)]
            prompts.sort(key=lambda prompt: prompt.record)
        warn_of_other_answers(prompts, self.options.answer_field)
        return prompts

    def facts(self) -> dict[str, Any]:
        """What is evaluated, as plain JSON without a path of this machine."""
        files = {
            "files": [Path(path).name for path in self.options.data],
            "fingerprint": self.samples.fingerprint,
        }
        return {**files, "samples": len(self.chosen), "questions": len(self.prompts)}

    def add_losses(self, scores: ModelScores, model: PreTrainedModel) -> None:
        """Losses, targets and samples by difficulty; of pairs what they compare as.

        Raises:
            FinetuneError: one sample alone does not fit into the device's memory.
        """
        samples, chosen = self.samples, self.chosen
        pairs = isinstance(samples, PreferenceSamples)
        # Of pairs those of the chosen answers.
        targets = (samples.first_supervised if pairs else samples.supervised_counts)[chosen]  # type: ignore[attr-defined]
        with progress(f"{scores.name}: loss", len(chosen)) as advance:
            sums = sample_sums(
                model,
                samples,
                chosen,
                AnswerBatches if pairs else StepBatches,
                pad_token_id=self.tokenizer.pad_token_id,
                on_progress=advance,
            )
        # a sample without difficulty has -1, which is the last
        names = (*samples.difficulty_names, None)
        difficulties = [names[number] for number in samples.difficulties[chosen].tolist()]
        for name in samples.difficulty_names:
            scores.of(name)
        for number in np.unique(samples.difficulties[chosen]).tolist():
            members = samples.difficulties[chosen] == number
            losses, preferred, margin = sums[members].sum(axis=0).tolist()
            found = Score(
                samples=int(members.sum()), targets=int(targets[members].sum()), loss_sum=losses
            )
            if pairs:
                found.pairs, found.preferred, found.margin_sum = (
                    found.samples,
                    int(preferred),
                    margin,
                )
            scores.difficulties[names[number]] = scores.of(names[number]) + found
        records = samples.record_ids[chosen]
        scores.measures += ratios("loss", difficulties, sums[:, 0], targets, records)
        if pairs:
            ones = np.ones(len(chosen))
            scores.measures += ratios("accuracy", difficulties, sums[:, 1], ones, records)
            scores.measures += ratios("margin", difficulties, sums[:, 2], ones, records)

    def ask(self, scores: ModelScores, model: PreTrainedModel, writer: JsonLines | None) -> None:
        """Let the model answer the prompts, and check the answers; each is a line of
        generations.jsonl.
        """
        if not self.prompts:
            return
        checked: list[tuple[str | None, bool]] = []
        cut = too_long = 0
        with (
            Generator(
                model,
                self.tokenizer,
                scores.name,
                max_batch=min(self.options.batch_size, len(self.prompts)),
                context_tokens=self.options.context_tokens,
            ) as generator,
            progress(f"{scores.name}: answers", len(self.prompts)) as advance,
        ):
            for prompt, answer in answers(generator, self.prompts, self.options.max_new_tokens):
                record = generation(generator, prompt, answer)
                cut += record["finish_reason"] == "length"
                too_long += record["finish_reason"] == "prompt_too_long"
                if prompt.answer is not None:
                    score = scores.of(prompt.difficulty)
                    score.answered += 1
                    score.correct += record["correct"]
                    checked.append((prompt.difficulty, record["correct"]))
                if writer is not None:
                    writer.write({"model": scores.name, **record})
                advance(1)
        if cut:
            logger.warning(
                "%s: %d of %d answers were cut off "
                "(fix: a larger --max-new-tokens, if the model does end its answers)",
                scores.name, cut, len(self.prompts),
            )  # fmt: skip
        if too_long:
            logger.warning(
                "%s: %d prompts leave no room for an answer in %d tokens and count as wrong",
                scores.name, too_long, generator.context_tokens,
            )  # fmt: skip
        if checked:
            right = np.array([correct for _, correct in checked], dtype=np.float64)
            scores.measures += ratios(
                "exact match", [name for name, _ in checked], right, np.ones(len(right))
            )


def answers(
    generator: Generator, prompts: Sequence[EvalPrompt], max_new_tokens: int
) -> Iterator[tuple[EvalPrompt, Answer | None]]:
    """Greedy answers in the order of the prompts, written together; None where the prompt leaves no
    room.

    Raises:
        GenerationError: an answer failed.
    """
    greedy = Sampling(max_new_tokens=max_new_tokens)
    begun: deque[tuple[EvalPrompt, AnswerStream | None]] = deque()
    waiting = iter(prompts)
    try:
        while True:
            while len(begun) < BATCHES_WAITING * generator.limits.max_batch:
                prompt = next(waiting, None)
                if prompt is None:
                    break
                try:
                    begun.append((prompt, generator.stream(prompt.messages, greedy)))
                except PromptTooLong:
                    begun.append((prompt, None))
            if not begun:
                return
            prompt, stream = begun.popleft()
            for _ in stream or ():
                pass
            yield prompt, None if stream is None else stream.answer
    finally:
        for _, stream in begun:
            if stream is not None:
                stream.cancel()


def generation(generator: Generator, prompt: EvalPrompt, answer: Answer | None) -> dict[str, Any]:
    """One line of generations.jsonl."""
    text = "" if answer is None else answer.text
    given = find_answer(text)
    return {
        "row": prompt.record,
        "level": prompt.difficulty,
        "prompt": generator.render(prompt.messages),
        "text": text,
        "expected": prompt.answer,
        "given": given,
        "correct": None if prompt.answer is None else same_answer(given, prompt.answer),
        "finish_reason": "prompt_too_long" if answer is None else answer.finish_reason,
        "completion_tokens": 0 if answer is None else answer.completion_tokens,
    }
