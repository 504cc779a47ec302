"""The table of a `.metadata` of many chunks, by the native reader and by the general one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files import dcp_metadata, native
from ckptsurgeon.files.chunks import Table

TENSORS, RANKS = 2, 5
needs_native = pytest.mark.skipif(native.shards is None, reason="the native module is not built")


def metadata(root: Path) -> Path:
    return next(iter(sorted(root.glob("step-*/.metadata"))))


def told(table: Table) -> dict[str, Any]:
    """Everything that a table says; the numbers of rows are its own."""
    return {
        "items": {name: [item[1:] for item in found] for name, found in table.items.items()},
        "shapes": {
            name: [found.shape(k) for k in range(len(found))] for name, found in table.items.items()
        },
        "wholes": dict(zip(table.names, table.wholes, strict=True)),
        "ends": dict(zip(table.files, table.ends, strict=True)),
        "globals": table.globals,
    }


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except DamagedFile:
        return DamagedFile


def natively(path: Path) -> Table | None:
    return dcp_metadata._natively(path, path.read_bytes(), path.stat())


def as_any_pickle(path: Path) -> Table:
    return dcp_metadata._generally(path, path.read_bytes())


def generally(path: Path) -> Any:
    return outcome(lambda: told(as_any_pickle(path)))
