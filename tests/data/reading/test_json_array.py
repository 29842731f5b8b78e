"""A JSON array read piece by piece against the same text read at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.data.reading import file_kinds
from finetune.data.reading.file_kinds import array_records
from finetune.errors import DataError

VALUE = {"a": [1.5e10, '𝒳\\"é\n', None, True, {}], "": -12}
WHOLE = [
    *(json.dumps([VALUE, 7, -0.25, VALUE], indent=indent).encode() for indent in (None, 0, 3)),
    json.dumps([VALUE, "𝒳" * 9], ensure_ascii=False).encode() + b"\n \n",
    b'\xef\xbb\xbf \r\n[-Infinity, 1e+30, [], "\\ud83d\\ude00"]',
]
TEXTS = [
    *WHOLE,
    *(WHOLE[0] + end for end in (b"]", b" x", b"\xff")),
    *(WHOLE[2][:9] + put_in + WHOLE[2][9:] for put_in in (b",", b"\xe4", b"\n{", b'"')),
    *(WHOLE[1][:length] for length in (1, 9, 40, 90)),
]


def read(path: Path) -> tuple[list[Any], str]:
    records = []
    try:
        for line, record in array_records(path):
            records.append((line, repr(record)))
    except DataError as error:
        return records, str(error)
    return records, ""


def test_the_size_of_the_pieces_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    for raw in TEXTS:
        path.write_bytes(raw)
        with monkeypatch.context() as patch:
            whole = read(path)
            for chunk_bytes in range(4, 40, 3):
                patch.setattr(file_kinds, "CHUNK_BYTES", chunk_bytes)
                records, error = read(path)
                assert error == whole[1]
                # read at once, it is found before the first record
                assert records == whole[0] or "not UTF-8" in error
        if raw in WHOLE:
            assert not whole[1]
            values = map(repr, json.loads(raw.decode("utf-8-sig")))
            assert [record for _, record in whole[0]] == list(values)


def test_a_number_may_go_on_in_the_next_piece(tmp_path, monkeypatch):
    """And only some of the text is held."""
    monkeypatch.setattr(file_kinds, "CHUNK_BYTES", 300)
    held = []
    extend: Callable[[Any], bool] = file_kinds._Text._extend
    noted = lambda text: (extend(text), held.append(len(text.text)))[0]  # noqa: E731
    monkeypatch.setattr(file_kinds._Text, "_extend", noted)
    numbers = [10**length + 0.5 for length in range(14)] * 200
    path = tmp_path / "a.json"
    path.write_text(json.dumps(numbers))
    assert [record for _, record in array_records(path)] == numbers
    assert len(held) > 50 and max(held) < 700
