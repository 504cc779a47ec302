"""Event files: CPU time of a cut and a rename as ratios, on 147 MB (31 tags, 2.5 M scalars).

`python -m bench.event_files` measures everything in one run. TensorBoard's own classes (loader,
protobuf, RecordWriter) work on the first 20th of the log and are scaled by the number of events;
`--full` lets them work on all of it (minutes). "Page cache" is writing the mapped file once.
"""

from __future__ import annotations

import argparse
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.files import event_file, event_frame
from ckptsurgeon.files.event_file import Piece
from ckptsurgeon.recipe import settings

REPO = Path(__file__).parents[1]
RECIPE = REPO / "recipes" / "tags" / "bigscience-23.yaml"
NAME = "events.out.tfevents.1600000000.host.1.0"
ITERATIONS = 80_600
SLICE = 20
TAGS = 31
ROUNDS = 7


@dataclass(frozen=True)
class Figure:
    """One ratio and what it must reach."""

    name: str
    value: float
    target: float
    at_least: bool
    unit: str = "x"

    @property
    def reached(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


def make_log(path: Path, iterations: int) -> None:
    """A log of Megatron's old tags: 23 that get new names and 8 others, a record per value."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    tags = [*settings(RECIPE), *(f"activations/layer {i}/norm" for i in range(8))]
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
                rows.append(event_frame.frame(event.SerializeToString()))
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
    pairs = settings(RECIPE)
    with event_frame.Opened(source) as (data, _), target.open("wb", buffering=0) as out:

        def emit(piece: Piece) -> None:
            out.write(piece if isinstance(piece, bytes) else data[slice(*piece)])

        event_file.rename(source, lambda tag: pairs.get(tag, tag), emit)


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

    pairs = settings(RECIPE)
    with target.open("wb") as out:
        writer = RecordWriter(out)
        for event in LegacyEventFileLoader(str(source)).Load():
            for value in event.summary.value:
                value.tag = pairs.get(value.tag, value.tag)
            writer.write(event.SerializeToString())


def peak_rss(work: str, source: Path, target: Path) -> float:
    """MB that a process of its own held at most, beyond the size of the file."""
    script = (
        "import resource, sys; from pathlib import Path; from bench import event_files;"
        f"event_files.{work}(Path(sys.argv[1]), Path(sys.argv[2]));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(target)],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    )
    return (int(done.stdout) - source.stat().st_size) / 1e6


# --- figures -------------------------------------------------------------------------------------


def figures(directory: Path, *, iterations: int = ITERATIONS, full: bool = False) -> list[Figure]:
    """All figures of this part, measured now in `directory`."""
    log, part, out = directory / NAME, directory / f"{NAME}.part", directory / "out"
    make_log(log, iterations)
    shown = iterations if full else max(1, iterations // SLICE)
    make_log(part, shown)
    scale = iterations / shown
    slow_cut = cpu(lambda: cut_by_tensorboard(part, out, shown * TAGS * 6 // 10), 3) * scale
    slow_rename = cpu(lambda: rename_by_tensorboard(part, out), 3) * scale
    found = []
    native = event_file.native
    if native is not None:
        page_cache = cpu(lambda: write_mapped(log, out))
        fast_cut, fast_rename = cpu(lambda: cut(log, out)), cpu(lambda: rename(log, out))
        memory = max(peak_rss(work, log, out) for work in ("cut", "rename"))
        found = [
            Figure("cut, against TensorBoard's classes", slow_cut / fast_cut, 200, True),
            Figure("rename 23 tags, against the same", slow_rename / fast_rename, 200, True),
            Figure("index and cut, against page cache", fast_cut / page_cache, 3, False),
            Figure("rename, against page cache", fast_rename / page_cache, 5, False),
            Figure("peak memory over the file", memory, 150, False, " MB"),
        ]
    event_file.native = None
    try:
        plain_cut = cpu(lambda: cut(part, out), 3) * scale
        plain_rename = cpu(lambda: rename(part, out), 3) * scale
    finally:
        event_file.native = native
    return [
        *found,
        Figure("pure Python cut, against TensorBoard's", slow_cut / plain_cut, 7, True),
        Figure("pure Python rename, against the same", slow_rename / plain_rename, 7, True),
    ]


def main() -> None:
    """Print every figure beside its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for figure in figures(Path(directory), full=arguments.full):
            sign = "≥" if figure.at_least else "≤"
            verdict = "reached" if figure.reached else "MISSED"
            print(
                f"{figure.name:42} {figure.value:7.1f}{figure.unit:3} "
                f"{sign} {figure.target:.0f}{figure.unit:3} {verdict}"
            )


if __name__ == "__main__":
    main()
