"""One more shard takes no more calls to the file system than it does today, as each may be a round
trip on a network file system. Lower a bound where the code has got below it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from bench.layout import many
from bench.process import python
from bench.round_trips import COMMANDS, calls, count, per_each, traced

FEW, MANY = 4, 12
HELD = {"plan": 4, "apply": 21, "undo": 17, "verify": 16}
"""Calls for a shard; of an apply and an undo one more than they make where nothing else runs. The
goals are 8 for a plan and 20 for an apply and an undo."""
STATUS = 5
"""Calls of `status` for a step. The goal is 3: a folder that is listed takes as many alone."""
WORK = """
import os, sys
from pathlib import Path
from ckptsurgeon import Recipe, Hyperparameters, Reset, Run, apply, plan, plan_undo, verify

def part(name):
    os.access(f"/part of {name}", os.F_OK)

for root in map(Path, sys.argv[1:]):
    part("plan")
    wanted = plan(Run.open(root), Recipe(Hyperparameters(lr=3e-5), Reset(reset=["moments"])))
    part("apply")
    apply(Run.open(root), wanted)
    part("verify")
    verify(Run.open(root))
    part("undo")
    apply(Run.open(root), plan_undo(Run.open(root)))
    part("end")
"""


def may_trace() -> bool:
    """Some containers allow no process to trace another."""
    if shutil.which("strace") is None:
        return False
    command = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=openat", "-o", os.devnull]
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_trace(), reason="strace counts the calls")
@pytest.mark.long
def test_one_more_shard_takes_no_more_calls_than_before(tmp_path: Path) -> None:
    counted: list[dict[str, Counter[str]]] = []
    roots = [tmp_path / f"shards-{shards}" for shards in (FEW, MANY)]
    for root, shards in zip(roots, (FEW, MANY), strict=True):
        many(root, shards)
    lines = traced(tmp_path / "strace", "-c", WORK, *map(str, roots))
    marks = [i for i, line in enumerate(lines) if "/part of " in line]
    names = [lines[i].split("part of ")[1].split('"')[0] for i in marks]
    for root in roots:
        parts = {}
        for name, (start, end) in zip(names, pairwise(marks), strict=False):
            found = calls(lines[start:end], str(root))
            if name != "end" and found:
                parts[name] = found
        counted.append(parts)
    slopes = {name: per_each(counted[0][name], counted[1][name], MANY - FEW) for name in HELD}
    over = {n: s for n, s in slopes.items() if not 0 < sum(s.values()) <= HELD[n]}
    assert not over, {n: sum(s.values()) for n, s in over.items()}


@pytest.mark.skipif(not may_trace(), reason="strace counts the calls")
@pytest.mark.long
def test_status_takes_no_more_calls_for_one_more_step_than_before(tmp_path: Path) -> None:
    counted = []
    for steps in (2, 6):
        root = tmp_path / f"steps-{steps}"
        python("bench.layout", "three", root, steps)
        counted.append(count(root, *COMMANDS["status"]))
    slope = per_each(*counted, 4)
    assert 0 < sum(slope.values()) <= STATUS, slope


def test_only_what_asks_a_server_is_counted() -> None:
    said = [
        '11 openat(3</run>, "a.pt", O_RDONLY) = 4</run/a.pt>',
        '11 newfstatat(4</run/a.pt>, "", {st_size=3}, AT_EMPTY_PATH) = 0',
        "11 lseek(4</run/a.pt>, 0, SEEK_SET) = 0",
        "11 lseek(4</run/a.pt>, 0, SEEK_DATA) = 0",
        "12 pread64(4</run/a.pt>,  <unfinished ...>",
        '12 <... pread64 resumed>"PK", 2, 0) = 2',
        '11 write(1</out>, "/run", 4) = 4',
        '11 openat(AT_FDCWD</>, "/lib/libc.so.6", O_RDONLY) = 5</lib/libc.so.6>',
    ]
    assert calls(said, "/run") == {"openat": 1, "lseek": 1, "pread64": 1}
