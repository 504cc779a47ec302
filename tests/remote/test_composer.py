"""Composer in a bucket: what a restart loads is named by the text of an object, which is a key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.remote.buckets import RUN, fill, held, keys, objects
from tests.remote.conftest import Look
from tests.support.described_runs import composer, composer_sharded

pytestmark = [
    pytest.mark.remote,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
LINK = "latest-rank0.pt"
SYMLINK = f"{LINK}.symlink"
OTHER = "s3://bucket/lab/other"
NAMES: dict[Callable[[Path], Path], str] = {
    composer: "ep0-ba{}-rank0.pt", composer_sharded: "ep0-ba{}",
}  # fmt: skip


@pytest.fixture(params=NAMES, ids=["whole", "sharded"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """As Composer uploads it, and as it comes back by a sync: for its link there is an object whose
    text is the key of the newest step, of a folder without a slash, and nothing else. Source:
    mosaicml/composer at 6405188, callbacks/checkpoint_saver.py and utils/file_helpers.py."""
    run: Path = request.param(tmp_path / "run")
    (run / SYMLINK).write_text(f"run/{(run / LINK).readlink()}")
    (run / LINK).unlink()
    return run


@pytest.fixture
def name(run: Path) -> str:
    """That of a step, below the key of its run."""
    return NAMES[composer if any(run.glob("ep*.pt")) else composer_sharded]


def followed(store: Any, prefix: str = "run") -> str:
    """What Composer loads: the object of the key in the text, or those below it."""
    text: str = store.get_object(Bucket="bucket", Key=f"{prefix}/{SYMLINK}")["Body"].read().decode()
    assert any(key == text or key.startswith(f"{text}/") for key in keys(store, text)), text
    return text


def latest(look: Look, at: object = RUN) -> Any:
    return json.loads(look("status", "--json", "-C", at).stdout)["step"]


def test_a_surgery_is_that_of_a_disk(run: Path, store: Any, look: Look) -> None:
    fill(store, run)
    assert latest(look) == latest(look, run) == 6
    held(["rollback", "--to", "4", "--set", "lr=3e-4"], store, look, run)


def test_a_rollback_leads_to_the_step(run: Path, name: str, store: Any, look: Look) -> None:
    fill(store, run)
    assert followed(store) == f"run/{name.format(6)}"
    done = look("rollback", "--to", "4", "--yes", "-C", RUN)
    assert done.exit_code == 0, done.output
    assert followed(store) == f"run/{name.format(4)}" and latest(look) == 4


def test_one_that_leads_nowhere_is_repaired(run: Path, name: str, store: Any, look: Look) -> None:
    (run / SYMLINK).write_text(f"run/{name.format(8)}")
    fill(store, run)
    assert look("verify", "-C", RUN).exit_code == look("verify", "-C", run).exit_code == 4
    held(["repair-latest"], store, look, run)


def test_a_copy_of_a_run_leads_to_its_own_step(
    run: Path, name: str, store: Any, look: Look
) -> None:
    """Under another key the text still names a step of the first run."""
    for prefix in ("run", "lab/other"):
        fill(store, run, prefix)
    first = objects(store)
    assert look("verify", "-C", OTHER).exit_code == 4
    assert latest(look, OTHER) is None
    done = look("repair-latest", "--yes", "-C", OTHER)
    assert done.exit_code == 0, done.output
    assert followed(store, "lab/other") == f"lab/other/{name.format(6)}"
    assert look("verify", "-C", OTHER).exit_code == 0
    assert objects(store) == first


def test_a_fork_leads_to_its_own_step(run: Path, name: str, store: Any, look: Look) -> None:
    fill(store, run)
    first = objects(store)
    done = look("fork", OTHER, "--step", "4", "--set", "lr=3e-4", "-C", RUN)
    assert done.exit_code == 0, done.output
    assert followed(store, "lab/other") == f"lab/other/{name.format(4)}"
    assert latest(look, OTHER) == 4 and look("verify", "-C", OTHER).exit_code == 0
    assert objects(store) == first


def test_so_does_one_that_was_made_on_a_disk(run: Path, name: str, store: Any, look: Look) -> None:
    """Once it is put beside the run."""
    assert look("fork", run.parent / "beside", "--step", "4", "--copy", "-C", run).exit_code == 0
    fill(store, run)
    fill(store, run.parent / "beside", "beside")
    assert followed(store, "beside") == f"beside/{name.format(4)}"
    assert latest(look, "s3://bucket/beside") == 4
    assert look("verify", "-C", "s3://bucket/beside").exit_code == 0
