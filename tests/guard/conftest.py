"""A diverged run with real checkpoints, and policies."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.guard import event as events
from tests.cli.conftest import diverged, surgeon

__all__ = ["diverged", "policy", "surgeon"]

Policies = Callable[..., Path]


@pytest.fixture
def policy(tmp_path: Path) -> Policies:
    """`policy(do="apply")`: a file with these keys, whose `notify` appends to `pages`."""

    def write(**keys: Any) -> Path:
        pages = tmp_path / "pages"
        code = f"import sys; open({str(pages)!r}, 'a').write(sys.stdin.read() + chr(10))"
        own = {"every": 0.2, "stop_within": 20, "notify": [sys.executable, "-c", code], **keys}
        file = tmp_path / "policy.yaml"
        file.write_text(json.dumps({"watch": own}))
        return file

    return write


def pages(tmp_path: Path) -> list[dict[str, Any]]:
    """What a person was told."""
    file = tmp_path / "pages"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def own_trainer(root: Path, code: str, **keys: Any) -> None:
    """Make Python code the trainer of the run."""
    wanted = {"relaunch": {"command": [sys.executable, "-c", code], **keys}}
    (root / "ckptsurgeon.yaml").write_text(json.dumps(wanted))


def states(root: Path) -> list[str]:
    return [each.state for each in events.read(root)]
