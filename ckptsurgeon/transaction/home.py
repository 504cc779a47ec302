"""Where a run keeps what its surgeries need: every name below `.ckptsurgeon`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ckptsurgeon import disk

HOME = ".ckptsurgeon"
"""The folder in the run's root, and in each log folder on another file system. It holds `journal`
and `lock` while a surgery is under way, `staging/<id>` before its commit, `attic/<id>` with what it
moved aside, and `receipts/<id>`."""

ATTIC = "attic"
STAGING = f"{HOME}/staging"
RECEIPTS = "receipts"
EVENTS = "tfevents"
"""What the name of each event file has in it."""
ROWS = ("metrics.csv", "metrics.jsonl", "trainer_log.jsonl", "logging.jsonl")
"""Logs that are known by name alone: of Lightning, of many trainers, of LLaMA-Factory, of ms-swift.
"""
PAGED = re.compile(
    r"(?:.*/)?(?:summary\.csv|results\.csv|metrics/(?:[^/]+/){0,2}[^/]+\.jsonl|vis_data/[^/]+\.json)"
)
"""The path of a log that pages here name: of timm, Ultralytics YOLO, fairseq2, MMEngine."""
NOTE = ".ckptsurgeon"
"""How the name of the event file ends that holds a note."""
PARTIAL = ".partial"
"""How the name of a folder ends that becomes a fork or an export once it is whole."""
CUT_FROM = "cut-from.txt"
"""The artifact of a run of MLflow that a surgery made in its file store."""
STORED = re.compile(
    r"(?P<run>(?:.*?/)?(?:m-)?[0-9a-f]{32})/"
    rf"(?:meta\.yaml|(?:metrics|params|tags|outputs)/.+|artifacts/{re.escape(CUT_FROM)})"
)
"""The path of a file that MLflow's file store has of a run, or of a model."""
STORED_RUN = re.compile(r"[0-9a-f]{32}")
WANDB_RUN = re.compile(r"offline-run-\d[\d_]*-.+|run-\d{8}_\d{6}-.+")
"""The name of a folder that MLflow's file store, and that W&B, has of one run."""
KEPT_EVENTS = "tf-events"
"""What it has in it in an attic instead: TensorBoard would load the file."""


def staged_name(id: str, name: str) -> str:
    """Where a record of surgery `id` is until the surgery is finished."""
    return f"{STAGING}/{id}.{name}"


def jobs_file(id: str) -> str:
    """Where the workers of a cluster say which of their jobs of surgery `id` are done."""
    return staged_name(id, "jobs")


def has_receipts(folder: Path) -> bool:
    """Whether surgeries were done in the run whose root is `folder`."""
    return disk.is_folder(folder / HOME / RECEIPTS)


def is_log(name: str) -> bool:
    """Whether a file of this name, or path, is a log that a surgery may edit, or a folder of this
    name that of one run of a tracker."""
    last = name.rpartition("/")[2]
    by_name = EVENTS in last or is_rows(name) or is_wandb(last) or is_database(last)
    return by_name or is_stored(name) or is_wandb_run(last) or bool(STORED_RUN.fullmatch(last))


def is_rows(name: str) -> bool:
    """Whether a file with this path is a table or JSON lines, as its name alone tells."""
    return name.rpartition("/")[2] in ROWS or PAGED.fullmatch(name) is not None


def is_stored(path: str) -> bool:
    """Whether a file with this path is of a run in MLflow's file store, and no artifact."""
    return stored_run(path) is not None


def stored_run(path: str) -> str | None:
    """The folder of the run, or of the model, of such a file; of any other None."""
    match = STORED.fullmatch(path)
    return match["run"] if match else None


def is_stored_run(folder: Path, inner: Sequence[str], files: Sequence[str]) -> bool:
    """Whether a folder with these folders and files is one of its runs, and not in its trash."""
    named = STORED_RUN.fullmatch(folder.name) is not None
    whole = "meta.yaml" in files and "metrics" in inner and "params" in inner
    return named and whole and folder.parent.parent.name != ".trash"


def is_wandb(name: str) -> bool:
    """Whether a file of this name has the records of a run of W&B."""
    return name.startswith("run-") and name.endswith(".wandb")


def is_wandb_run(name: str) -> bool:
    """Whether a folder of this name is of a run of W&B."""
    return WANDB_RUN.fullmatch(name) is not None


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
