"""A loop that evaluates at each start logs the loaded step again: its training loss is not lost."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.logs import rows
from tests.support.cut_rows import cut


def history(saves: list[tuple[int, int]], norm: bool) -> list[dict[str, float]]:
    """Starts, each of which goes on from a step that is `back` before the end, evaluates it, and
    makes `more` updates; the loss of an update is unique."""
    points: list[dict[str, float]] = []
    end, update = 0, 0
    for back, more in saves:
        start = max(end - back, 0)
        points.append({"step": start, "eval_loss": 3.0, **({"grad_norm": 1.0} if norm else {})})
        for step in range(start + 1, start + more + 1):
            update += 1
            points.append({"step": step, "loss": 2 + update / 1000})
        end = start + more
    return points


def kept(points: list[dict[str, float]], last: int) -> dict[int, float]:
    """The loss of each step on the way to `last`: what was said of it last."""
    there = [point for point in points if "loss" in point]
    return {int(point["step"]): point["loss"] for point in there if point["step"] <= last}


def text(points: list[dict[str, float]], table: bool) -> str:
    if not table:
        return "".join(f"{json.dumps(point)}\n" for point in points)
    out = io.StringIO()
    names = ["step", "loss", "eval_loss", "grad_norm"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    return out.getvalue()


@pytest.mark.parametrize("table", [False, True])
@given(
    saves=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=4),
    norm=st.booleans(),
    off=st.integers(0, 40),
)
def test_each_step_has_its_training_loss(
    tmp_path_factory: pytest.TempPathFactory,
    table: bool,
    saves: list[tuple[int, int]],
    norm: bool,
    off: int,
) -> None:
    points = history(saves, norm)
    log = tmp_path_factory.mktemp("log") / ("log.csv" if table else "log.jsonl")
    log.write_text(text(points, table))
    end = int(points[-1]["step"])
    loss = rows.of_file(log, {}).kept["loss"]
    assert dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True)) == kept(points, end)
    at = max(end - off, 1)
    left = cut(log, at).decode()
    log.write_text(left)
    loss = rows.of_file(log, {}).kept["loss"]
    assert dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True)) == kept(points, at)
