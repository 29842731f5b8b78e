"""What became of the records: the numbers of the start-up table, and the warnings that they call
for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


# Why a record that is right has no sample.
NO_ROOM = "no room for an answer within cutoff_len"
NO_DIFFERENCE = "answers equal within cutoff_len"


@dataclass
class DataReport:
    """Counts over one set of data files; a record mostly becomes one sample."""

    records_read: int = 0
    records_kept: int = 0  # with at least one sample
    samples: int = 0  # more than `records_kept` where a template asks for one per answer
    tokens: int = 0
    supervised_tokens: int = 0  # targets among them
    longest_tokens: int = 0  # of the longest sample
    trimmed_records: int = 0  # samples whose prompt lost its middle to the cutoff
    trimmed_tokens: int = 0  # tokens lost so
    cut_answers: int = 0  # samples whose answer was too long and lost its end
    dropped_turns: int = 0  # answers left out from the ends of long conversations
    dropped: dict[str, int] = field(default_factory=dict)  # records not kept, by reason
    duplicates: int = 0  # records not kept because an earlier one says the same
    other_side: int = 0  # records not kept because they are on the other side of the split
    left_out_media: int = 0  # records not kept because they have images, video or sound
    without_media: int = 0  # records read without theirs
    # Kept records, in the order of the difficulties; empty where difficulties are not looked at.
    records_per_difficulty: dict[str, int] = field(default_factory=dict)
    difficulty_field_found: bool = False  # whether any record has a difficulty
    unended_samples: int = 0  # samples in which no whole answer ends with a special token
    # samples with an answer that does not follow the template's own generation prompt
    off_prompt_samples: int = 0
    cut_texts: int = 0  # plain texts that lost their end to the cutoff
    cut_text_tokens: int = 0  # tokens lost so
    pairs: int = 0  # samples of two answers
    good_answers: int = 0  # samples with a label that is true
    bad_answers: int = 0  # samples with one that is false
    control_token_records: int = 0  # records whose text spells a special token of the tokenizer

    def add(self, other: DataReport) -> None:
        """Take in the counts of further records."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if name == "longest_tokens":
                self.longest_tokens = max(mine, value)
            elif isinstance(value, bool):
                setattr(self, name, mine or value)
            elif isinstance(value, dict):
                setattr(
                    self,
                    name,
                    mine | {key: mine.get(key, 0) + count for key, count in value.items()},
                )
            else:
                setattr(self, name, mine + value)

    def warnings(self) -> list[str]:
        """What works but is probably wrong, each with its fix."""
        found = []
        if self.unended_samples:
            found.append(
                f"{self.unended_samples} of {self.samples} samples train no end-of-turn token, so"
                " the model will not learn to stop there: the chat template ends answers with"
                " nothing that is a special token of this tokenizer; pass --template with one that"
                " does (alpaca ends with the tokenizer's own end token)"
            )
        if self.off_prompt_samples:
            found.append(
                f"{self.off_prompt_samples} of {self.samples} samples train answers that do not"
                " follow the chat template's generation prompt (it opens a think block that the"
                " records do not have, for instance), so inference will start differently; give"
                " the records reasoning, or pass a --template whose prompt fits"
            )
        if self.control_token_records:
            found.append(
                f"{self.control_token_records} of {self.records_read} records spell special tokens"
                " of the tokenizer in their text, which are read as such; remove them unless they"
                " are meant"
            )
        if equal := self.dropped.get(NO_DIFFERENCE, 0):
            found.append(
                f"{equal} of {self.records_read} pairs differ only behind the cutoff and are left"
                " out; a larger --cutoff-len keeps them"
            )
        if self.cut_answers:
            found.append(
                f"{self.cut_answers} of {self.samples} samples lost the end of an answer to the"
                " cutoff; a larger --cutoff-len keeps them whole"
            )
        return found

    def lines(self) -> list[tuple[str, str]]:
        """The table's lines as (name, value) texts; what is zero is left out where it is only bad
        news.
        """
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        lines = [
            ("records read", f"{self.records_read:,}"),
            ("records kept", f"{self.records_kept:,}"),
        ]
        if self.samples != self.records_kept:
            lines.append(
                ("samples", f"{self.samples:,} (one per answer where the template asks for it)")
            )
        if self.pairs:
            lines.append(("pairs", f"{self.pairs:,}"))
        if self.good_answers or self.bad_answers:
            lines.append(("labels", f"{self.good_answers:,} true, {self.bad_answers:,} false"))
        if self.trimmed_records:
            lines.append(
                ("prompts trimmed", f"{self.trimmed_records:,} ({self.trimmed_tokens:,} tokens)")
            )
        if self.dropped_turns:
            lines.append(("turns dropped", f"{self.dropped_turns:,} (ends of long conversations)"))
        if self.cut_answers:
            lines.append(("answers cut", f"{self.cut_answers:,}"))
        if self.cut_texts:
            lines.append(("texts cut", f"{self.cut_texts:,} ({self.cut_text_tokens:,} tokens)"))
        lines += [(f"dropped: {reason}", f"{count:,}") for reason, count in self.dropped.items()]
        if self.left_out_media:
            lines.append(("left out: images, video or sound", f"{self.left_out_media:,}"))
        if self.without_media:
            lines.append(("read without images, video or sound", f"{self.without_media:,}"))
        if self.duplicates:
            lines.append(("duplicates dropped", f"{self.duplicates:,}"))
        if self.other_side:
            lines.append(("on the other side of the split", f"{self.other_side:,}"))
        lines.append(("tokens", f"{self.tokens:,} (longest sample {self.longest_tokens:,})"))
        lines.append(("supervised tokens", f"{self.supervised_tokens:,} ({share:.1%})"))
        for name, records in self.records_per_difficulty.items():
            lines.append(
                (f"difficulty {name}", f"{records:,} ({records / max(self.records_kept, 1):.1%})")
            )
        return lines

    def table(self, title: str = "data") -> Table:
        """The start-up table, for rich."""
        from rich.table import Table

        table = Table(title=title, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in self.lines():
            table.add_row(name, value)
        return table
