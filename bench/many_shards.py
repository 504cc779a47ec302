"""10,000 ZeRO shards: a rollback with a new lr and fresh moments, as a user types it, on two cores.

The shards are small: what is measured is the work for each file and not for its bytes. `apply`
includes the planning and the verification.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from bench.process import Finished, python
from bench.row import Row

SHARDS = 10_000
CORES = 2
SECONDS = 40
PEAK_MB = 500
RECIPE = """\
rollback: {to: 95000}
set: {lr: 3e-5}
reset: [moments]
"""


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Plan, apply and undo the recipe, then a rollback alone; 300 shards when `quick`."""
    root, count = folder / "ranks", 300 if quick else SHARDS
    recipe = folder / "ranks.yaml"
    recipe.write_text(RECIPE)
    python("bench.layout", "ranks", root, count)
    say(f"built two checkpoints of {count:,} shards")
    done = {
        "plan": _typed(root, "plan", recipe, "--quiet"),
        "plan and apply": _typed(root, "apply", recipe, "--yes", "--quiet"),
        "undo": _typed(root, "undo", "--yes", "--quiet"),
        "rollback alone": _typed(root, "rollback", "--to", "95000", "--yes", "--quiet"),
    }
    _typed(root, "undo", "--yes", "--quiet")
    shutil.rmtree(root)
    what = f"{count:,} shards"
    rows = [
        Row(f"{what}: {name}", each.seconds, "s", SECONDS, note=f"{each.cpu:.1f} s CPU")
        for name, each in done.items()
    ]
    peak = max(each.peak_mb for each in done.values())
    return [*rows, Row(f"{what}: peak memory", peak, "MB", PEAK_MB)]


def _typed(root: Path, command: str, *words: object) -> Finished:
    return python("ckptsurgeon", command, *words, "-C", root, cores=CORES)
