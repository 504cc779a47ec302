"""Event files: CPU time of a cut and a rename as ratios, on 147 MB (31 tags, 2.5 M scalars).

TensorBoard's own classes (loader, protobuf, RecordWriter) work on the first 20th of the log, and
their time is scaled by the number of events. "Page-cache write" is writing the mapped file once.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.process import REPO, python
from bench.row import Row, ratio
from ckptsurgeon import disk
from ckptsurgeon.files.plain_yaml import read
from ckptsurgeon.logs.tensorboard import event_file, frame, renaming
from ckptsurgeon.logs.tensorboard.renaming import Piece

RECIPE = REPO / "recipes" / "tags" / "bigscience-23.yaml"
NAME = "events.out.tfevents.1600000000.host.1.0"
ITERATIONS = 80_600
SLICE = 20
TAGS = 31
ROUNDS = 7


def make_log(path: Path, iterations: int) -> None:
    """A log of Megatron's old tags: 23 that get new names and 8 others, a record per value."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    tags = [*read(RECIPE), *(f"activations/layer {i}/norm" for i in range(8))]
    with path.open("wb") as file:
        file.write(event_file.version_record(1.6e9))
        for iteration in range(1, iterations + 1):
            x = {"samples": iteration * 512, "gigaflos": iteration * 99_991}
            rows = []
            for number, tag in enumerate(tags):
                event = Event(
                    wall_time=1.6e9 + 3 * iteration + number / 1000,
                    step=x.get(tag.rpartition(" ")[2], iteration),
                    summary=Summary(value=[Summary.Value(tag=tag, simple_value=1 / iteration)]),
                )
                rows.append(frame.frame(event.SerializeToString()))
            file.write(b"".join(rows))


def cpu(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Least CPU seconds of this process: other load on the machine only adds to them."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


# --- what is measured ----------------------------------------------------------------------------


def write_mapped(source: Path, target: Path) -> None:
    with (
        source.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        target.open("wb", buffering=0) as out,
    ):
        out.write(data)


def cut(source: Path, target: Path) -> None:
    """Index the whole file and copy the first 60 % of its events, as a surgery does."""
    import numpy as np

    index = event_file.scan(source)
    kept = np.arange(len(index)) < len(index) * 6 // 10
    with target.open("wb", buffering=0) as out:
        at = 0
        for start, end in event_file.spans(index, kept):
            disk.copy_at(out.fileno(), target, at, source, start, end)
            at += end - start


def rename(source: Path, target: Path) -> None:
    pairs = read(RECIPE)
    with frame.Opened(source) as (data, _), target.open("wb", buffering=0) as out:

        def emit(piece: Piece) -> None:
            out.write(piece if isinstance(piece, bytes) else data[slice(*piece)])

        renaming.rename(source, lambda tag: pairs.get(tag, tag), emit)


def cut_by_tensorboard(source: Path, target: Path, count: int) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    with target.open("wb") as out:
        writer = RecordWriter(out)
        for number, event in enumerate(LegacyEventFileLoader(str(source)).Load()):
            if number < count:
                writer.write(event.SerializeToString())


def rename_by_tensorboard(source: Path, target: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    pairs = read(RECIPE)
    with target.open("wb") as out:
        writer = RecordWriter(out)
        for event in LegacyEventFileLoader(str(source)).Load():
            for value in event.summary.value:
                value.tag = pairs.get(value.tag, value.tag)
            writer.write(event.SerializeToString())


WORK = {"cut": cut, "rename": rename}


# --- figures -------------------------------------------------------------------------------------


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Least CPU seconds of some rounds on both sides: other load only adds to them."""
    iterations = ITERATIONS // SLICE if quick else ITERATIONS
    shown = iterations // SLICE
    log, part, out = folder / NAME, folder / f"{NAME}.part", folder / "out"
    say("writing the logs")
    make_log(log, iterations)
    make_log(part, shown)
    say("TensorBoard's classes")
    scale, note = iterations / shown, f"theirs on 1/{SLICE}, scaled"
    slow_cut = cpu(lambda: cut_by_tensorboard(part, out, shown * TAGS * 6 // 10), 3) * scale
    slow_rename = cpu(lambda: rename_by_tensorboard(part, out), 3) * scale
    rows = []
    native = event_file.native
    if native is not None:
        say("native")
        page_cache = cpu(lambda: write_mapped(log, out))
        fast_cut, fast_rename = cpu(lambda: cut(log, out)), cpu(lambda: rename(log, out))
        size = log.stat().st_size / 2**20
        peak = max(python("bench.event_files", word, log, out).peak_mb for word in WORK)
        rows = [
            ratio("event files: cut / TensorBoard's classes", slow_cut / fast_cut, 200, note),
            ratio("event files: rename 23 tags / the same", slow_rename / fast_rename, 200, note),
            Row("event files: cut / page-cache write, CPU", fast_cut / page_cache, "×", 3),
            Row("event files: rename / the same", fast_rename / page_cache, "×", 5),
            Row("event files: peak RSS over the mapped file", peak - size, "MB", 150),
        ]
    say("pure Python")
    event_file.native = None
    try:
        plain_cut = cpu(lambda: cut(part, out), 3) * scale
        plain_rename = cpu(lambda: rename(part, out), 3) * scale
    finally:
        event_file.native = native
    for file in (log, part, out):
        file.unlink()
    return [
        *rows,
        ratio("event files: pure Python cut / TensorBoard's", slow_cut / plain_cut, 7),
        ratio("event files: pure Python rename / the same", slow_rename / plain_rename, 7),
    ]


if __name__ == "__main__":
    WORK[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
