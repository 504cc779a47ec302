"""After a rollback a trainer that reads W&B's variables is told where its run goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Surgeon
from tests.support.dcp_trainers import STEPS, torchtitan
from tests.support.wandb_files import write_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
FIRST, LAST = STEPS[0], STEPS[-1]
READ = """import json, os
with open("told.json", "w") as file:
    json.dump({k: v for k, v in os.environ.items() if k.startswith("WANDB_")}, file)
"""


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of torchtitan that was online, and is back at its first step."""
    root = torchtitan(tmp_path / "run")
    write_run(root, range(1, LAST + 1), online=True)
    wanted = {"relaunch": {"command": [sys.executable, "-c", READ]}}
    (root / "ckptsurgeon.yaml").write_text(yaml.safe_dump(wanted))
    return root


def told(surgeon: Surgeon, root: Path, tmp_path: Path) -> dict[str, str]:
    """The variables of W&B that the trainer has."""
    assert surgeon("relaunch", "-C", root).exit_code == 0
    found: dict[str, str] = json.loads((tmp_path / "told.json").read_text())
    return found


def test_a_start_after_a_rollback_forks_the_run_that_a_server_has(
    surgeon: Surgeon, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(surgeon, root, tmp_path) == {}
    back = surgeon("rollback", "--to", FIRST, "--yes", "-C", root)
    fork = f"abc?_step={FIRST - 1}"
    assert f'wandb.init(fork_from="{fork}")' in " ".join(back.stdout.split()), back.stdout
    assert told(surgeon, root, tmp_path) == {"WANDB_FORK_FROM": fork}
    plan = surgeon("relaunch", "-n", "-C", root)
    assert plan.stdout.startswith(f"env 'WANDB_FORK_FROM={fork}' ")
    document = json.loads(surgeon("relaunch", "-n", "--json", "-C", root).stdout)
    assert document["environment"] == {"WANDB_FORK_FROM": fork}
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    both = {"WANDB_RUN_ID": "abc", "WANDB_RESUME_FROM": fork}
    assert told(surgeon, root, tmp_path) == both
    monkeypatch.setenv("WANDB_RESUME_FROM", "abc?_step=0")
    assert told(surgeon, root, tmp_path) == {**both, "WANDB_RESUME_FROM": "abc?_step=0"}


def test_nothing_is_set_where_nothing_was_rolled_back_or_no_server_is_asked(
    surgeon: Surgeon, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert surgeon("rollback", "--to", FIRST, "--yes", "-C", root).exit_code == 0
    with monkeypatch.context() as offline:
        offline.setenv("WANDB_MODE", "offline")
        assert "WANDB_FORK_FROM" not in told(surgeon, root, tmp_path)
    begun = write_run(root, range(FIRST, LAST), id="new", time=1_700_009_000, online=True)
    os.utime(begun, (2e9, 2e9))
    assert told(surgeon, root, tmp_path) == {}
    begun.unlink()
    assert surgeon("undo", "--yes", "-C", root).exit_code == 0
    assert told(surgeon, root, tmp_path) == {}
