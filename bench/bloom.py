"""BLOOM-176B's checkpoint, 2.3 TB in 384 optimizer shards of 5.5 GB, 48 model and 288 layer files.

Built from sparse files. Everything is measured on the commands that a user types, from the start of
the process to its end, on two cores; `apply` includes the planning and the verification.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from bench.process import Finished, disk_usage, forget, python
from bench.row import Row

STAGES = 12
CORES = 2
PEAK_MB = 200
RECIPE = """\
why: loss spike; back to the last good step with a lower rate, fresh moments, other data
rollback: {to: 95000}
set: {lr: 3e-5, beta2: 0.9}
reset: [moments]
skip: [95001-95100]
"""


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Plan, apply, verify and undo one recipe; a tenth of the shards when `quick`."""
    root = folder / "bloom"
    recipe = folder / "bloom.yaml"
    recipe.write_text(RECIPE)
    python("bench.layout", "bloom", root, 1 if quick else STAGES)
    size = sum(path.stat().st_size for path in root.glob("global_step95000/*")) / 1e12
    files = sum(1 for _ in root.glob("global_step95000/*"))
    say(f"built {files} files, {size:.2f} TB, {disk_usage(root) / 1e6:.0f} MB on disk")
    before = _digest(root)
    usage = disk_usage(root)
    done = {
        "plan": _typed(root, "plan", recipe, "--quiet"),
        "apply": _typed(root, "apply", recipe, "--yes", "--quiet"),
        "verify": _typed(root, "verify", "--quiet"),
    }
    written = disk_usage(root) - usage
    done["undo"] = _typed(root, "undo", "--yes", "--quiet")
    if _digest(root) != before:
        raise RuntimeError("the run is not what it was before the surgery")
    shutil.rmtree(root)
    what = f"{files} files, {size:.1f} TB"
    rows = [
        Row(f"{what}: {name}", done[name].seconds, "s", target, note=f"{done[name].cpu:.2f} s CPU")
        for name, target in (("plan", 3), ("apply", 10), ("verify", 3), ("undo", 5))
    ]
    peak = max(finished.peak_mb for finished in done.values())
    rows.append(Row(f"{what}: peak memory", peak, "MB", PEAK_MB))
    rows.append(Row(f"{what}: disk taken", written / 1e6, "MB"))
    return rows


def _typed(root: Path, command: str, *words: object) -> Finished:
    forget(path for path in root.glob("*/*") if path.is_file())
    return python("ckptsurgeon", command, *words, "-C", root, cores=CORES)


def _digest(root: Path) -> str:
    """Names, sizes, times, and all bytes that are no hole, of what is not the surgeon's own."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if not path.is_file() or ".ckptsurgeon" in path.parts:
            continue
        status = path.stat()
        digest.update(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}".encode())
        with path.open("rb", buffering=0) as file:
            at = 0
            while at < status.st_size:
                try:
                    start = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError:  # ENXIO: only a hole follows
                    break
                at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                digest.update(f"{start}:{at}".encode())
                digest.update(os.pread(file.fileno(), at - start, start))
    return digest.hexdigest()
