"""Lines of loguru's `serialize=True` are read and cut as the same points in plain lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs import row_file, rows
from ckptsurgeon.logs.likely import likely
from tests.support.cut_rows import cut

BEGAN = 1_700_000_000.0


def line(number: int, message: str, extra: dict[str, Any]) -> str:
    """What loguru 0.7 writes, all of its keys."""
    time = BEGAN + number
    record = {
        "elapsed": {"repr": "0:00:00.073802", "seconds": 0.073802}, "exception": None,
        "extra": extra, "file": {"name": "t.py", "path": "/t.py"}, "function": "<module>",
        "level": {"icon": "i", "name": "INFO", "no": 20}, "line": 6, "message": message,
        "module": "t", "name": "__main__", "process": {"id": 8030, "name": "MainProcess"},
        "thread": {"id": 139923896228736, "name": "MainThread"},
        "time": {"repr": "2026-01-01 07:09:23.391825+00:00", "timestamp": time},
    }  # fmt: skip
    text = f"2026-01-01 07:09:23.391 | INFO     | __main__:<module>:6 - {message}\n"
    return json.dumps({"text": text, "record": record}) + "\n"


def written(folder: Path, steps: list[int], bound: bool) -> tuple[Path, Path]:
    """A log of loguru, with other lines in between, and the same points as plain lines."""
    told, plain = folder / "told.jsonl", folder / "plain.jsonl"
    texts, points = [line(0, "starting", {})], []
    for i, step in enumerate(steps, 1):
        loss, message = 2 + 1 / (i + 1), "train"
        extra: dict[str, Any] = {"step": step, "loss": loss} if bound else {}
        if not bound:
            message = f"step {step} | loss {loss} | lr 1.0e-03"
        texts.append(line(i, message, extra))
        points.append(json.dumps({"step": step, "loss": loss, "timestamp": BEGAN + i}) + "\n")
    told.write_text("".join(texts))
    plain.write_text("".join(points))
    return told, plain


def left(path: Path, step: int) -> list[int] | str:
    """The steps that a cut leaves, or that it is refused."""
    try:
        path.write_bytes(cut(path, step))
    except SurgeryError as error:
        return error.what.replace(path.name, "")
    return row_file.ending(path)


@pytest.mark.parametrize("bound", [True, False])
@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(2, 20)), min_size=1, max_size=3),
    step=st.integers(0, 40),
)
def test_it_is_read_and_cut_as_plain_lines(
    tmp_path_factory: pytest.TempPathFactory,
    bound: bool,
    spans: list[tuple[int, int]],
    step: int,
) -> None:
    steps = [number for begin, many in spans for number in range(begin, begin + many)]
    told, plain = written(tmp_path_factory.mktemp("log"), steps, bound)
    one, other = (rows.of_file(path, {}).kept["loss"] for path in (told, plain))
    assert (
        one.steps.tolist() == other.steps.tolist() and one.values.tolist() == other.values.tolist()
    )
    found = likely(plain)
    assert found is None or not found.cut or likely(told) == found
    assert left(told, step) == left(plain, step)


@given(spans=st.lists(st.tuples(st.integers(0, 90), st.integers(3, 20)), min_size=1, max_size=5))
def test_a_log_that_was_resumed_may_be_cut(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
) -> None:
    """Each start goes back as far as it likes."""
    steps = [number for begin, many in spans for number in range(begin, begin + many)]
    _, plain = written(tmp_path_factory.mktemp("log"), steps, bound=True)
    found = likely(plain)
    assert found is not None and found.cut and found.by == f"steps, up to {max(steps)}"
