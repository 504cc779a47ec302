"""Event files of TensorBoard's own writers: indexed, cut at borders, damage told apart."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from google_crc32c import python as in_python

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.logs.tensorboard import crc32c, event_file, frame, message
from ckptsurgeon.logs.tensorboard.event_file import DROPPED, Index
from tests.support.training_log import START, Job, points, write


@pytest.fixture(params=["native", "python"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with the native module, where it was built, and without it."""
    if request.param == "python":
        monkeypatch.setattr(event_file, "native", None)
    elif event_file.native is None:
        pytest.skip("the native module is not built")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Index]:
    """A file of 30 iterations, its bytes and its index."""
    path = write(tmp_path_factory.mktemp("log"), Job(1, 30, START))
    return path, path.read_bytes(), event_file.scan(path)


def read(index: Index) -> list[tuple[str, int, float]]:
    return [
        (tag, index.steps[i], index.walls[i])
        for i in range(len(index))
        if index.tags[i] >= 0
        for tag in index.names[index.tags[i]]
    ]


def test_both_checksums_agree() -> None:
    """Of the library: in C, and where it was installed without it."""
    assert in_python.value(b"123456789") == 0xE3069283
    for size in (0, 1, 7, 8, 9, 300):
        data = bytes(range(256)) * 2
        assert in_python.value(data[:size]) == crc32c.value(data[:size])


def test_the_index_holds_what_tensorboard_reads(log: tuple[Path, bytes, Index]) -> None:
    path, _, index = log
    assert read(index) == points(path)
    assert index.kinds[0] == 3
    assert index.end == index.size
    assert index.torn == 0


def test_what_torch_writes(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with SummaryWriter(str(tmp_path)) as writer:
            for step in range(3):
                writer.add_scalar("old style", step, step)
                writer.add_scalar("lm loss vs samples", step, step * 10**12, new_style=True)
            writer.add_scalar("a step below zero", 1.0, -5)
            writer.add_text("arguments", "lr 6e-5", 7)
            writer.add_histogram("weights", np.arange(99.0), 2)
            writer.add_image("x" * 200, np.zeros((3, 8, 8)), 3)
            writer.add_hparams({"lr": 1.0}, {"loss": 2.0}, run_name="trial")
            writer.add_custom_scalars_multilinechart(["old style"])
            writer.add_pr_curve("curve", np.array([0, 1]), np.array([0.2, 0.9]), 1)
    (path,) = event_file.files(tmp_path)
    index = event_file.scan(path)
    assert read(index) == points(path)
    (trial,) = event_file.files(tmp_path / "trial")
    assert ("_hparams_/session_start_info", 0) in [(tag, step) for tag, step, _ in points(trial)]
    assert read(event_file.scan(trial)) == points(trial)


def test_files_are_read_in_tensorboards_order(tmp_path: Path) -> None:
    names = ["events.out.tfevents.9.b", "events.out.tfevents.10.a", "x.tfevents.new"]
    for name in [*names, "events.out.tfevents.1.a.1.profile-empty", "events.out"]:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "tfevents.folder").mkdir()
    assert [path.name for path in event_file.files(tmp_path)] == sorted(names)


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"")
    assert (len(event_file.scan(path)), event_file.scan(path).torn) == (0, 0)


def test_any_cut_tail_is_torn_and_the_rest_whole(
    log: tuple[Path, bytes, Index], tmp_path: Path
) -> None:
    _, data, index = log
    path = tmp_path / "events.out.tfevents.1"
    start, end = index.span(40)
    for size in range(start, end + 1):
        path.write_bytes(data[:size])
        found = event_file.scan(path)
        assert found.end == (end if size == end else start)
        assert found.torn == (0 if size in (start, end) else size - start)


def test_zeros_to_the_end_are_a_torn_tail(log: tuple[Path, bytes, Index], tmp_path: Path) -> None:
    _, data, index = log
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(data + bytes(200_000))
    assert event_file.scan(path).torn == 200_000
    path.write_bytes(data[:-3] + b"\0\0\0")
    assert event_file.scan(path).end == index.span(len(index) - 1)[0]


