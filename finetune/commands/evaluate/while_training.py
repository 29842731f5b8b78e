"""`--eval-generate`: answers to validation prompts at each evaluation of a fine-tuning run, greedy,
by the model as it is trained, compared as `eval` compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.commands.evaluate.prompts import (
    EvalPrompt,
    find_answer,
    read_prompts,
    same_answer,
    spread_evenly,
    warn_of_other_answers,
)
from finetune.config.run_config import RunConfig
from finetune.data.encoding.spans import ChatTemplate
from finetune.data.reading.files import expand_sources
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError
from finetune.inference.decoding import answering, greedy_tokens
from finetune.inference.loading import end_ids
from finetune.modeling.model_config import padding_id

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")


def ask(config: RunConfig, data: Any) -> AskedPrompts:
    """The prompts of a run's validation data that are answered at each evaluation.

    Args:
        data: what the kind's `prepare` returned.

    Raises:
        DataError: no record has an answer to compare with, or none of the difficulty that the run
            follows.
    """
    field = config.answer_field
    difficulties = config.curriculum.levels if config.use_curriculum else None
    files = [
        (
            file.path,
            RecordReader(difficulties, config.difficulty_field, file.source, config.on_media),
        )
        for file in expand_sources(config.held_out)
    ]
    records = np.unique(data.valid.record_ids).tolist()
    prompts = [
        prompt for prompt in read_prompts(files, field, records) if prompt.answer is not None
    ]
    if not prompts:
        raise DataError(
            f"no validation record has '{field}', the answer that a generated one is compared with",
            f"--eval-generate {config.eval_generate}",
            "give validation records with it (docs/evaluation.md), name their field by"
            " --answer-field, or leave --eval-generate out",
        )
    assert config.eval_generate is not None
    names = sorted({str(prompt.difficulty) for prompt in prompts})
    numbers = np.array([names.index(str(prompt.difficulty)) for prompt in prompts])
    chosen = [prompts[position] for position in spread_evenly(numbers, config.eval_generate)]
    if len(chosen) < config.eval_generate:
        logger.warning("only %d validation records have '%s': all are asked", len(chosen), field)
    kind, _, followed = config.best_metric.partition("/")
    if (
        kind == "exact_match"
        and followed
        and all(prompt.difficulty != followed for prompt in chosen)
    ):
        raise DataError(
            f"no validation record of difficulty {followed!r} is answered, so no evaluation has"
            f" {config.best_metric}",
            "--best-metric",
            f"add such records with '{field}' to --valid-data, or take another metric",
        )
    warn_of_other_answers(chosen, field)
    return AskedPrompts(
        chosen, data.tokenizer, cutoff_len=config.cutoff_len, max_new_tokens=config.max_new_tokens
    )


@dataclass(frozen=True)
class _Asked:
    """A prompt as token ids, with the room for its answer."""

    prompt: EvalPrompt
    ids: list[int]
    most_tokens: int


class AskedPrompts:
    """Prompts that are answered again and again.

    Args:
        cutoff_len: most tokens of a prompt with its answer: what the model is trained with.
        max_new_tokens: most tokens of an answer.
    """

    def __init__(
        self,
        prompts: Sequence[EvalPrompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        cutoff_len: int,
        max_new_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.total = len(prompts)
        self.difficulties = [prompt.difficulty for prompt in prompts]
        written = ((prompt, self._ids(prompt)) for prompt in prompts)
        asked = [
            _Asked(prompt, ids, min(max_new_tokens, cutoff_len - len(ids)))
            for prompt, ids in written
        ]
        # Of like length together: the shorter ones of a batch are padded.
        self.asked = sorted(
            (one for one in asked if one.most_tokens > 0), key=lambda one: len(one.ids)
        )
        self.too_long = self.total - len(self.asked)
        if self.too_long:
            logger.warning(
                "%d prompts leave no room for an answer in %d tokens and count as wrong (fix: a"
                " larger --cutoff-len)",
                self.too_long,
                cutoff_len,
            )

    def _ids(self, prompt: EvalPrompt) -> list[int]:
        """What training has before that answer."""
        template = ChatTemplate(self.tokenizer).with_tools(prompt.tools)
        try:
            text = template.render(prompt.turns, generation_prompt=True)
        except RecordProblem as problem:
            raise DataError(
                f"the chat template does not take the turns before the last answer: {problem}",
                f"validation record {prompt.record}",
                "take it out, or train with another --template",
            ) from problem
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def __call__(
        self,
        wrapped: torch.nn.Module,
        model: PreTrainedModel,
        *,
        rank: int,
        world_size: int,
        tokens_at_once: int,
        gather: Callable[[object], list[Any]],
        going: Callable[[bool], bool],
    ) -> dict[str, float]:
        """Let the ranks answer the prompts in turn, and measure the answers: the same numbers on
        every rank.

        Args:
            wrapped: `model` as training calls it.
            tokens_at_once: most tokens of prompts and answers that are held together, unless one
                alone has more.
            gather: every rank's plain value, by rank.
            going: as for `greedy_tokens`.
        """
        eos = model.config.get_text_config().eos_token_id
        ends = {
            "stop_ids": end_ids(self.tokenizer, model.generation_config, eos),
            "pad_id": padding_id(model.config, self.tokenizer),
        }
        mine: list[list[Any]] = []
        with answering(wrapped, model):
            for turn in self._turns(world_size, tokens_at_once):
                # Every rank takes part in every turn: under ZeRO-3 all make as many forwards.
                batch = turn[rank::world_size]
                prompts, rooms = [one.ids for one in batch], [one.most_tokens for one in batch]
                answers = greedy_tokens(
                    wrapped, model, prompts or [[ends["pad_id"]]], rooms or [0], going=going, **ends
                )  # fmt: skip
                mine += [
                    self._judged(*pair, ends["stop_ids"])
                    for pair in zip(batch, answers, strict=False)
                ]
        return self._metrics([judged for of_rank in gather(mine) for judged in of_rank])

    def _turns(self, world_size: int, tokens_at_once: int) -> list[list[_Asked]]:
        """The prompts in pieces; each rank takes every `world_size`-th of a piece."""
        turns: list[list[_Asked]] = []
        start = 0
        while start < len(self.asked):
            count = world_size
            while start + count < len(self.asked):
                more = self.asked[start : start + count + world_size]
                longest = max(len(one.ids) for one in more) + max(one.most_tokens for one in more)
                if longest * (count // world_size + 1) > tokens_at_once:
                    break
                count += world_size
            turns.append(self.asked[start : start + count])
            start += count
        return turns

    def _judged(self, one: _Asked, ids: Sequence[int], stop_ids: Sequence[int]) -> list[Any]:
        """Difficulty, whether the answer is right, whether it came to its end."""
        given = find_answer(self.tokenizer.decode(ids, skip_special_tokens=True))
        assert one.prompt.answer is not None
        return [one.prompt.difficulty, same_answer(given, one.prompt.answer), ids[-1] in stop_ids]

    def _metrics(self, judged: Sequence[Sequence[Any]]) -> dict[str, float]:
        """Of all ranks' answers. What was not answered is wrong."""
        metrics = {"exact_match": sum(right for _, right, _ in judged) / self.total}
        for name in dict.fromkeys(self.difficulties):
            if name is not None:
                right = sum(correct for difficulty, correct, _ in judged if difficulty == name)
                metrics[f"exact_match/{name}"] = right / self.difficulties.count(name)
        cut = sum(not ended for _, _, ended in judged)
        return metrics | {
            "answers": self.total,
            "answers_cut": cut,
            "prompts_too_long": self.too_long,
        }
