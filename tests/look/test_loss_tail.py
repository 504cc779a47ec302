"""What `status` reads of the loss, on a terminal and in --json, is what `advise` reads."""

from __future__ import annotations

import csv
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon.look import loss_tail as glances
from ckptsurgeon.look.histories import HISTORIES
from ckptsurgeon.look.logged import own
from ckptsurgeon.look.loss_tail import loss_tail
from ckptsurgeon.run.run import Run
from tests.support.tiny_run import make_run

Entry = dict[str, Any]


def write(folder: Path, name: str, entries: Sequence[Entry]) -> Path:
    """A history of this name; a number that an entry lacks is an empty cell of a table."""
    path = folder / name
    if path.suffix == ".json":
        path.write_text(json.dumps({"global_step": 4, "log_history": entries}))
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    else:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, ["epoch", "grad_norm", "loss", "step", "val_loss"])
            table.writeheader()
            table.writerows(entries)
    return path


@st.composite
def histories(draw: st.DrawFn) -> list[Entry]:
    """Losses from point to point, a validation between them, and a restart that trains anew."""
    odd = st.sampled_from([0.0, math.nan, math.inf])
    losses = st.floats(0.5, 9.0) | odd
    entries: list[Entry] = []
    for first in (draw(st.integers(0, 3)), draw(st.integers(2, 30))):
        for step in range(first, first + draw(st.integers(1, 30))):
            norm = draw(st.sampled_from([1.0, math.nan]))
            entries.append({"step": step, "loss": draw(losses), "grad_norm": norm})
            if draw(st.booleans()):
                entries.append({"step": step, "val_loss": 1.0})
        if not draw(st.booleans()):
            break
    return entries


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(histories(), st.sampled_from(HISTORIES), st.booleans())
@pytest.mark.long
def test_a_glance_has_the_points_that_advise_judges(
    tmp_path: Path, entries: list[Entry], name: str, in_root: bool
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        root = make_run(Path(folder))
        write(root if in_root else root / "checkpoint-4", name, entries)
        seen, read = loss_tail(Run.open(root)), own(Run.open(root), {})
    loss = read.kept["loss"]
    assert seen is not None
    assert list(seen.steps) == loss.steps.tolist()
    assert list(seen.values) == pytest.approx(loss.values.tolist(), nan_ok=True)
    assert not (seen.whole and read.left)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=4),
    st.sampled_from(HISTORIES[1:]),
    st.sampled_from(["version_{}", "run-{:02}", "2026113{}"]),
)
@pytest.mark.long
def test_logs_that_each_start_began_are_read_as_one(
    tmp_path: Path, starts: list[tuple[int, int]], name: str, folders: str
) -> None:
    """As one file has them that each start goes on with; but a start that begins where the one
    before it did, or sooner, is another training."""
    rows = [
        [{"step": first + k, "loss": 1.0 + k + 10 * start} for k in range(points)]
        for start, (first, points) in enumerate(starts)
    ]
    anew = [k for k in range(1, len(rows)) if rows[k][0]["step"] <= rows[k - 1][0]["step"]]
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        apart, whole = make_run(Path(folder) / "apart"), make_run(Path(folder) / "whole")
        for start, entries in enumerate(rows):
            log = apart / "logs" / folders.format(start)
            log.mkdir(parents=True)
            write(log, name, entries)
        (whole / "logs" / "version_0").mkdir(parents=True)
        lasting = [entry for start in rows[max(anew, default=0) :] for entry in start]
        write(whole / "logs" / "version_0", name, lasting)
        for root in (apart, whole):
            for path in root.glob("**/trainer_state.json"):
                path.unlink()
        seen, read = loss_tail(Run.open(apart)), own(Run.open(apart), {})
        once, expected = loss_tail(Run.open(whole)), own(Run.open(whole), {})
    assert seen == once and seen is not None
    assert read.kept["loss"].steps.tolist() == expected.kept["loss"].steps.tolist()
    assert read.kept["loss"].values.tolist() == expected.kept["loss"].values.tolist()


@pytest.mark.parametrize("name", HISTORIES[1:])
def test_of_a_long_history_the_end_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(tmp_path)
    write(root, name, [{"step": k, "loss": 1 + 1 / (k + 1)} for k in range(2000)])
    whole = loss_tail(Run.open(root))
    monkeypatch.setattr(glances, "LINES", 4096)
    seen = loss_tail(Run.open(root))
    assert whole is not None and whole.whole and len(whole.steps) == 2000
    assert seen is not None and not seen.whole and 50 < len(seen.steps) < 400
    assert list(seen.values) == list(whole.values)[-len(seen.values) :]


@pytest.mark.parametrize("text", ["", "\n", "step,loss\n", 'step,loss\n1,"2', "\0" * 99, "{", "[]"])
@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_without_a_loss_is_none(tmp_path: Path, name: str, text: str) -> None:
    (make_run(tmp_path) / name).write_text(text)
    seen = loss_tail(Run.open(tmp_path))
    assert seen is None or seen.values == [2.0]
