"""An offline run of W&B of 500 MB: cut by the command, against writing the file once.

Half of its points leave, and become a run of their own. The memory is that of the process over the
mapped file, as for event files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from bench.event_files import cpu, write_mapped
from bench.process import python
from bench.row import Row
from ckptsurgeon.logs.tensorboard.wire import as_varint, delimited
from ckptsurgeon.logs.wandb.framing import Framed

SIZE, SLICE = 500 << 20, 20
METRICS = 20
"""Numbers of a point."""


def make_run(folder: Path, size: int) -> tuple[Path, int]:
    """The file of a run of so many bytes, and the step in its middle."""
    inner = folder / "wandb/offline-run-20260101_000000-abc"
    inner.mkdir(parents=True)
    fixed = b"".join(_item(f"train/metric_{i}", "0.12345678") for i in range(METRICS))
    framed, written, number, step = Framed(""), 0, 0, 0
    while written < size:
        step += 1
        moving = {"train/global_step": step, "_timestamp": 1.7e9 + step, "_step": step}
        items = fixed + b"".join(_item(name, repr(value)) for name, value in moving.items())
        for kind in (3, 2):  # a summary, and the point
            number += 1
            data = as_varint(8) + as_varint(number) + delimited(kind << 3 | 2, items)
            framed.write(data)
            written += len(data)
    path = inner / "run-abc.wandb"
    path.write_bytes(b"".join(piece for piece in framed.pieces if isinstance(piece, bytes)))
    return path, step // 2


def _item(name: str, value: str) -> bytes:
    inner = delimited(2 << 3 | 2, name.encode()) + delimited(16 << 3 | 2, value.encode())
    return delimited(1 << 3 | 2, inner)


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """CPU seconds of both, of which other load takes nothing away."""
    root = folder / "offline"
    say("writing the run")
    path, middle = make_run(root, SIZE // SLICE if quick else SIZE)
    size = path.stat().st_size / 2**20
    bare = cpu(lambda: write_mapped(path, folder / "out"))
    say("cutting it")
    cut = python(
        "ckptsurgeon", "truncate-logs", "--after", middle, "--tb", root, "--keep-tb", "cut", "--yes"
    )
    shutil.rmtree(root)
    (folder / "out").unlink()
    what = f"offline W&B: cut of {size:.0f} MB"
    return [
        Row(f"{what} / page-cache write, CPU", cut.cpu / bare, "×", note=f"{cut.cpu:.1f} s CPU"),
        Row(f"{what}: peak RSS over the mapped file", cut.peak_mb - size, "MB", 250),
    ]
