"""Tables and JSON lines: cut along the history of a step, renamed, and kept byte for byte else."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.logs import trail
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.row_file import RowFile
from ckptsurgeon.logs.source import Cut, NewNames, Subject
from tests.support.cut_rows import cut, made

SAVED = 1_700_000_000.0
LOG = Subject("log", "it is left as it is")


def lines(steps: Iterable[int], start: float | None = None) -> bytes:
    """A row a step, one second apart."""
    rows = []
    for i, step in enumerate(steps):
        time = {} if start is None else {"timestamp": start + i}
        rows.append(json.dumps({"step": step, "loss": 1 / (step + 1), **time}) + "\n")
    return "".join(rows).encode()


def steps_of(data: bytes) -> list[int]:
    return [json.loads(line)["step"] for line in data.splitlines()]


def test_a_crash_a_restart_and_a_cut(tmp_path: Path) -> None:
    """Ten steps, a crash, a resume from 4: of step 6 only the second row counts."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(range(1, 11)) + lines(range(5, 9)))
    changes, warnings = RowFile(path, tmp_path).cut(Cut(Marks(6), "before"))
    new = made(tmp_path, changes)
    assert new["metrics.jsonl"] == lines(range(1, 5)) + lines((5, 6))
    assert new["before/metrics.jsonl"] == lines(range(5, 11)) + lines((7, 8))
    assert warnings == []
    path.write_bytes(new["metrics.jsonl"])
    assert RowFile(path, tmp_path).cut(Cut(Marks(6), "before")) == ([], [])


@pytest.mark.parametrize("name", ["global_step/max_steps", "iteration"])
def test_a_step_may_be_so_many_of_all(tmp_path: Path, name: str) -> None:
    """As in ms-swift's `logging.jsonl`, of its Trainer and of its Megatron."""
    rows = [json.dumps({"loss": 3.5, name: f"{step}/10"}) + "\n" for step in range(1, 11)]
    path = tmp_path / "logging.jsonl"
    path.write_text("".join(rows))
    assert cut(path, 4).decode() == "".join(rows[:4])


def test_the_time_of_the_save_says_which_branch(tmp_path: Path) -> None:
    """Both passed step 6; the checkpoint was there before the second began."""
    path = tmp_path / "metrics.jsonl"
    first, second = lines(range(1, 11), SAVED), lines(range(5, 9), SAVED + 1000)
    path.write_bytes(first + second)
    assert cut(path, 6, saved=SAVED + 6) == lines(range(1, 7), SAVED)
    assert steps_of(cut(path, 6, saved=SAVED + 2000)) == [1, 2, 3, 4, 5, 6]
    assert b"1700001001" in cut(path, 6, saved=SAVED + 2000)


def test_what_may_have_got_there_unlogged_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(range(2, 21, 4)) + lines((6, 10)))
    with pytest.raises(SurgeryError, match="two branches may hold step 13"):
        cut(path, 13)
    assert steps_of(cut(path, 15)) == [2, 6, 10, 14]
    path.write_bytes(lines(range(2, 21, 4), SAVED) + lines((6, 10), SAVED + 1000))
    assert b"1700001000" in cut(path, 13, saved=SAVED + 1100)
    assert b"1700001000" not in cut(path, 13, saved=SAVED + 4)


