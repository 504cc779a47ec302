"""The newest megatron-core, with what its wheel leaves to Python 3.12.

`make test-formats` installs it into a folder of its own (docs/decisions/0032): from 0.17 on it asks
for Python 3.12, as `megatron.training` takes `override` from `typing`; its core runs on 3.11."""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import pytest
import typing_extensions


def beside(name: str) -> Path:
    """A folder that `make` filled in this environment, or in the one that an overlay lies in."""
    places = (Path(sys.prefix) / name, Path(sys.prefix).parent / name)
    return next((place for place in places if place.is_dir()), places[0])


FOLDER = beside("newest-megatron")


def by(library: str) -> list[str]:
    """The arguments by which a program takes the "newest" megatron-core, or the "installed" one."""
    if library == "newest" and not FOLDER.is_dir():
        pytest.skip("make test-formats installs the newest megatron-core")
    return ["--newest"] if library == "newest" else []


def put_first() -> None:
    """Import megatron from there, in a process that has not imported it."""
    assert "megatron" not in sys.modules
    sys.path.insert(0, str(FOLDER))
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
