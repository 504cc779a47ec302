"""How a trainer is started again on a run in a bucket: by its own command, with what is printed."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.remote.buckets import RUN, fill, keys
from tests.remote.conftest import Look
from tests.support.tiny_run import make_run

pytestmark = [
    pytest.mark.remote,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
LOAD = {"Megatron-LM torch_dist": 2, "Megatron-Bridge": 1}
"""How many words name the run on a disk; no address is among those of a bucket."""


@pytest.mark.parametrize("name", LOAD)
def test_flags_have_the_values_and_no_address(
    name: str, run_of: Callable[[str], Path], store: Any, look: Look, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_of(name), run)
    fill(store, run)
    before = keys(store, "")
    said = [look("relaunch", "--print-flags", "-C", at) for at in (run, RUN)]
    assert [found.exit_code for found in said] == [0, 0], said[1].output
    here, there = (shlex.split(found.stdout) for found in said)
    assert there == here[LOAD[name] :] and len(there) > 4
    assert any(str(run) in word for word in here[: LOAD[name]]) and "bucket" not in said[1].stdout
    assert keys(store, "") == before
    plan = look("set-lr", "3e-5", "--yes", "-C", RUN)
    assert plan.exit_code == 0, plan.output
    assert f"ckptsurgeon -C {RUN} relaunch --print-flags" in " ".join(plan.stdout.split())


@pytest.mark.parametrize("words", [["set-lr", "3e-5", "--yes"], ["relaunch", "--print-flags"]])
def test_no_command_of_the_run_is_named(
    words: list[str], store: Any, look: Look, tmp_path: Path
) -> None:
    """What it says of its start was said for a disk, and is refused here."""
    run = make_run(tmp_path / "run")
    (run / "ckptsurgeon.yaml").write_text("relaunch: {command: [train]}")
    fill(store, run)
    named = [look(*words, "-C", at).output for at in (run, RUN)]
    assert "ckptsurgeon relaunch" in named[0].replace(f"-C {run} ", "")
    assert "relaunch" not in named[1].replace("relaunch --print-flags", "")
    assert "restart its trainer with the same command" in named[1]