def test_a_table_keeps_its_header_and_what_it_does_not_understand(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    head = "epoch,lr-AdamW,step,train_loss,val_loss\r\n"
    rows = [f"0,,{s},{1 / (s + 1)},\r\n" for s in range(6)]
    rows.insert(3, "0,,,,0.25\r\n")  # names no step: it belongs to the row before it
    path.write_text(head + "".join(rows), newline="")
    source = RowFile(path, tmp_path)
    assert [stream.last for stream in source.streams()] == [5]
    new = made(tmp_path, source.cut(Cut(Marks(2), "old"))[0])
    assert new["metrics.csv"].decode() == head + "".join(rows[:4])
    assert new["old/metrics.csv"].decode() == head + "".join(rows[4:])


def test_lines_that_say_nothing_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = b'{"config": {"step": 3}}\nnot json\n'
    path.write_bytes(odd + lines((1, 2)) + b"{broken\n" + lines((3,)) + b"[4]\n" + b'{"step": 4')
    assert cut(path, 2) == odd + lines((1, 2)) + b"{broken\n"
    path.write_bytes(odd)
    changes, warnings = RowFile(path, tmp_path).cut(Cut(Marks(2)))
    assert changes == []
    assert warnings == ["metrics.jsonl stays as it is: nothing in it is known to count steps"]


def test_keys_are_renamed_at_the_top_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        b'{"step": 1, "loss" : 1.50, "inner": {"loss": 2}, "name": "loss"}\n',
        b'{"step": 2, "lo\\u0073s": 1e-3, "a\\"b": [{"loss": 1}]}\n',
        b'{"step": 3, "lr": 1}\n',
    ]
    path.write_bytes(b"".join(rows))
    source = RowFile(path, tmp_path)
    changes, counts = source.rename_keys(NewNames({"loss": "train/loss", 'a"b': "c", "step": "s"}))
    new = made(tmp_path, changes)["metrics.jsonl"].splitlines(keepends=True)
    assert new[0] == b'{"step": 1, "train/loss" : 1.50, "inner": {"loss": 2}, "name": "loss"}\n'
    assert new[1] == b'{"step": 2, "train/loss": 1e-3, "c": [{"loss": 1}]}\n'
    assert new[2] == rows[2]
    assert counts.events == {("loss", "train/loss"): 2, ('a"b', "c"): 1}
    with pytest.raises(UsageError, match="would both be"):
        source.rename_keys(NewNames({"lr": "loss"}))


def test_columns_are_renamed_in_the_header(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,loss,lr\n1,2.5,\n2,,3\n")
    changes, counts = RowFile(path, tmp_path).rename_keys(
        NewNames({"l(.*)": r"train, \1"}, regex=True)
    )
    new = made(tmp_path, changes)["metrics.csv"]
    assert new == b'step,"train, oss","train, r"\n1,2.5,\n2,,3\n'
    assert counts.events == {("loss", "train, oss"): 1, ("lr", "train, r"): 1}
    assert next(csv.DictReader(new.decode().splitlines()))["train, oss"] == "2.5"


STRETCH = st.tuples(st.integers(1, 30), st.integers(1, 12))


@given(st.lists(STRETCH, min_size=1, max_size=6), st.integers(0, 45))
def test_what_stays_is_one_history_without_a_step_back(
    stretches: list[tuple[int, int]], point: int
) -> None:
    """Whatever restarts left: no step after N, none twice, in the order of the steps; and what was
    cut once is not cut again."""
    steps = np.array([s for lo, length in stretches for s in range(lo, lo + length)], np.int64)
    nan = np.full(len(steps), np.nan)
    try:
        flags = trail.leading_to(steps, nan, Marks(point), LOG)
    except SurgeryError as refusal:
        assert "two branches" in refusal.what
        return
    kept = steps[flags]
    assert (kept <= point).all()
    assert (np.diff(kept) >= 0).all()
    assert trail.leading_to(kept, nan[flags], Marks(point), LOG).all()
    if steps[0] <= point:
        assert len(kept)


@given(
    updates=st.integers(2, 30),
    each=st.integers(1, 5),
    to=st.integers(0, 31),
    counted=st.sampled_from(["epochs", "nothing"]),
)
def test_a_validation_that_counts_epochs_goes_with_the_update_before_it(
    tmp_path_factory: pytest.TempPathFactory, updates: int, each: int, to: int, counted: str
) -> None:
    """As MMEngine's: `iter` and `step` agree, and a `step` alone is of an epoch, or 0."""
    told: list[tuple[int, str]] = []
    for n in range(1, updates + 1):
        told.append((n, json.dumps({"iter": n, "step": n, "loss": 1.0})))
        if n % each == 0:
            step = n // each if counted == "epochs" else 0
            told.append((n, json.dumps({"accuracy": 1.0, "step": step})))
    root = tmp_path_factory.mktemp("run")
    path = root / "scalars.json"
    path.write_text("".join(f"{line}\n" for _, line in told))
    (stream,) = RowFile(path, root).streams()
    assert stream.last == updates
    changes, _ = RowFile(path, root).cut(Cut(Marks(to, None, None, SAVED), None))
    left = made(root, changes).get("scalars.json", path.read_bytes()).decode().splitlines()
    assert left == [line for n, line in told if n <= to]
