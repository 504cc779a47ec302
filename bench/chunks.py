"""A step of torchtitan in 80 thousand, 770 thousand and 6 million chunks: 1,000 tensors with their
moments on 2,048 ranks. `status`, the plan of a new beta2 and new moments, the surgery and its undo.

Everything is measured on the commands that a user types, from the start of the process to its end,
on two cores; `apply` includes the planning and the verification. The folder is made by torch's own
classes and pickle, which takes some ten times the memory that is measured.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from bench.process import Finished, forget, python
from bench.row import Row

CORES = 2
RECIPE = "set: {beta2: 0.99}\nreset: [moments]\n"
SIZES: dict[str, dict[str, float]] = {
    "104x256": {"status": 1.5, "plan": 1.5, "apply": 1.5},
    "1000x257": {},
    "1000x2048": {"status": 20, "plan": 60, "apply": 60, "peak": 3},
}
"""Parameters and ranks → the most seconds of each command, and the most memory, in files."""
ROOM = {"1000x2048": (16, 4)}
"""GiB of memory and of disk that it takes to make it."""


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """All sizes that disk and memory have room for; the smallest one when `quick`."""
    recipe = folder / "chunks.yaml"
    recipe.write_text(RECIPE)
    rows: list[Row] = []
    for size, targets in list(SIZES.items())[: 1 if quick else None]:
        memory, disk = ROOM.get(size, (0, 0))
        if _available() < memory or shutil.disk_usage(folder).free >> 30 < disk:
            say(f"{size}: skipped: it takes {memory} GiB of memory and {disk} of disk to make it")
            continue
        rows += _one(folder / f"chunks-{size}", size, recipe, targets, say)
    return rows


def _available() -> int:
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) >> 20


def _one(
    root: Path, size: str, recipe: Path, targets: dict[str, float], say: Callable[[str], None]
) -> list[Row]:
    chunks = int(python("bench.chunked", root, size).answer["chunks"])
    metadata = next(root.glob("*/.metadata"))
    length = metadata.stat().st_size
    say(f"built {chunks:,} chunks, {length / 1e6:,.0f} MB")
    rows = timed(root, recipe, targets, f"{chunks:,} chunks")
    shutil.rmtree(root)
    return rows


def timed(root: Path, recipe: Path, targets: dict[str, float], what: str) -> list[Row]:
    """The rows of one run that is there already. Raises RuntimeError if an undo leaves traces."""
    metadata = next(root.glob("*/.metadata"))
    length, before = metadata.stat().st_size, _digest(metadata)
    done = {
        "status": _typed(root, "status"),
        "plan": _typed(root, "plan", recipe, "--quiet"),
        "apply": _typed(root, "apply", recipe, "--yes", "--quiet"),
        "undo": _typed(root, "undo", "--yes", "--quiet"),
    }
    if _digest(metadata) != before or list(root.glob("*/__ckptsurgeon_*")):
        raise RuntimeError("the run is not what it was before the surgery")
    rows = [
        Row(
            f"{what}: {name}", finished.seconds, "s", targets.get(name),
            note=f"{finished.cpu:.2f} s CPU, {finished.peak_mb:,.0f} MB",
        )
        for name, finished in done.items()
    ]  # fmt: skip
    peak = max(finished.peak_mb for finished in done.values()) * 2**20 / length
    note = f"of a file of {length / 1e6:,.0f} MB"
    return [*rows, Row(f"{what}: peak memory", peak, "×", targets.get("peak"), note=note)]


def _typed(root: Path, command: str, *words: object) -> Finished:
    forget(root.glob("*/.metadata"))
    return python("ckptsurgeon", command, *words, "-C", root, cores=CORES)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
