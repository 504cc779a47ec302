"""What was written outside the run, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.look import clean, count, size


def export(folder: Path, tensors: int, total: int, files: Sequence[str]) -> str:
    """One line; `files` is empty with --dry-run."""
    what = f"{count(tensors, 'tensor')}, {size(total)}"
    if not files:
        return f"would write {what} to {clean(str(folder))}"
    return f"wrote {what} in {count(len(files), 'file')} to {clean(str(folder))}"


def export_json(folder: Path, tensors: int, total: int, files: Sequence[str]) -> dict[str, Any]:
    """The document of `export`."""
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        "tensors": tensors,
        "bytes": total,
        "files": list(files),
    }
