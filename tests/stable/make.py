"""Makes the files of a release that later ones must still read: `python -m tests.stable.make`.

Each release keeps its own folder here; what an older one wrote is never written anew. A run before
and after a surgery is kept as a tar file, with times to the nanosecond, for a plan names them.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import ckptsurgeon
from ckptsurgeon.version import VERSION

HERE = Path(__file__).parent
RECIPE = """\
name: back to 4, half the rate
why: the loss rose after step 4
rollback: {to: 4}
set: {lr: 0.5x, beta2: 0.95}
reset: [moments]
tensorboard: {keep_as: tb-cut}
"""
DOCUMENTS: dict[str, tuple[list[str], int]] = {
    "status": (["status"], 0),
    "show": (["show"], 0),
    "verify": (["verify"], 0),
    "log": (["log"], 0),
    "diff": (["diff", "2", "4"], 3),
    "dry run": (["set", "lr=1e-4", "-n"], 0),
    "usage error": (["rollback", "--to", "3"], 2),
    "refusal": (["set", "clip_grad=0.5", "--yes"], 1),
}
"""Name → the command, in the run after the surgery, and its exit code."""
TIME = "CKPTSURGEON.ns"
ROOT = "/run"
"""Stands for the run's folder in the saved plan, which names it."""


def main(folder: Path) -> None:
    """Write the folder of this version."""
    from tests.support.event_logs import write_log
    from tests.support.launch import run_module
    from tests.support.tiny_run import make_run

    kept = HERE / VERSION
    kept.mkdir()
    root = make_run(folder / "run", (2, 4, 6))
    log = write_log(root / "runs", (2.0, 1.9, 1.8, 1.7, 2.5, 3.0), tag="train/loss")
    log.rename(log.with_name("events.out.tfevents.1700000000.node"))  # its writer is this process
    recipe, saved = kept / "recipe.yaml", kept / "plan.json"
    recipe.write_text(RECIPE)
    pack(root, kept / "before.tar.gz")
    run_module("ckptsurgeon", "plan", recipe, "-C", root, "-o", saved)
    run_module("ckptsurgeon", "apply", saved, "-C", root, "--yes")
    pack(root, kept / "after.tar.gz")
    documents = {}
    for name, (words, code) in DOCUMENTS.items():
        done = run_module("ckptsurgeon", *words, "-C", root, "--json", status=code)
        document = json.loads(done.stdout or done.stderr)
        documents[name] = {"schema": document["schema"], "keys": sorted(document)}
    (kept / "documents.json").write_text(json.dumps(documents, indent=1) + "\n")
    (kept / "api.json").write_text(json.dumps(api(), indent=1) + "\n")
    saved.write_text(saved.read_text().replace(f'"{root}"', f'"{ROOT}"'))


def api() -> dict[str, list[str]]:
    """The public names, each with its parameters, if it takes any."""
    return {name: _parameters(getattr(ckptsurgeon, name)) for name in sorted(ckptsurgeon.__all__)}


def _parameters(item: Any) -> list[str]:
    return list(inspect.signature(item).parameters) if callable(item) else []


def pack(root: Path, file: Path) -> None:
    """The tree below `root`, with the times of its files."""

    def with_time(info: tarfile.TarInfo) -> tarfile.TarInfo:
        stat = (root / info.name).lstat()
        info.pax_headers[TIME] = str(stat.st_mtime_ns)
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(file, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.add(root, ".", filter=with_time)


def unpack(file: Path, root: Path) -> Path:
    """The tree that `pack` kept, in a new folder."""
    root.mkdir()
    with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as archive:
        for info in archive:
            archive.extract(info, root)
        for info in reversed(archive.getmembers()):
            time = int(info.pax_headers[TIME])
            os.utime(root / info.name, ns=(time, time))
    return root


if __name__ == "__main__":
    main(Path(sys.argv[1]))
