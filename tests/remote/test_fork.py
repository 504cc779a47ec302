"""A fork in a bucket is that of a disk, is made by the store, and is whole or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.remote import buckets
from tests.remote.buckets import LONG, RUN, fill, here, killed_at, left_over, long_run, objects
from tests.remote.conftest import Look
from tests.remote.proxy import Proxy

pytestmark = [
    pytest.mark.remote,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
BRANCH = "s3://bucket/branch"
FORK = ["fork", BRANCH, "--step", "4", "--set", "lr=3e-5", "-C", RUN]
STRIDE = 3


def of_branch(store: Any) -> dict[str, bytes]:
    """The bytes of each of its objects, but of a note, which says when it was written."""
    found = objects(store, "branch/")
    return {name: each[0] for name, each in found.items() if not name.startswith("note ")}


def nothing_is_there(store: Any) -> None:
    for key in buckets.keys(store, ""):
        store.delete_object(Bucket="bucket", Key=key)


@pytest.mark.parametrize("name", ["Hugging Face", "torchtitan (DCP)", "Megatron-LM legacy"])
def test_a_fork_is_that_of_a_disk(
    name: str, run_of: Callable[[str], Path], store: Any, look: Look, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_of(name), run)
    fill(store, run)
    before = objects(store)
    step = json.loads(look("status", "--json", "-C", run).stdout)["steps"][0]["step"]
    done = [
        look("fork", to, "--step", step, "--copy", "-C", at)
        for at, to in ((run, tmp_path / "branch"), (RUN, BRANCH))
    ]
    assert [found.exit_code for found in done] == [0, 0], (done[0].output, done[1].output)
    said = done[0].output.replace(str(tmp_path), "s3://bucket")
    assert done[1].output.split() == said.split()
    assert of_branch(store) == here(tmp_path / "branch") and left_over(store, "branch/") == []
    assert objects(store) == before and not buckets.keys(store, "run/.ckptsurgeon/")
    looks = [look("verify", "-C", at) for at in (tmp_path / "branch", BRANCH)]
    assert looks[0].exit_code == looks[1].exit_code


def test_the_store_copies_and_a_surgery_follows(
    store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    """What is said of an object is said of its copy, and only the new bytes are sent."""
    run = long_run(tmp_path / "run")
    fill(store, run)
    words = [each.replace("4", "8") if each == "4" else each for each in FORK]
    assert look(*words, "-n").exit_code == 0 and not buckets.keys(store, "branch/")
    between.clear()
    found = look(*words, "--why", "is the rate too high?")
    assert found.exit_code == 0 and "receipt  0001" in found.output, found.output
    assert between.received < LONG / 4 and between.sent < LONG / 4
    disk = ["fork", tmp_path / "branch", "--step", "8", "--set", "lr=3e-5", "--copy", "-C", run]
    assert look(*disk).exit_code == 0
    assert of_branch(store) == here(tmp_path / "branch")
    assert set(objects(store, "branch/").values()) & set(objects(store).values())
    again = look(*words)
    assert again.exit_code == 2 and f"{BRANCH} has objects already" in again.stderr
    assert look("undo", "--yes", "-C", BRANCH).exit_code == 0
    assert "lr" in look("show", "-C", BRANCH).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["s3://other/branch"], "the run lies in s3://bucket"),
        (["DISK/branch"], "the run lies in s3://bucket"),
        (["s3://bucket/run/branch"], "lies inside the run s3://bucket/run"),
        (["s3://bucket"], "or around it"),
        ([BRANCH, "--hard-link"], "--hard-link is not possible in a bucket"),
        ([BRANCH, "--logs"], "--logs is not possible in a bucket"),
    ],
)
def test_another_place_is_refused(
    words: list[str], said: str, store: Any, look: Look, tmp_path: Path
) -> None:
    fill(store, long_run(tmp_path / "run"))
    before = buckets.keys(store, "")
    typed = [word.replace("DISK", str(tmp_path)) for word in words]
    found = look("fork", *typed, "-C", RUN)
    assert found.exit_code == 2 and said in " ".join(found.stderr.split()), found.output
    assert buckets.keys(store, "") == before and not (tmp_path / "branch").exists()


def test_a_fork_that_fails_leaves_nothing(
    store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    """Where the store does not copy, and where the surgery on the branch is refused."""
    fill(store, long_run(tmp_path / "run"))
    before = objects(store)
    between.fault = lambda request: "denied" if request.source.endswith("optimizer.pt") else None
    found = look(*FORK)
    assert found.exit_code == 1 and "AccessDenied" in found.stderr, found.output
    between.fault = lambda request: None
    assert not buckets.keys(store, "branch/") and objects(store) == before
    found = look(*FORK[:-2], "--set", "seed=1", "--set", "no_such=1", "-C", RUN)
    assert found.exit_code == 2 and not buckets.keys(store, "branch/")


@pytest.mark.slow
@pytest.mark.parametrize("done", [False, True])
def test_killed_at_each_request(
    done: bool, store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    """The run is as it was; what there is of the branch is refused, or whole, as it is asked for
    or before its surgery."""
    run = long_run(tmp_path / "run")
    fill(store, run)
    before = objects(store)
    assert look("fork", BRANCH, "--step", "4", "-C", RUN).exit_code == 0
    unedited = of_branch(store)
    nothing_is_there(store)
    fill(store, run)
    assert look(*FORK).exit_code == 0
    edited, seen = of_branch(store), set()
    for number in range(int(done), 500, STRIDE):
        nothing_is_there(store)
        fill(store, run)
        code = killed_at(between, number, look, FORK, done=done)
        assert code in (0, -9) and objects(store) == before, (number, code)
        if code == 0:
            break
        recovered = look("recover", "-C", BRANCH)
        if not buckets.keys(store, "branch/"):
            seen.add("nothing")
        elif "branch/.ckptsurgeon/forking" in buckets.keys(store, "branch/"):
            assert recovered.exit_code in (2, 5) and "aws s3 rm" in look(*FORK).stderr, number
            seen.add("refused")
        else:
            assert recovered.exit_code == 0, (number, recovered.output)
            assert of_branch(store) in (unedited, edited), number
            seen.add("edited" if of_branch(store) == edited else "unedited")
    assert code == 0 and of_branch(store) == edited
    assert seen >= {"nothing", "refused", "unedited", "edited"}
