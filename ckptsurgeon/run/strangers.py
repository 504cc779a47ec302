"""Logs of trackers that are known by their folders, and that no surgery cuts: they are named."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ckptsurgeon import disk

FOLDERS = {
    ".aim": "Aim",
    ".cometml-runs": "Comet",
    ".neptune": "Neptune",
}
"""What each tracker calls the folder that it writes, where the trainer is started."""
SUFFIX = ".swanlab"


def tracker(folder: Path, inner: Collection[str], files: Collection[str]) -> str | None:
    """Whose logs a folder has that holds these folders and files; None for any other."""
    if folder.name in FOLDERS and (inner or files):
        return FOLDERS[folder.name]
    if any(name.endswith(SUFFIX) for name in files):
        return "SwanLab"
    if folder.name.startswith("offline-") and "task.json" in files:
        return "ClearML"
    if "metrics.json" in files and disk.is_folder(folder / "plots/metrics"):
        return "DVCLive"
    return None
