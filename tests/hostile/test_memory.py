"""The rows that are bombs, in a process of their own: memory is bounded, whatever a length says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.hostile.bad_containers import BAD as CONTAINERS
from tests.hostile.bad_pickles import REFUSED
from tests.hostile.hostile_run import OPTIM, events, record, with_pickle
from tests.support.launch import REPO

LIMIT_KB = 256 * 1024
"""Peak resident memory of the process, interpreter and imports included."""
PICKLES = [
    name for name in REFUSED if name.split()[0] in ("7", "8", "9", "10", "13") or "2^63" in name
]
PROGRAM = """
import sys
from ckptsurgeon.cli import app
try:
    app(sys.argv[1:])
finally:
    print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


def peak(*words: object) -> int:
    """Peak resident memory in KB of a command that must exit with 1."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return int(done.stdout.splitlines()[-1])


def bombs(root: Path, shard: Path, name: str) -> None:
    if name in REFUSED:
        with_pickle(shard, REFUSED[name][0])
    elif name in CONTAINERS:
        shard.write_bytes(CONTAINERS[name][0](shard.read_bytes()))
    else:
        file = events(root)
        file.write_bytes(file.read_bytes() + record(1 << 60) + b"x" * 99)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [*PICKLES, "26 a deflate bomb", "37 a record of 2^60 bytes"])
@pytest.mark.long
def test_memory_stays_below_256_mb(trained: Trained, name: str) -> None:
    root = trained()
    bombs(root, root / "global_step8" / OPTIM, name)
    words = ["rollback", "--to", 4, "--yes"] if name.startswith("37") else ["show", 8]
    assert peak(*words, "-C", root) < LIMIT_KB
