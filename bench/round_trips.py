"""How many calls of each command reach the file system for one more shard, and for one more step.

On a network file system each of them may be a round trip, so they are counted, by strace, and not
timed: the figure is the same on every disk. Each command runs on a run of few shards and on one of
many; the difference, divided by the shards between, leaves out what every start takes.

Counted is what has to ask a server that nobody asked before: every call with a path in the run
(open, stat, readlink, link, rename, unlink, mkdir, …), a folder that is listed, each read and write
of a file's bytes, a search for holes, ftruncate, and each fsync. Not counted: fstat of an open
file, which the open has answered (NFS and Lustre give the attributes with it), lseek to a number
and close. The limit: a client's cache answers some of what is counted here, and joins writes until
the fsync, so the count is the most that a server is asked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bench.process import REPO, python
from bench.row import Row

FEW, MANY = 64, 264
QUICK = (4, 12)
GOALS = {"plan": 8, "apply": 26, "undo": 18}
"""For a shard. Those of an apply and of an undo are what is left where no guarantee is given up
(`docs/decisions/0082-which-calls-a-shard-costs.md`)."""
STATUS_GOAL = 3
"""Calls of `status` for a step that it opens."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("plan", "RECIPE", "--quiet"),
    "apply": ("apply", "RECIPE", "--yes", "--quiet"),
    "verify, level 0": ("verify", "--level", "0", "--quiet"),
    "verify, level 1": ("verify", "--level", "1", "--quiet"),
    "verify, level 2": ("verify", "--level", "2", "--quiet"),
    "undo": ("undo", "--yes", "--quiet"),
    "status": ("status",),
}
RECIPE = "set: {lr: 3e-5}\nreset: [moments]\n"

OF_BYTES = (
    "getdents64,read,readv,pread64,preadv,preadv2,write,writev,pwrite64,pwritev,pwritev2,lseek,"
    "copy_file_range,ftruncate,fallocate,fsync,fdatasync,flock,fchmod,fchown,utimensat"
)
_CALL = re.compile(r"(?:\[pid +\d+\] |\d+ +)?(\w+)\((.*)")
_OPEN_FILE = re.compile(r"\d+<([^>]*)>")


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """The calls for one more shard, and those of `status` for one more step; 4 and 12 shards when
    `quick`. No row where strace is not installed."""
    if shutil.which("strace") is None:
        say("skipped: strace is not installed")
        return []
    few, many = QUICK if quick else (FEW, MANY)
    counts = []
    for shards in (few, many):
        root = folder / f"trips-{shards}"
        python("bench.layout", "many", root, shards)
        counts.append(of_run(root))
        shutil.rmtree(root)
        say(f"counted {shards} shards")
    rows = []
    for name in COMMANDS:
        slope = per_each(counts[0][name], counts[1][name], many - few)
        rows.append(
            Row(
                f"{name}: calls for a shard",
                round(sum(slope.values())),  # the journal is read in blocks of several shards
                "calls",
                GOALS.get(name),
                note=most(slope),
            )
        )
    steps = []
    for number in (2, 6):
        root = folder / f"steps-{number}"
        python("bench.layout", "three", root, number)
        steps.append(count(root, *COMMANDS["status"]))
        shutil.rmtree(root)
    slope = per_each(steps[0], steps[1], 4)
    what = "status: calls for a step"
    rows.append(Row(what, sum(slope.values()), "calls", STATUS_GOAL, note=most(slope)))
    return rows


def of_run(root: Path) -> dict[str, Counter[str]]:
    """The calls of every command on the run, which is as it was when `undo` is done."""
    recipe = root.with_suffix(".yaml")
    recipe.write_text(RECIPE)
    return {
        name: count(root, *(str(recipe) if word == "RECIPE" else word for word in words))
        for name, words in COMMANDS.items()
    }


def count(root: Path, *words: str) -> Counter[str]:
    """How often a command made each call that reaches the run. Raises RuntimeError if it fails."""
    log = root.with_suffix(".strace")
    return calls(traced(log, "-m", "ckptsurgeon", *words, "-C", str(root)), str(root))


def traced(log: Path, *words: str) -> list[str]:
    """What strace says of `python WORDS`, all its threads and children. Raises RuntimeError if the
    process fails."""
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-y", "-e", "signal=none", "-o", str(log)]
    command = [*strace, "-e", f"trace=%file,{OF_BYTES}", sys.executable, *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-4000:]}")
    lines = log.read_text("utf-8", "replace").splitlines()
    log.unlink()
    return lines


def calls(lines: Iterable[str], root: str) -> Counter[str]:
    """The calls in what strace wrote that reach `root`, by name."""
    found: Counter[str] = Counter()
    for line in lines:
        match = _CALL.match(line)
        if match is None or root not in line:  # also what was interrupted, and goes on
            continue
        name, given = match.groups()
        if name in OF_BYTES.split(",") and name != "utimensat":
            opened = _OPEN_FILE.match(given)
            if opened is None or not opened[1].startswith(root):
                continue
            if name == "lseek" and "SEEK_DATA" not in given and "SEEK_HOLE" not in given:
                continue
        elif ', "", ' in given:  # fstat, as newer C libraries make it
            continue
        found[name] += 1
    return found


def per_each(few: Counter[str], many: Counter[str], between: int) -> dict[str, float]:
    """The calls of each name for one more of what there are `between` more of."""
    return {name: (many[name] - few[name]) / between for name in few | many}


def most(slope: Mapping[str, float]) -> str:
    """The calls that are made most, for the note of a row."""
    ranked = sorted(slope.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {each:.1f}" for name, each in ranked if each >= 0.05)
