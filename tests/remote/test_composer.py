"""Composer in a bucket: what a restart loads is named by the text of an object, which is a key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.remote.buckets import RUN, fill, held, keys, left_over, objects
from tests.remote.conftest import Look
from tests.support.composer import needed, train
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


@needed
@pytest.mark.parametrize("ranks", [1, 2])
def test_its_trainer_resumes_from_what_was_operated_on(
    ranks: int, server: str, store: Any, look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It saves into the bucket by its own client, and follows the text of the object; on two ranks
    by the readers and writers of torch's DCP that it has for a bucket."""
    monkeypatch.setenv("S3_ENDPOINT_URL", server)
    first = train(RUN, 6, "--at", str(tmp_path), ranks=ranks)
    before = objects(store)
    for words in ("rollback --to 4 --set lr=3e-4 --set beta2=0.98 --set eps=1e-6", "reset moments"):
        done = look(*words.split(), "--yes", "-C", RUN)
        assert done.exit_code == 0, done.output
    promise = json.loads(look("status", "--json", "-C", RUN).stdout)["promise"]
    operated = objects(store)
    used = train(RUN, 6, "--at", str(tmp_path), ranks=ranks)
    assert sorted(used) == [5, 6]
    assert used[5]["lr"] == [pytest.approx(promise["lr"], rel=1e-12)]
    assert used[5]["betas"] == [[0.9, 0.98]] and used[5]["eps"] == [1e-6]
    assert (used[5]["adam_step"], used[5]["moments"]) == (0, 0)
    assert used[5]["batch"] == first[5]["batch"]
    for key in objects(store).keys() - operated.keys():
        store.delete_object(Bucket="bucket", Key=f"run/{key}")
    name = NAMES[composer if ranks == 1 else composer_sharded].format(4)
    store.put_object(Bucket="bucket", Key=f"run/{SYMLINK}", Body=f"run/{name}".encode())
    for _ in range(2):
        undone = look("undo", "--yes", "-C", RUN)
        assert undone.exit_code == 0, undone.output
    assert objects(store) == before and left_over(store) == []


@needed
def test_what_it_downloaded_before_a_surgery_is_named(
    server: str, store: Any, look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without FSDP its autoresume loads that again, and no other step."""
    monkeypatch.setenv("S3_ENDPOINT_URL", server)
    at = ("--at", str(tmp_path))
    train(RUN, 2, *at)
    assert sorted(train(RUN, 4, *at)) == [3, 4]
    done = look("set", "eps=1e-6", "--yes", "-C", RUN)
    assert done.exit_code == 0 and "remove that folder" in " ".join(done.stdout.split())
    stale = train(RUN, 6, *at, save_overwrite=True)
    assert sorted(stale) == [3, 4, 5, 6] and stale[5]["eps"] == [1e-8]
    assert look("rollback", "--to", "4", "--set", "eps=1e-6", "--yes", "-C", RUN).exit_code == 0
    shutil.rmtree(tmp_path / "s3:")
    used = train(RUN, 6, *at)
    assert sorted(used) == [5, 6] and used[5]["eps"] == [1e-6]
