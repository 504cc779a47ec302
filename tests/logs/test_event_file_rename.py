"""Tags under other names: the bytes that TensorBoard's own classes would write."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from ckptsurgeon.logs.tensorboard import event_file, renaming
from ckptsurgeon.logs.tensorboard.renaming import Piece, Renamed
from tests.support.training_log import START, Job, megatron, tf1, write


@pytest.fixture(params=["native", "python"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with the native module, where it was built, and without it."""
    if request.param == "python":
        monkeypatch.setattr(event_file, "native", None)
    elif event_file.native is None:
        pytest.skip("the native module is not built")


def by_protobuf(path: Path, pairs: Mapping[str, str]) -> bytes:
    """One pass per pair, each through TensorBoard's loader, protobuf and RecordWriter."""
    target = path.with_name("rewritten")
    for old, new in pairs.items():
        with target.open("wb") as file:
            writer = RecordWriter(file)
            for data in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(data)
                for value in event.summary.value:
                    if value.tag == old:
                        value.tag = new
                writer.write(event.SerializeToString())
        path = target.rename(target.with_name("pass"))
    return path.read_bytes()


def rename(path: Path, pairs: Mapping[str, str]) -> tuple[bytes, Renamed]:
    """The new bytes of a file."""
    pieces: list[Piece] = []
    renamed = renaming.rename(path, lambda tag: pairs.get(tag, tag), pieces.append)
    data = path.read_bytes()
    return b"".join(
        piece if isinstance(piece, bytes) else data[slice(*piece)] for piece in pieces
    ), renamed


def test_one_pass_is_byte_for_byte_one_pass_per_tag(tmp_path: Path) -> None:
    pairs = {
        "learning-rate/learning-rate": "lr",
        "grad-norm/grad-norm vs samples": "g" * 127,
        "lm-loss-training/lm loss": "a tag that is long enough for lengths of two bytes " * 4,
        "steps-vs-samples/y=steps,x=samples": "größe/y=steps,x=samples",
        "no such tag": "x",
    }
    for new_style in (True, False):
        path = write(tmp_path / str(new_style), Job(1, 25, START, new_style=new_style))
        new, renamed = rename(path, pairs)
        assert new == by_protobuf(path, pairs)
        assert renamed.counts == {
            (old, new): 25 for old, new in pairs.items() if old != "no such tag"
        }
        assert {"lr/text_summary", "iteration-time/world_size"} < renamed.tags


def test_events_with_several_values(tmp_path: Path) -> None:
    pairs = {"loss": "train/loss", "gradient": "g"}
    path = write(tmp_path, Job(1, 9, START, logged=tf1, together=True))
    new, renamed = rename(path, pairs)
    assert new == by_protobuf(path, pairs)
    assert set(renamed.counts.values()) == {9}


def test_histograms_images_and_text_keep_every_other_byte(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with SummaryWriter(str(tmp_path / "log")) as writer:
            writer.add_histogram("weights", np.arange(999.0), 2)
            writer.add_image("picture", np.zeros((3, 8, 8)), 3)
            writer.add_text("arguments", "lr 6e-5", 7)
    pairs = {"weights": "w/weights", "picture": "p" * 300, "arguments/text_summary": "a"}
    (path,) = event_file.files(tmp_path / "log")
    new, _ = rename(path, pairs)
    assert new == by_protobuf(path, pairs)


def test_names_are_given_simultaneously(tmp_path: Path) -> None:
    swap = {
        "grad-norm/grad-norm": "learning-rate/learning-rate",
        "learning-rate/learning-rate": "grad-norm/grad-norm",
    }
    path = write(tmp_path, Job(1, 5, START))
    data = path.read_bytes()
    path.write_bytes(rename(path, swap)[0])
    assert path.read_bytes() != data
    assert rename(path, swap)[0] == data


def test_a_torn_tail_stays(tmp_path: Path) -> None:
    path = write(tmp_path, Job(1, 5, START, logged=megatron, torn=21))
    new, _ = rename(path, {"grad-norm/grad-norm": "n"})
    assert new[-21:] == path.read_bytes()[-21:]


def test_without_a_match_the_file_is_one_piece(tmp_path: Path) -> None:
    path = write(tmp_path, Job(1, 5, START))
    pieces: list[Piece] = []
    renaming.rename(path, lambda tag: tag, pieces.append)
    assert pieces == [(0, path.stat().st_size)]
