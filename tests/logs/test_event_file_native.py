"""The native module and pure Python read, refuse, salvage and write the same on any bytes."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google_crc32c import python as in_python
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.logs.tensorboard import crc32c, event_file, renaming
from ckptsurgeon.logs.tensorboard.frame import frame
from tests.support.compiled import MADE, compiled, sources_in
from tests.support.training_log import scalar, text

MUTATIONS = 100_000
FEW = 5_000
SOURCES = Path(__file__).parents[2] / "csrc" / "events"

pytestmark = pytest.mark.skipif(event_file.native is None, reason="the native module is not built")
PATH = Path("events.out.tfevents.1")
NEW = {"loss": "train/loss", "loss vs samples": "x" * 130, "a/text_summary": ""}


def seeds() -> list[bytes]:
    """Payloads of every shape that a writer makes, and some that none does."""
    several = [scalar("loss", 1.0, False), scalar("accuracy", 0.5, True), scalar("loss", 2, False)]
    events = [
        Event(wall_time=1.5, file_version="brain.Event:2"),
        Event(wall_time=2.5, step=7, summary=Summary(value=[scalar("loss", 1, True)])),
        Event(wall_time=2.5, step=7, summary=Summary(value=[scalar("loss", 1, False)])),
        Event(wall_time=2.5, step=1 << 40, summary=Summary(value=several[:1])),
        Event(wall_time=3.5, step=-1, summary=Summary(value=[scalar("loss vs samples", 1, True)])),
        Event(step=300, summary=Summary(value=several)),
        Event(wall_time=4.0, step=70_000, summary=Summary(value=[scalar("t" * 140, 1, False)])),
        Event(wall_time=5.0, summary=Summary(value=[text("a/text_summary", "lr 6e-5" * 30)])),
        Event(wall_time=6.0, step=9, session_log=SessionLog(status=SessionLog.START)),
        Event(wall_time=7.0, summary=Summary(value=[Summary.Value(simple_value=1.0)])),
    ]
    layout = layout_pb2.Layout(
        category=[layout_pb2.Category(chart=[
            layout_pb2.Chart(multiline=layout_pb2.MultilineChartContent(tag=["loss", "lo.*"]))
        ])]
    )  # fmt: skip
    config = text("custom_scalars__config__", "")
    config.tensor.string_val[0] = layout.SerializeToString()
    events.append(Event(wall_time=8.0, summary=Summary(value=[config])))
    events.append(Event(wall_time=8.0, summary=Summary(value=[*several, config, *several])))
    empty = Summary.Value(tag="custom_scalars__config__")
    events.append(Event(wall_time=8.0, summary=Summary(value=[empty])))
    return [event.SerializeToString() for event in events] + [b"", b"\x2a\x00", b"\x2a\x02\x0a\x00"]


def mutated(dice: random.Random, payloads: list[bytes]) -> bytes:
    """A file of a few records with flipped bits, cut or doubled bytes; mostly with checksums that
    hold, so that the messages themselves are put to the test."""
    chosen = [bytearray(dice.choice(payloads)) for _ in range(dice.randint(1, 4))]
    for _ in range(dice.randint(0, 3)):
        _mutate(dice, dice.choice(chosen))
    data = bytearray(b"".join(frame(bytes(payload)) for payload in chosen))
    if dice.random() < 0.3:
        _mutate(dice, data)
    if dice.random() < 0.1:
        data += bytes(dice.randint(1, 40))
    return bytes(data)


def _mutate(dice: random.Random, data: bytearray) -> None:
    if not data:
        return
    at = dice.randrange(len(data))
    kind = dice.randrange(5)
    if kind == 0:
        data[at] ^= 1 << dice.randrange(8)
    elif kind == 1:
        data[at] = dice.choice((0, 1, 0x09, 0x0A, 0x10, 0x2A, 0x7F, 0x80, 0xFF))
    elif kind == 2:
        del data[at : at + dice.randint(1, 12)]
    elif kind == 3:
        data[at:at] = data[at : at + dice.randint(1, 12)]
    else:
        data[at:at] = bytes((0x80,)) * dice.randint(1, 10)


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except DamagedFile as error:
        return error.offset, error.what


def read(data: bytes, salvage: bool) -> Any:
    found = event_file.index(data, PATH, salvage=salvage)
    columns = (found.offsets, found.steps, found.walls, found.tags, found.kinds)
    return found.end, found.names, [bytes(memoryview(column)) for column in columns]  # type: ignore[arg-type]


def renamed(data: bytes) -> Any:
    pieces: list[renaming.Piece] = []
    found = renaming.rename_data(data, PATH, lambda tag: NEW.get(tag, tag), pieces.append)
    parts = [piece if isinstance(piece, bytes) else data[slice(*piece)] for piece in pieces]
    return b"".join(parts), found


@pytest.mark.parametrize("count", [FEW, pytest.param(MUTATIONS, marks=pytest.mark.slow)])
@pytest.mark.long
def test_mutated_files_come_out_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    native = event_file.native
    dice = random.Random(count)
    payloads = seeds()
    refused = 0
    for number in range(count):
        data = mutated(dice, payloads)
        answers = []
        for module in (native, None):
            monkeypatch.setattr(event_file, "native", module)
            salvage = number % 4 == 0
            first = outcome(lambda: read(data, salvage))  # noqa: B023
            answers.append((first, outcome(lambda: renamed(data))))  # noqa: B023
        assert answers[0] == answers[1], data.hex()
        refused += len(answers[0][1]) == 2 and isinstance(answers[0][1][0], int)
    assert count // 10 < refused < count * 9 // 10


def test_all_checksums_agree() -> None:
    for size in (0, 1, 7, 8, 9, 63, 1000):
        data = bytes(i * 7 & 255 for i in range(size))
        assert event_file.native.by_table(data) == in_python.value(data) == crc32c.value(data)
        assert event_file.native.masked(data) == crc32c.masked(data)


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(frame(payload) for payload in seeds() * 20)
    whole = renamed(data)
    for module in (event_file.native, None):
        monkeypatch.setattr(event_file, "native", module)
        for chunk in (1, 100, 1000):
            monkeypatch.setattr(renaming, "CHUNK", chunk)
            assert renamed(data) == whole


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("count", [10_000, pytest.param(MUTATIONS, marks=pytest.mark.slow)])
def test_no_mutation_reads_outside_its_buffer(tmp_path: Path, count: int) -> None:
    """The fuzz target under the address and undefined-behaviour sanitizers, on mutated files."""
    flags = ["-std=c++17", "-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    program = compiled(["g++", *flags, "-DMUTATE", "fuzz.cpp"], sources_in(SOURCES)) / MADE
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, payload in enumerate(seeds()):
        (corpus / str(i)).write_bytes(frame(payload) + frame(seeds()[1]))
    done = subprocess.run(
        [str(program), str(count), *map(str, sorted(corpus.iterdir()))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"{count} mutations" in done.stdout
