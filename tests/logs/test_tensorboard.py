"""Cuts and renames of whole log directories, read back with TensorBoard's own reader."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ckptsurgeon.errors import DamagedFile, UsageError
from ckptsurgeon.logs import cut, note, rename
from ckptsurgeon.logs.source import Cut
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.plans.edits import Aside, Rewrite, Span
from tests.support.training_log import (
    START,
    Job,
    all_points,
    apply,
    marks,
    points,
    tf1,
    truth,
    write,
)

RECIPE = Path(__file__).parents[2] / "recipes" / "tags" / "bigscience-23.yaml"


def curve(directory: Path, tag: str) -> list[int]:
    """The steps of a scalar tag that TensorBoard shows."""
    found = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    events = found.Tensors(tag) if tag in found.Tags()["tensors"] else found.Scalars(tag)
    return [event.step for event in events]


def three(logs: Path, **options: object) -> tuple[Job, Job, Job]:
    """A crash, a rollback, and the launch after it."""
    a = Job(1, 40, START, evaluate=10, **options)  # type: ignore[arg-type]
    b = Job(31, 90, a.wall(40) + 600, evaluate=10, **options)  # type: ignore[arg-type]
    c = Job(61, 80, b.wall(90) + 600, evaluate=10, **options)  # type: ignore[arg-type]
    for job in (a, b, c):
        write(logs, job)
    return a, b, c


def test_the_cut_branch_becomes_a_run_of_its_own(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    a, b, c = three(logs)
    before = all_points(logs)
    stay = (logs / a.name).read_bytes()
    changes, _ = cut.truncate(logs, tmp_path, marks(70, c.wall(70)), keep_as="tb-7k")
    assert [change.file for change in changes] == [
        f"logs/{a.name}",
        f"logs/{b.name}",
        f"logs/{c.name}",
        f"logs/tb-7k/{a.name}",
        f"logs/tb-7k-2/{b.name}",
        f"logs/tb-7k/{c.name}",
    ]
    apply(changes, tmp_path)
    tag = "lm-loss-training/lm loss"
    assert curve(logs, tag) == list(range(1, 71))
    # Two branches that overlap would hide each other in one run.
    assert curve(logs / "tb-7k", tag) == [*range(31, 41), *range(71, 81)]
    assert curve(logs / "tb-7k-2", tag) == list(range(61, 91))
    kept = all_points(logs / "tb-7k") + all_points(logs / "tb-7k-2")
    assert sorted(all_points(logs) + kept) == before
    assert stay.startswith((logs / a.name).read_bytes())  # whole records, nothing encoded anew
    for path in (*event_file.files(logs / "tb-7k"), *event_file.files(logs / "tb-7k-2")):
        assert event_file.scan(path).kinds[0] == 3


def test_a_wholly_cut_file_goes_aside_and_an_untouched_one_does_not_appear(tmp_path: Path) -> None:
    a, b, _ = three(tmp_path)
    changes, _ = cut.truncate(tmp_path, tmp_path, marks(60, b.wall(60)), keep_as=None)
    assert [type(change) for change in changes] == [Rewrite, Rewrite, Aside]
    apply(changes, tmp_path)
    changes, _ = cut.truncate(tmp_path, tmp_path, marks(35, b.wall(35)), keep_as=None)
    assert [change.file for change in changes] == [b.name]
    apply(changes, tmp_path)
    assert all_points(tmp_path) == truth((a, 30), (b, 35))


def test_plans_speak_from_the_root_of_the_run(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    _, b, _ = three(logs)
    root = tmp_path / "checkpoints"
    changes, _ = cut.truncate(logs, root, marks(60, b.wall(60)), keep_as="cut")
    assert all(change.file.startswith("../logs/") for change in changes)
    spans = [
        piece
        for change in changes
        if isinstance(change, Rewrite)
        for piece in change.content.pieces
        if isinstance(piece, Span)
    ]
    assert all(span.file.startswith("../logs/events") for span in spans)


def test_the_distance_between_both_clocks_survives_a_cut(tmp_path: Path) -> None:
    a, _, _ = three(tmp_path)
    path = tmp_path / a.name
    os.utime(path, (a.wall(40) + 2 * 3600, a.wall(40) + 2 * 3600))
    changes, _ = cut.truncate(tmp_path, tmp_path, marks(20, a.wall(20)), keep_as=None)
    apply(changes, tmp_path)
    assert path.stat().st_mtime == pytest.approx(a.wall(20) + 2 * 3600)


def test_a_torn_tail_in_the_history_is_cut_and_told(tmp_path: Path) -> None:
    a = Job(1, 20, START, torn=17)
    path = write(tmp_path, a)
    size = path.stat().st_size
    changes, warnings = cut.truncate(tmp_path, tmp_path, marks(20), keep_as="cut")
    apply(changes, tmp_path)
    assert path.stat().st_size == size - 17
    assert any("17 bytes" in line for line in warnings)
    assert cut.truncate(tmp_path, tmp_path, marks(20), keep_as="cut") == ([], [])


def test_a_file_of_nothing_but_a_torn_record(tmp_path: Path) -> None:
    write(tmp_path, Job(1, 20, START))
    (tmp_path / "events.out.tfevents.1.a.1.0").write_bytes(b"\x18\0\0")
    changes, _ = cut.truncate(tmp_path, tmp_path, marks(20), keep_as="cut")
    apply(changes, tmp_path)
    assert cut.truncate(tmp_path, tmp_path, marks(20), keep_as="cut") == ([], [])


def test_damage_is_refused_and_salvage_leaves_it_out(tmp_path: Path) -> None:
    a = Job(1, 20, START, logged=tf1)
    path = write(tmp_path, a)
    data = bytearray(path.read_bytes())
    start, _ = event_file.scan(path).span(8)
    data[start + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile) as refusal:
        cut.truncate(tmp_path, tmp_path, marks(15), keep_as=None)
    assert refusal.value.offset == start
    changes, warnings = cut.truncate(tmp_path, tmp_path, marks(15), keep_as="cut", salvage=True)
    apply(changes, tmp_path)
    expected = truth((a, 15))
    assert [point for point in expected if point not in points(path)] == [a.points[7][0]]
    assert any("damaged" in line for line in warnings)
    assert len(all_points(tmp_path / "cut")) == 15


def test_the_name_of_the_cut_branch_is_checked(tmp_path: Path) -> None:
    a, *_ = three(tmp_path)
    for name in ("", "..", "a/b", "old-tfevents"):
        with pytest.raises(UsageError):
            Cut(marks(20, a.wall(20)), keep_as=name)
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="taken exists"):
        cut.truncate(tmp_path, tmp_path, marks(20, a.wall(20)), keep_as="taken")


def test_the_23_tags_of_the_chronicles(tmp_path: Path) -> None:
    pairs = yaml.safe_load(RECIPE.read_text())
    assert len(pairs) == len(set(pairs.values())) == 23
    assert not set(pairs) & set(pairs.values())

    def old_names(job: Job, iteration: int):  # type: ignore[no-untyped-def]
        for tag in pairs:
            yield tag, iteration, 1.0

    for first in (1, 11):
        write(tmp_path, Job(first, first + 9, START + first * 100, logged=old_names))
    changes, counts = rename.rename(tmp_path, tmp_path, pairs)
    assert len(changes) == 2
    assert set(counts.events.values()) == {20}
    assert counts.unmatched == ()
    apply(changes, tmp_path)
    assert Counter(tag for tag, *_ in all_points(tmp_path)) == dict.fromkeys(pairs.values(), 20)
    assert rename.rename(tmp_path, tmp_path, pairs)[0] == []


def test_a_rename_keeps_times_and_tells_keys_without_events(tmp_path: Path) -> None:
    path = write(tmp_path, Job(1, 9, START))
    mtime = path.stat().st_mtime_ns
    pairs = {"grad-norm/grad-norm": "g", "grad norm": "g2"}
    changes, counts = rename.rename(tmp_path, tmp_path, pairs)
    apply(changes, tmp_path)
    assert path.stat().st_mtime_ns == mtime
    assert counts.unmatched == ("grad norm",)
    assert counts.sentences() == [
        "grad-norm/grad-norm → g: 9 events",
        "no event has the tag 'grad norm'",
    ]


def test_patterns_and_texts(tmp_path: Path) -> None:
    write(tmp_path, Job(1, 9, START))
    _, counts = rename.rename(
        tmp_path, tmp_path, {r"lm-loss-training/(.*)": r"train/\1"}, regex=True
    )
    assert sum(counts.events.values()) == 36
    assert ("lm-loss-training/lm loss vs tokens", "train/lm loss vs tokens") in counts.events
    _, counts = rename.rename(tmp_path, tmp_path, {"lr": "arguments/lr"})
    assert list(counts.events) == [("lr/text_summary", "arguments/lr/text_summary")]
    with pytest.raises(UsageError, match="empty"):
        rename.rename(tmp_path, tmp_path, {"grad-norm/grad-norm": ""})
    with pytest.raises(UsageError, match="regular expression"):
        rename.rename(tmp_path, tmp_path, {"(": "x"}, regex=True)


def test_two_tags_do_not_become_one_unasked(tmp_path: Path) -> None:
    write(tmp_path, Job(1, 9, START))
    into_existing = {"grad-norm/grad-norm": "iteration-time/iteration-time"}
    two = {"grad-norm/grad-norm": "x", "iteration-time/iteration-time": "x"}
    for pairs in (into_existing, two):
        with pytest.raises(UsageError, match="would"):
            rename.rename(tmp_path, tmp_path, pairs)
        assert rename.rename(tmp_path, tmp_path, pairs, allow_merge=True)[0]


def test_an_old_name_in_one_file_and_the_new_in_another_is_one_curve(tmp_path: Path) -> None:
    a = Job(1, 9, START, logged=tf1)
    write(tmp_path, a)
    apply(rename.rename(tmp_path, tmp_path, {"loss": "train/loss"})[0], tmp_path)
    write(tmp_path, Job(10, 15, START + 999, logged=tf1))
    changes, _ = rename.rename(tmp_path, tmp_path, {"loss": "train/loss"})
    assert len(changes) == 1
    apply(changes, tmp_path)
    assert curve(tmp_path, "train/loss") == list(range(1, 16))


def test_a_file_from_a_slow_clock_is_named_so_that_it_is_read_in_its_turn(tmp_path: Path) -> None:
    a = Job(1, 40, START)
    b = Job(31, 60, a.wall(40) + 600, skew=-55 * 3600)
    write(tmp_path, a)
    write(tmp_path, b)
    assert b.name < a.name
    changes, _ = cut.truncate(tmp_path, tmp_path, marks(50, b.wall(50)), keep_as=None)
    assert [type(change) for change in changes] == [Aside, Rewrite, Rewrite]
    apply(changes, tmp_path)
    first, second = event_file.files(tmp_path)
    assert first.name == a.name
    assert second.name.endswith(".node31.4242.0")
    assert all_points(tmp_path) == truth((a, 30), (b, 50))
    assert curve(tmp_path, "grad-norm/grad-norm") == list(range(1, 51))
    assert cut.truncate(tmp_path, tmp_path, marks(50, b.wall(50)), keep_as=None)[0] == []


def test_a_note_stays_with_its_step_and_leaves_with_it(tmp_path: Path) -> None:
    a = Job(1, 40, START)
    write(tmp_path, a)
    for step in (30, 30, 20):
        apply([note.note(tmp_path, tmp_path, step, "why", a.wall(40) + 60)], tmp_path)
    notes = [path.name for path in event_file.files(tmp_path) if "ckptsurgeon" in path.name]
    assert len(notes) == 3
    changes, _ = cut.truncate(tmp_path, tmp_path, marks(30, a.wall(30)), keep_as="cut")
    assert [change.file for change in changes] == [a.name, f"cut/{a.name}"]
    apply(changes, tmp_path)
    changes, _ = cut.truncate(tmp_path, tmp_path, marks(25, a.wall(25)), keep_as="older")
    apply(changes, tmp_path)
    left = [point[1] for point in all_points(tmp_path) if point[0] == note.TAG]
    moved = [point[1] for point in all_points(tmp_path / "older") if point[0] == note.TAG]
    assert (left, moved) == ([20], [30, 30])
