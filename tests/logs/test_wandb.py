"""Offline runs of W&B: framed anew, cut, renamed, and read as what nobody vouches for."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon.errors import DamagedFile, SurgeryError, UsageError
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.source import Cut, NewNames
from ckptsurgeon.logs.wandb import framing, offline_run, record
from ckptsurgeon.logs.wandb.offline_run import OfflineRun, _Log
from ckptsurgeon.plans.edits import AnyChange, Aside, Span
from tests.support import cut_rows, wandb_files
from tests.support.wandb_files import framed, unframed, write_run


def run_of(root: Path) -> OfflineRun:
    (run,) = offline_run.found(sorted(root.rglob("*.wandb")), root)
    return run


def new_bytes(root: Path, changes: Iterable[AnyChange]) -> dict[str, bytes]:
    """The new bytes of each file; none of one that leaves."""
    every = list(changes)
    gone = [change for change in every if isinstance(change, Aside)]
    stay = [change for change in every if not isinstance(change, Aside)]
    return {**{change.file: b"" for change in gone}, **cut_rows.made(root, stay)}


def logged(data: bytes, kind: int, name: str = "train/global_step") -> list[float]:
    """The numbers of the records of a kind."""
    found = map(record.said, unframed(data))
    return [said.values.get(name, said.time) for said in found if said.kind == kind]


SIZES = st.lists(st.integers(0, 70_000), max_size=12)


@given(SIZES, st.data())
@settings(max_examples=60, deadline=None)
def test_any_records_can_be_taken_out_or_written_anew(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], choice: st.DataObject
) -> None:
    """Whatever is dropped or replaced: what is framed anew reads back as the records that were
    meant, and what is copied whole has the same bytes."""
    dice = random.Random(7)
    contents = [dice.randbytes(size) for size in sizes]
    path = tmp_path_factory.mktemp("framed") / "run-a.wandb"
    path.write_bytes(framed(contents))
    data = framing.opened(path)
    read = list(framing.records(data, path))
    assert [item.data for item in read] == contents
    new, expected = framing.Framed(path.name), []
    for item in read:
        what = choice.draw(st.sampled_from(("keep", "keep", "drop", "anew")))
        if what == "keep":
            new.copy(item)
            expected.append(item.data)
        elif what == "anew":
            new.write(item.data[::-1])
            expected.append(item.data[::-1])
    made = b"".join(
        path.read_bytes()[piece.start : piece.end] if isinstance(piece, Span) else piece
        for piece in new.pieces
        if isinstance(piece, (Span, bytes))
    )
    assert unframed(made) == expected
    assert made == framed(expected)


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), max_size=120), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_rows_of_records_can_be_copied(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, bool]], renamed: bool
) -> None:
    """Many short records, and a few that span blocks: whichever stay, the new file is the one that
    W&B would have written of them, byte for byte; a run gets its new id."""
    contents = [
        wandb_files.of_run("abc")
        if size % 50 == 7
        else wandb_files.history({"_step": i, "text": "x" * size * (20 if size % 90 == 1 else 1)})
        for i, (size, _) in enumerate(rows)
    ]
    path = tmp_path_factory.mktemp("rows") / "run-a.wandb"
    path.write_bytes(framed(contents))
    flags = np.array([stays for _, stays in rows], bool)
    pieces = _Log(path).framed(path.name, flags, "new" if renamed else "").pieces
    made = b"".join(
        path.read_bytes()[piece.start : piece.end] if isinstance(piece, Span) else piece
        for piece in pieces
        if isinstance(piece, (Span, bytes))
    )
    old, new = wandb_files.of_run("abc"), record.with_id(wandb_files.of_run("abc"), "new")
    meant = [content for content, (_, stays) in zip(contents, rows, strict=True) if stays]
    assert made == framed([new if renamed and item == old else item for item in meant])


def test_a_crash_a_restart_and_a_cut(tmp_path: Path) -> None:
    """Ten steps in one file; a second that was resumed from 4. Back at 6, the first keeps its four,
    the second its two, and each summary and each metric of the system that goes with them."""
    first = write_run(tmp_path, range(1, 11))
    second = write_run(tmp_path, range(5, 9), time=1_700_001_000)
    assert [stream.last for stream in run_of(tmp_path).streams()] == [8]
    changes, warnings = run_of(tmp_path).cut(Cut(Marks(6), "before"))
    assert warnings == []
    new = new_bytes(tmp_path, changes)
    one, two = (new[str(path.relative_to(tmp_path))] for path in (first, second))
    for kind in (record.HISTORY, record.SUMMARY):
        assert logged(one, kind) == [1, 2, 3, 4]
        assert logged(two, kind) == [5, 6]
    assert logged(one, record.STATS) == [1_700_000_000 + i for i in range(4)]
    cut = new["wandb/offline-run-1700000000-abc-before/run-abc-before.wandb"]
    assert logged(cut, record.HISTORY) == [5, 6, 7, 8, 9, 10]
    assert b"abc-before" in unframed(cut)[1]
    for path in (first, second):
        path.write_bytes(new[str(path.relative_to(tmp_path))])
    assert run_of(tmp_path).cut(Cut(Marks(6), "before")) == ([], [])


def test_a_file_without_a_point_of_the_history_leaves(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 11))
    second = write_run(tmp_path, range(5, 9), time=1_700_001_000)
    new = new_bytes(tmp_path, run_of(tmp_path).cut(Cut(Marks(3)))[0])
    assert new[str(second.relative_to(tmp_path))] == b""
    (left,) = (data for data in new.values() if data)
    assert logged(left, record.HISTORY) == [1, 2, 3]


def test_what_a_server_has_stays_and_the_words_to_type_are_said(tmp_path: Path) -> None:
    path = write_run(tmp_path, range(1, 11))
    path.with_name("run-abc.wandb.synced").touch()
    changes, warnings = run_of(tmp_path).cut(Cut(Marks(6)))
    assert changes == []
    assert 'wandb.init(fork_from="abc?_step=5")' in warnings[0]
    assert 'WANDB_FORK_FROM="abc?_step=5"' in warnings[0]
    assert 'wandb.init(id="abc", resume_from="abc?_step=5")' in warnings[0]
    assert 'WANDB_RUN_ID="abc" WANDB_RESUME_FROM="abc?_step=5"' in warnings[0]
    assert run_of(tmp_path).rename_keys(NewNames({"loss": "x"}))[0] == []


def test_names_are_new_in_points_and_summaries(tmp_path: Path) -> None:
    path = write_run(tmp_path, range(1, 5), more={"eval/acc": 1})
    changes, counts = run_of(tmp_path).rename_keys(NewNames({"loss": "train/loss", "_step": "s"}))
    (new,) = new_bytes(tmp_path, changes).values()
    assert counts.events == {("loss", "train/loss"): 4}
    for kind in (record.HISTORY, record.SUMMARY):
        assert logged(new, kind, "train/loss") == [2 / s for s in range(1, 5)]
        assert logged(new, kind, "eval/acc") == [1] * 4
        assert logged(new, kind) == [1, 2, 3, 4]
    old = unframed(path.read_bytes())
    assert [a == b for a, b in zip(old, unframed(new), strict=True)].count(False) == 8
    with pytest.raises(UsageError, match="would both be"):
        run_of(tmp_path).rename_keys(NewNames({"loss": "eval/acc"}))


def test_an_unfinished_end_is_no_damage_and_a_bad_middle_is(tmp_path: Path) -> None:
    path = write_run(tmp_path, range(1, 2000))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    (new,) = new_bytes(tmp_path, run_of(tmp_path).cut(Cut(Marks(6)))[0]).values()
    assert logged(new, record.HISTORY) == list(range(1, 7))
    path.write_bytes(whole[:40_000] + bytes([whole[40_000] ^ 1]) + whole[40_001:])
    with pytest.raises(DamagedFile):
        run_of(tmp_path).cut(Cut(Marks(6)))


@pytest.mark.long
def test_hostile_bytes_end_in_an_error_that_is_ours(tmp_path: Path) -> None:
    """Bytes changed, cut and doubled; and records of any bytes in a frame that is right."""
    dice = random.Random(3)
    path = write_run(tmp_path, range(1, 40))
    whole = path.read_bytes()
    records = unframed(whole)
    refused = 0
    for i in range(300):
        if i % 2:
            data = bytearray(whole)
            for _ in range(dice.randint(1, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            path.write_bytes(data[: dice.randint(7, len(data))])
        else:
            odd = [bytearray(item) for item in records]
            for item in dice.sample(odd, 10):
                for _ in range(dice.randint(1, 6)):
                    if item:
                        item[dice.randrange(len(item))] = dice.randrange(256)
            path.write_bytes(framed(map(bytes, odd)))
        try:
            run = run_of(tmp_path)
            run.streams()
            new = new_bytes(tmp_path, run.cut(Cut(Marks(dice.randint(0, 50)), "x"))[0])
            for data in filter(None, new.values()):
                unframed(data)
            run.rename_keys(NewNames({"loss": "x"}))
        except SurgeryError:
            refused += 1
    assert 50 < refused < 250


def test_of_two_numbers_of_one_name_the_last_counts(tmp_path: Path) -> None:
    folder = tmp_path / "wandb/offline-run-1-a"
    folder.mkdir(parents=True)
    first = wandb_files.bytes_field(1, wandb_files.item("_step", 9))
    points = [wandb_files.history({"loss": 1.0, "_step": step}) for step in range(5)]
    twice = [wandb_files.bytes_field(2, first + point[2:]) for point in points]
    assert [record.said(item).values["_step"] for item in twice] == list(range(5))
    (folder / "run-a.wandb").write_bytes(framed(twice))
    (new,) = new_bytes(tmp_path, run_of(tmp_path).cut(Cut(Marks(2)))[0]).values()
    assert logged(new, record.HISTORY, "_step") == [0, 1, 2]


def test_no_step_is_ever_taken_for_another(tmp_path: Path) -> None:
    """W&B's own count is used only where nothing else counts updates."""
    folder = tmp_path / "wandb/offline-run-1-a"
    folder.mkdir(parents=True)
    points = [wandb_files.history({"loss": 1.0, "_step": step}) for step in range(5)]
    (folder / "run-a.wandb").write_bytes(framed(points))
    (new,) = new_bytes(tmp_path, run_of(tmp_path).cut(Cut(Marks(2)))[0]).values()
    assert logged(new, record.HISTORY, "_step") == [0, 1, 2]
