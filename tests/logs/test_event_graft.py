"""TF1 writes a tag's metadata once: what starts later still belongs to its dashboard."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ckptsurgeon.logs import cut
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.logs.tensorboard.graft import grafts
from tests.support.training_log import START, Job, apply, scalar, write


def tf1_log(path: Path) -> Path:
    """Steps 1 to 9 of two tags in one event each; metadata with the first of each tag only."""
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for step in range(1, 10):
            values = [scalar("loss", step, True), scalar("accuracy", step, True)]
            for value in values:
                if step > 1:
                    value.ClearField("metadata")
            event = Event(wall_time=1.0 + step, step=step, summary=Summary(value=values))
            writer.write(event.SerializeToString())
    return path


def dashboards(path: Path) -> list[tuple[int, str, str]]:
    return [
        (event.step, value.tag, value.metadata.plugin_data.plugin_name)
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


def test_the_cut_branch_of_a_tf1_log_keeps_its_dashboards(tmp_path: Path) -> None:
    path = tf1_log(tmp_path / "events.out.tfevents.1.host")
    changes, _ = cut.truncate(tmp_path, tmp_path, Marks(6), keep_as="cut")
    apply(changes, tmp_path)
    assert [row[0] for row in dashboards(path)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert dashboards(tmp_path / "cut" / path.name) == [
        (7, "loss", "scalars"),
        (7, "accuracy", "scalars"),
        *((step, tag, "") for step in (8, 9) for tag in ("loss", "accuracy")),
    ]


def test_only_a_missing_metadata_is_added(tmp_path: Path) -> None:
    index = event_file.scan(tf1_log(tmp_path / "events.out.tfevents.1.host"))
    assert grafts(index, [True] * 4 + [False] * 6) == {}
    assert list(grafts(index, [False] * 4 + [True] * 6)) == [4]
    assert list(grafts(index, [True, False, True, False, False, *[True] * 5])) == [2]
    torch = event_file.scan(write(tmp_path / "torch", Job(1, 9, START)))
    assert grafts(torch, [False] * 20 + [True] * (len(torch) - 20)) == {}
