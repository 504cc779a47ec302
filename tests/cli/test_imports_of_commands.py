"""What a command does not need is not imported: it is waited for at each start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import make_run

CODE = (
    "import json, sys\n"
    "from ckptsurgeon.cli import main\n"
    "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
    "print(json.dumps([*sys.modules]))"
)
COMPUTING = {"average", "graft", "transplant", "clip_moments", "scale", "precision", "replicas"}
TRACKERS = {"mlruns", "databases", "wandb", "tensorboard", "row_file"}


ELSEWHERE = {"remote.mirror", "transaction.bucket", "transaction.giving_up", "formats.described"}
"""What is of buckets, of pages, and of surgeries that can't be finished."""


def imported(*words: object) -> set[str]:
    """The modules in a process that has carried out this command."""
    command = [sys.executable, "-c", CODE, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "words", [("set", "eps=1e-6"), ("reset", "moments"), ("rollback", "--to", "2")], ids=" ".join
)
def test_a_surgery_imports_no_other_operation_and_no_log_that_is_not_there(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    root = make_run(tmp_path / "run", (2, 4))
    modules = imported(*words, "--yes", "-C", root)
    assert "ckptsurgeon.operations.events" in modules, "it stands in each recipe"
    assert not {f"ckptsurgeon.operations.{name}" for name in COMPUTING} & modules
    assert not {f"ckptsurgeon.logs.{name}" for name in TRACKERS} & modules
    assert not {"sqlite3", "csv", "email.utils"} & modules
    assert not {f"ckptsurgeon.{name}" for name in ELSEWHERE} & modules
