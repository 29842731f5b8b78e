"""A JSON array read piece by piece against the same text read at once."""

from __future__ import annotations

import codecs
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.reading import file_kinds
from finetune.data.reading.file_kinds import array_records
from finetune.errors import DataError

VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.just('𝒳\\"é\n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """An array, often with something cut out, put in or put after it."""
    options = {"indent": draw(st.sampled_from([None, 0, 3])), "ensure_ascii": draw(st.booleans())}
    raw = json.dumps(draw(st.lists(VALUES, max_size=5)), **options).encode()
    raw += draw(st.sampled_from([b"", b"\n \n", b"]", b" x", b"\xff"]))
    begin, length = draw(st.integers(1, len(raw))), draw(st.sampled_from([0, 0, 1, 9]))
    put_in = draw(st.sampled_from([b"", b"", b",", b"-Infinity", b"1.5e+3", b"\xe4", b"\n{", b'"']))
    before = codecs.BOM_UTF8 * draw(st.booleans()) + b" \r\n" * draw(st.booleans())
    return before + raw[:begin] + put_in + raw[begin + length :]


def read(path: Path) -> tuple[list[Any], str]:
    records = []
    try:
        for line, record in array_records(path):
            records.append((line, repr(record)))
    except DataError as error:
        return records, str(error)
    return records, ""


@settings(max_examples=30, deadline=None)
@given(raw=texts(), chunk_bytes=st.integers(4, 40))
def test_the_size_of_the_pieces_changes_nothing(raw: bytes, chunk_bytes: int):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "a.json"
        path.write_bytes(raw)
        whole = read(path)
        patch.setattr(file_kinds, "CHUNK_BYTES", chunk_bytes)
        pieces = read(path)
    if "not UTF-8" in whole[1]:  # read at once, it is found before the first record
        assert pieces[1] == whole[1]
        return
    assert pieces == whole
    if not whole[1]:
        assert [record for _, record in whole[0]] == [
            repr(value) for value in json.loads(raw.decode("utf-8-sig"))
        ]


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