def test_a_flipped_bit_is_refused_with_its_offset(
    log: tuple[Path, bytes, Index], tmp_path: Path
) -> None:
    _, data, index = log
    path = tmp_path / "events.out.tfevents.1"
    start, end = index.span(20)
    for at in range(start, end):
        broken = bytearray(data)
        broken[at] ^= 4
        path.write_bytes(broken)
        with pytest.raises(DamagedFile) as refusal:
            event_file.scan(path)
        assert refusal.value.offset == start
        assert str(path) in str(refusal.value)


def test_salvage_leaves_out_just_the_bad_record(
    log: tuple[Path, bytes, Index], tmp_path: Path
) -> None:
    _, data, index = log
    path = tmp_path / "events.out.tfevents.1"
    start, end = index.span(20)
    for at in (start, start + 9, start + 14, end - 1):  # length, its checksum, payload, checksum
        broken = bytearray(data)
        broken[at] ^= 255
        path.write_bytes(broken)
        found = event_file.scan(path, salvage=True)
        assert found.dropped() == [(start, end)]
        assert len(found) == len(index)
        assert found.kinds[20] == DROPPED
        kept = event_file.spans(found, [True] * len(found))
        assert b"".join(broken[a:b] for a, b in kept) == data[:start] + data[end:]


def test_zeros_are_passed_over_at_once(
    log: tuple[Path, bytes, Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands before them: the head of a record that is too long, or bytes of another."""
    _, data, _ = log
    looked = []
    judge = frame._bad_header
    monkeypatch.setattr(frame, "_bad_header", lambda head: looked.append(1) or judge(head))
    for zeros in (1 << 16, 1 << 24):
        for rest in (b"", data):
            path = tmp_path / "events.out.tfevents.1.a"
            path.write_bytes(data + struct.pack("<Q", 1 << 31) + bytes(zeros) + rest)
            looked.clear()
            index = event_file.scan(path, salvage=True)
            assert len(index) >= 30 and len(looked) < 2 * len(index) + 100
            assert frame.first_good(data + bytes(zeros) + data, len(data)) == len(data) + zeros


def test_a_length_that_no_record_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    length = struct.pack("<Q", 1 << 60)
    good = event_file.version_record(1.0)
    path.write_bytes(good + length + struct.pack("<I", crc32c.masked(length)) + b"x" * 50)
    with pytest.raises(DamagedFile, match=f"byte {len(good)}: a record of {1 << 60} bytes"):
        event_file.scan(path)


def test_a_record_that_is_no_event_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(event_file.version_record(1.0) + event_file.frame(b"\x2a\x7fshort"))
    with pytest.raises(DamagedFile, match="not an event"):
        event_file.scan(path)
    assert len(event_file.spans(event_file.scan(path, salvage=True), [1, 1])) == 1


@pytest.mark.parametrize(
    ("wall", "step"),
    [(float("nan"), 3), (float("-inf"), 3), (1e300, 3), (START, -1 << 63), (START, (1 << 63) - 1)],
)
def test_an_event_of_an_impossible_time_or_step_is_refused_or_left_out(
    log: tuple[Path, bytes, Index], tmp_path: Path, wall: float, step: int
) -> None:
    """Nothing may be computed from it: it would decide which of two branches is the newer one."""
    _, data, index = log
    path = tmp_path / "events.out.tfevents.1"
    start = index.span(20)[0]
    bad = event_file.frame(message.text_event(wall, step % (1 << 64), "note", "x"))
    path.write_bytes(data[:start] + bad + data[start:])
    with pytest.raises(DamagedFile, match=f"byte {start}: an event of step {step}"):
        event_file.scan(path)
    found = event_file.scan(path, salvage=True)
    assert found.dropped() == [(start, start + len(bad))]
    assert read(found) == read(index)
    assert np.isfinite(found.walls).all()


def test_spans_join_neighbours(log: tuple[Path, bytes, Index]) -> None:
    _, data, index = log
    kept = [True, True, False, False, True] + [False] * (len(index) - 6) + [True]
    assert event_file.spans(index, kept) == [
        (0, index.offsets[2]),
        index.span(4),
        (index.offsets[len(index) - 1], len(data)),
    ]


def test_the_record_that_starts_an_archive_is_one_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(event_file.version_record(12.5))
    (event,) = LegacyEventFileLoader(str(path)).Load()
    assert (event.file_version, event.wall_time) == ("brain.Event:2", 12.5)
