"""The picture of a long run: ten million events in ten files, from the logs to the SVG.

Also what `status` takes longer for the loss that it shows.
Usage: python -m bench.picture FOLDER FILE
"""

from __future__ import annotations

import math
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.process import python
from bench.row import Row
from ckptsurgeon.logs.tensorboard import event_file, frame
from ckptsurgeon.logs.tensorboard.wire import as_varint, delimited

EVENTS = 10_000_000
SLICE = 100
FILES = 10
SIGNALS = (
    "lm-loss-training/lm loss", "grad-norm/grad-norm", "loss-scale/loss-scale",
    "learning-rate/learning-rate", "steps-vs-tokens/y=tokens,x=steps",
)  # fmt: skip
OTHERS = tuple(f"activations/layer {i}/norm" for i in range(15))
TAGS = (*SIGNALS, *OTHERS)


def make_log(folder: Path, events: int) -> None:
    """Event files of restarts that follow one another, with a spike that is back at once every
    10,000 steps."""
    folder.mkdir(parents=True)
    dice, number = random.Random(1), struct.Struct("<f").pack
    heads = {tag: delimited(0x0A, tag.encode()) + b"\x15" for tag in TAGS}
    steps = events // len(TAGS)
    for part in range(FILES):
        wall = 1.6e9 + part * steps // FILES
        path = folder / f"events.out.tfevents.{int(wall)}.host.1.0"
        with path.open("wb") as file:
            file.write(event_file.version_record(wall))
            for step in range(part * steps // FILES + 1, (part + 1) * steps // FILES + 1):
                loss = 2 + 6 / math.sqrt(step) + dice.gauss(0, 0.05) + (step % 10_000 < 5)
                values = (loss, dice.random(), 65536.0, 1e-4, 2.0 * step)
                start = b"\x09" + struct.pack("<d", 1.6e9 + step) + b"\x10" + as_varint(step)
                out = []
                for i, tag in enumerate(TAGS):
                    value = heads[tag] + number(values[i] if i < len(values) else 1.0)
                    summary = delimited(0x2A, delimited(0x0A, value))
                    out.append(frame.frame(start + summary))
                file.write(b"".join(out))
        os.utime(path, (1.6e9 + step, 1.6e9 + step))


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """One run of each, in processes of their own."""
    events = EVENTS // SLICE if quick else EVENTS
    logs = folder / "long"
    make_log(logs, events)
    say(f"wrote {events:,} events")
    size = sum(path.stat().st_size for path in logs.iterdir()) / 2**20
    made = python("ckptsurgeon", "report", "--tb", logs, "-o", folder / "long.svg")
    note = f"{size:.0f} MB of logs, {made.cpu:.1f} s CPU"
    what = f"picture: {events / 1e6:g} million events"
    return [
        Row(what, made.seconds, "s", 10, note=note),
        Row("picture: peak memory, mapped logs with it", made.peak_mb, "MB", 500),
        *_status(folder, quick),
    ]


WITHOUT_THE_LOSS = """
import sys
from ckptsurgeon.__main__ import main
from ckptsurgeon.cli import look
look._loss = lambda run, common: ((), None)
sys.argv[0] = "ckptsurgeon"
main()
"""


def _status(folder: Path, quick: bool) -> list[Row]:
    """The command, and the same without the loss."""
    root = folder / "three"
    python("bench.layout", "three", root, 3)
    make_log(root / "tensorboard", 100_000 if quick else 1_000_000)
    plain, shown = math.inf, math.inf
    for _ in range(1 if quick else 15):
        plain = min(plain, python("-c", WITHOUT_THE_LOSS, "status", "-C", root).cpu)
        shown = min(shown, python("ckptsurgeon", "status", "-C", root).cpu)
    return [Row("status: the loss that it shows", (shown - plain) * 1000, "ms CPU", 50)]


if __name__ == "__main__":
    began = time.perf_counter()
    make_log(Path(sys.argv[1]), int(sys.argv[2]))
    print(time.perf_counter() - began)
