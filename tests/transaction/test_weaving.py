"""Numbers that lie in rows over several files are read as numpy would lay them side by side."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.plans.as_json import Malformed, from_json, to_json
from ckptsurgeon.plans.edits import Computed, Content
from ckptsurgeon.plans.sources import Columns, Woven
from ckptsurgeon.transaction import assumptions
from ckptsurgeon.transaction.weaving import Weaver


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Any, list[tuple[int, int, int]]]:
    """Rows of bytes, and how they are cut into columns: begin, end, bytes between two rows."""
    rows, width = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    whole = numpy.frombuffer(numpy.random.default_rng(rows).bytes(rows * width), "u1")
    edges = [0, *sorted(draw(st.sets(st.integers(1, width), max_size=3)) - {width}), width]
    gaps = [draw(st.sampled_from([0, 1, 7, 300])) for _ in pairwise(edges)]
    cuts = [(a, b, gap) for (a, b), gap in zip(pairwise(edges), gaps, strict=True)]
    return whole.reshape(rows, width), cuts


@given(matrices(), st.data())
def test_any_part_of_the_rows_is_read_in_any_pieces(matrix: Any, data: st.DataObject) -> None:
    whole, cuts = matrix
    start = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(start, whole.size))
    with TemporaryDirectory() as folder:
        columns = []
        for i, (left, right, gap) in enumerate(cuts):
            held = numpy.zeros((len(whole), right - left + gap), "u1")
            held[:, : right - left] = whole[:, left:right]
            data_of = held.tobytes()[: held.size - gap]  # nothing after the last row
            (Path(folder) / str(i)).write_bytes(b"before" + data_of)
            columns.append(Columns(str(i), 6, right - left, right - left + gap))
        woven = Woven(tuple(columns), start, end, "uint8")
        content = Content((Computed("copy", "uint8", end - start, ((woven,),)),))
        if end > start:
            assumptions._check_source(Path(folder), "new", content)
        room = memoryview(bytearray(max(1, end - start)))
        with Weaver(Path(folder), woven, room) as reader:
            read = b""
            while part := reader.next(data.draw(st.integers(1, max(1, end - start)))):
                read += part
    assert read == whole.tobytes()[start:end]


@st.composite
def turned(draw: st.DrawFn) -> tuple[Any, list[tuple[int, int, int]]]:
    """Rows of numbers, and which of their columns lie in each file, transposed, with so many bytes
    after each row of it."""
    rows, columns = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    kind = draw(st.sampled_from(["u1", "u2", "u4", "u8"]))
    dice = numpy.random.default_rng(rows)
    whole = dice.integers(0, 255, (rows, columns)).astype(kind) * (1 if kind == "u1" else 257)
    edges = [0, *sorted(draw(st.sets(st.integers(1, columns), max_size=3)) - {columns}), columns]
    gaps = [draw(st.sampled_from([0, 1, 7, 300])) for _ in pairwise(edges)]
    return whole, [(a, b, gap) for (a, b), gap in zip(pairwise(edges), gaps, strict=True)]


@given(turned(), st.data())
def test_a_transposed_matrix_is_read_as_numpy_has_it(matrix: Any, data: st.DataObject) -> None:
    """Any bytes of it, in any pieces, and no more of the files than it says."""
    whole, cuts = matrix
    item, size = whole.itemsize, whole.nbytes
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    with TemporaryDirectory() as folder:
        columns = []
        for i, (left, right, gap) in enumerate(cuts):
            held = [row.tobytes() for row in numpy.ascontiguousarray(whole[:, left:right].T)]
            (Path(folder) / str(i)).write_bytes(b"before" + (b"g" * gap).join(held))
            step = len(whole) * item + gap
            columns.append(Columns(str(i), 6, item, item, right - left, step))
        woven = Woven(tuple(columns), start, end, "float32")
        assert from_json(json.loads(json.dumps(woven, default=to_json))) == woven
        if end > start:
            content = Content((Computed("copy", "uint8", end - start, ((woven,),)),))
            assumptions._check_source(Path(folder), "new", content)
        with Weaver(Path(folder), woven, memoryview(bytearray(max(1, end - start)))) as reader:
            read = b""
            while part := reader.next(data.draw(st.integers(1, max(1, end - start)))):
                read += part
    assert read == whole.tobytes()[start:end]


def test_a_file_that_ends_before_is_told_by_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(50))
    woven = Woven((Columns("a", 0, 8, 16),), 0, 8 * 6, "float32")
    with Weaver(tmp_path, woven, memoryview(bytearray(64))) as reader:
        assert len(reader.next(48)) == 0
        assert woven.end == 48


@pytest.mark.parametrize("columns", [(), ((0, 8),), ((8, 4),), ((-8, 8),)])
def test_columns_that_no_matrix_has_are_malformed(columns: Any) -> None:
    good = to_json(Woven((Columns("a", 0, 8, 8),), 0, 8, "float32"))
    good["columns"] = [to_json(each) for each in good["columns"]]
    assert from_json(good) == Woven((Columns("a", 0, 8, 8),), 0, 8, "float32")
    good["columns"] = [
        {"kind": "Columns", "file": "a", "start": 0, "width": width, "stride": stride}
        for width, stride in columns
    ]
    with pytest.raises(Malformed):
        from_json(good)


def test_a_plan_that_reads_beyond_a_file_is_refused(tmp_path: Path) -> None:
    from ckptsurgeon.errors import SurgeryError

    (tmp_path / "a").write_bytes(bytes(100))
    for first, rows in ((0, 14), (90, 2), (-1, 2)):
        woven = Woven((Columns("a", first, 8, 8),), 0, 8 * rows, "float32")
        content = Content((Computed("copy", "float32", 8 * rows, ((woven,),)),))
        with pytest.raises(SurgeryError, match="the plan reads"):
            assumptions._check_source(tmp_path, "new", content)
