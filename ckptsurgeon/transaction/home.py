"""Where a run keeps what its surgeries need: every name below `.ckptsurgeon`."""

from __future__ import annotations

from pathlib import Path

HOME = ".ckptsurgeon"
"""The folder in the run's root, and in each log folder on another file system. It holds `journal`
and `lock` while a surgery is under way, `staging/<id>` before its commit, `attic/<id>` with what it
moved aside, and `receipts/<id>`."""

ATTIC = "attic"
RECEIPTS = "receipts"
EVENTS = "tfevents"
"""What the name of each event file has in it."""
ROWS = ("metrics.csv", "metrics.jsonl", "trainer_log.jsonl")
"""Logs that are known by name alone: of Lightning, of many trainers, of LLaMA-Factory."""
NOTE = ".ckptsurgeon"
"""How the name of the event file ends that holds a note."""
KEPT_EVENTS = "tf-events"
"""What it has in it in an attic instead: TensorBoard would load the file."""


def has_receipts(folder: Path) -> bool:
    """Whether surgeries were done in the run whose root is `folder`."""
    return (folder / HOME / RECEIPTS).is_dir()


def is_log(name: str) -> bool:
    """Whether a file of this name, or path, is a log that a surgery may edit."""
    last = name.rpartition("/")[2]
    return EVENTS in last or last in ROWS or is_wandb(last) or is_database(last)


def is_wandb(name: str) -> bool:
    """Whether a file of this name has the records of a run of W&B."""
    return name.startswith("run-") and name.endswith(".wandb")


def is_database(name: str) -> bool:
    """Whether a file of this name may be the database of a tracker: MLflow's `mlflow.db`, or that
    of a project of Trackio."""
    return name.endswith(".db")


def in_attic(name: str) -> bool:
    """Whether a name that edits use, from the root, is of what a surgery keeps."""
    return f"/{HOME}/{ATTIC}/" in f"/{name}"


def kept_by(path: Path) -> tuple[Path, str] | None:
    """The folder whose attic `path` lies in, and the id of the surgery that keeps it."""
    parts = path.parts
    for at in range(len(parts) - 2):
        if parts[at : at + 2] == (HOME, ATTIC):
            return Path(*parts[:at]), parts[at + 2]
    return None
