"""A trainer that saves, a second surgeon, an input that changes: refused, and the run as it was."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, disk, look, plan, surgery
from ckptsurgeon.disk import mount
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction import journal, process
from tests.conftest import Trained
from tests.faults import toy
from tests.faults.inject import count_calls, exit_code, hooked
from tests.faults.world import restore, save, workplace
from tests.hostile.hostile_run import MODEL, refused
from tests.support.launch import REPO
from tests.support.snapshot import differs, snapshot


@pytest.fixture
def world() -> Iterator[Path]:
    with workplace() as place:
        yield place


def written(world: Path, file: str) -> None:
    """The trainer saves over one of the inputs; its time is one that only this makes."""
    path = world / "run" / file
    path.write_bytes(path.read_bytes() + b"saved again")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("file", ["step100/shard1", "latest"])
@pytest.mark.long
def test_an_input_that_changes_at_any_call_before_the_commit_is_kept(
    world: Path, file: str
) -> None:
    """The commit is one rename; until right before it every input is compared again."""
    toy.build(world)
    saved = save(world)
    wanted = toy.rollback(world)
    assert any(fingerprint.file == file for fingerprint in wanted.assumes)
    calls = count_calls(lambda: journal.commit(world / "run", wanted, logs=toy.logs(world)))
    commit = max(i for i, call in enumerate(calls, 1) if call == "rename journal.new")
    assert commit > 30
    restore(saved, world)
    written(world, file)
    changed = snapshot(world, own=True)
    for at in range(1, commit):
        restore(saved, world)
        wanted = toy.rollback(world)
        count = 0

        def hook(operation: str, path: str, details: Mapping[str, Any], at: int = at) -> None:
            nonlocal count
            count += 1
            if count == at:
                written(world, file)

        with hooked(hook):
            code = exit_code(partial(journal.commit, world / "run", wanted, logs=toy.logs(world)))
        assert code == 1, f"call {at} ({calls[at - 1]}): exit {code}"
        difference = differs(snapshot(world, own=True), changed, times=True)
        assert difference is None, f"call {at} ({calls[at - 1]}): {difference}"


def test_a_shard_that_changes_while_the_plan_is_made_is_kept(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size, and its time goes on: what the plan has read is not what is there."""
    root = trained()
    (shard,) = root.glob("global_step8/*optim_states.pt")
    planning = importlib.import_module("ckptsurgeon.surgery.plan")
    render = planning.render

    def save_meanwhile(*arguments: Any) -> Any:
        edits = render(*arguments)
        data = bytearray(shard.read_bytes())
        data[100_000] ^= 1
        shard.write_bytes(data)
        os.utime(shard, (time.time() - 3600,) * 2)
        return edits

    monkeypatch.setattr(planning, "render", save_meanwhile)
    run = Run.open(root)
    wanted = plan(run, from_data({"set": {"lr": 5e-4}}))
    saved = shard.read_bytes()
    with pytest.raises(SurgeryError, match="changed since the plan was made"):
        surgery.apply(run, wanted)
    assert shard.read_bytes() == saved
    assert not (root / ".ckptsurgeon").exists()


def test_a_second_surgeon_is_refused_while_the_first_one_works(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    first, second = (plan(run, from_data({"set": {"lr": rate}})) for rate in (1e-4, 2e-4))
    reached, go = threading.Event(), threading.Event()
    done: list[str] = []

    def wait(operation: str, path: str, details: Any) -> None:
        if operation == "create" and "staging" in path and not go.is_set():
            reached.set()
            assert go.wait(60)

    def work() -> None:
        done.append(surgery.apply(run, first, jobs=1).id)

    worker = threading.Thread(target=work)
    disk.calls.hook = wait
    try:
        worker.start()
        assert reached.wait(60)
        with pytest.raises((SurgeryError, InterruptedSurgery), match=r"is running|under way"):
            surgery.apply(run, second, jobs=1)
    finally:
        go.set()
        worker.join()
        disk.calls.hook = None
    assert done == ["0001"]
    assert look.inspect(run).promise.lr == pytest.approx(first.promise.lr)  # type: ignore[union-attr]
    with pytest.raises(SurgeryError):
        surgery.apply(run, second)
    assert look.verify(run, level=3).findings == ()


def test_a_zombie_trainer_is_no_writer(trained: Trained) -> None:
    """A container without an init keeps a killed trainer as a zombie."""
    root = trained()
    trainer = subprocess.Popen(["sleep", "60"])
    record = {"host": socket.gethostname(), "pid": trainer.pid}
    (root / "trainer.pid").write_text(
        json.dumps({**record, "start_time": process.start(trainer.pid)})
    )
    name = f"events.out.tfevents.{2**31 - 1}.{socket.gethostname()}.{trainer.pid}.0"
    (root / "tensorboard" / name).write_bytes(b"")
    run = Run.open(root)
    assert [str(trainer.pid) in sign for sign in run.writers()] == [True, True]
    trainer.kill()
    os.waitid(os.P_PID, trainer.pid, os.WEXITED | os.WNOWAIT)
    assert run.writers() == []
    surgery.apply(run, plan(run, from_data({"set": {"eps": 1e-6}})))
    trainer.wait()


def test_a_trainer_that_has_a_shard_open_for_writing_is_refused(trained: Trained) -> None:
    root = trained()
    with (root / "global_step8" / MODEL).open("r+b"):
        refused(root, "set", "eps=1e-6", says="somebody has it open for writing")


OPENED_MEANWHILE = """
import fcntl, os, subprocess, sys
from pathlib import Path
from ckptsurgeon.run import writers

lease, path = fcntl.fcntl, sys.argv[1]
writer = "import os, sys; os.open(sys.argv[1], os.O_WRONLY | os.O_NONBLOCK)"

def opened_meanwhile(descriptor, command, argument):
    lease(descriptor, command, argument)
    if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_RDLCK):
        done = subprocess.run([sys.executable, "-c", writer, path], stderr=subprocess.PIPE)
        assert b"BlockingIOError" in done.stderr

fcntl.fcntl = opened_meanwhile
print(writers.is_open(Path(path)))
"""


def test_a_writer_that_comes_while_the_lease_is_held_does_not_end_the_surgeon(
    tmp_path: Path,
) -> None:
    """The kernel sends a signal to the holder of a lease that it must give back."""
    (tmp_path / "shard.pt").write_bytes(b"shard")
    command = [sys.executable, "-c", OPENED_MEANWHILE, str(tmp_path / "shard.pt")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_a_lease_that_a_network_file_system_refuses_is_no_evidence(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux refuses one on NFS wherever the server has delegated nothing, so nearly everywhere."""
    root = trained()
    mounts = mount.MOUNTS.read_text()
    for kind, refusal in (("nfs4", False), ("cifs", False), ("ext4", True)):
        (tmp_path / "mounts").write_text(re.sub(r" - \S+ ", f" - {kind} ", mounts))
        monkeypatch.setattr(mount, "MOUNTS", tmp_path / "mounts")
        with (root / "global_step8" / MODEL).open("r+b"):
            assert bool(Run.open(root).writers()) is refusal, kind


@pytest.mark.parametrize("ahead_s", [0, 30, 3000])
def test_the_clock_of_another_host_may_be_ahead(trained: Trained, ahead_s: int) -> None:
    root = trained()
    (log,) = (root / "tensorboard").iterdir()
    log = log.rename(log.with_name("events.out.tfevents.1700000000.elsewhere.1.0"))
    moment = time.time() + ahead_s
    os.utime(log, (moment, moment))
    refused(root, "set", "eps=1e-6", says="written from elsewhere")
    log.unlink()
    half = root / "global_step10"
    half.mkdir()
    (half / MODEL).write_bytes(b"PK\3\4 half of it")
    os.utime(half / MODEL, (moment, moment))
    refused(root, "rollback", "--to", 6, says="a trainer may be saving it")


def test_a_step_that_is_newer_than_latest_and_fresh_is_being_saved(trained: Trained) -> None:
    root = trained()
    half = root / "global_step10"
    half.mkdir()
    (half / MODEL).write_bytes(b"PK\3\4 half of it")
    refused(root, "rollback", "--to", 6, says="a trainer may be saving it")
    then = time.time() - 600
    os.utime(half / MODEL, (then, then))
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 6}})))
    assert not half.exists()


# --- a trainer that can't be seen: what it adds to the run ---------------------------------------


def saves_a_step(root: Path) -> None:
    """A while ago, as its clock has it: nothing else tells."""
    shutil.copytree(root / "global_step8", root / "global_step10")
    for file in (root / "global_step10").iterdir():
        os.utime(file, (1e9, 1e9))


def saves_and_points(root: Path) -> None:
    saves_a_step(root)
    (root / "latest").write_text("global_step10")
    (root / "latest_checkpointed_iteration.txt").write_text("10")


def logs_more(root: Path) -> None:
    log = sorted(root.rglob("*tfevents*"))[0]
    with log.open("ab") as opened:
        opened.write(log.read_bytes()[-64:])
    os.utime(log, (1e9, 1e9))


ADDITIONS = {
    saves_a_step: "step 10 was saved since the plan was made",
    saves_and_points: "step 10 was saved since the plan was made",
    logs_more: "has grown since the plan was made",
}
RECIPES: tuple[Any, ...] = (
    {"set": {"lr": 1e-4}},
    {"rollback": {"to": 6}},
    {"reset": ["moments"]},
)


@pytest.mark.parametrize("add", ADDITIONS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: next(iter(recipe)))
def test_what_a_trainer_adds_after_the_plan_stops_the_surgery(
    trained: Trained, recipe: Any, add: Callable[[Path], None]
) -> None:
    root = trained()
    wanted = plan(Run.open(root), from_data(recipe))
    add(root)
    before = snapshot(root)
    for attempt in (surgery.apply, surgery.refuse_stale):
        with pytest.raises(SurgeryError, match=ADDITIONS[add]):
            attempt(Run.open(root), wanted)
    assert snapshot(root) == before


@pytest.mark.parametrize("add", ADDITIONS)
def test_what_it_adds_before_an_undo_stops_that_too(
    trained: Trained, add: Callable[[Path], None]
) -> None:
    root = trained()
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"set": {"lr": 1e-4}})))
    wanted = surgery.plan_undo(Run.open(root))
    add(root)
    before = snapshot(root)
    with pytest.raises(SurgeryError, match=ADDITIONS[add]):
        surgery.apply(Run.open(root), wanted)
    assert snapshot(root) == before


@pytest.mark.long
def test_what_it_adds_at_any_call_before_the_commit_stops_the_surgery(trained: Trained) -> None:
    root = trained()
    recipe = from_data({"set": {"lr": 1e-4}})
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    wanted = plan(Run.open(copy), recipe)
    calls = count_calls(lambda: surgery.apply(Run.open(copy), wanted))
    commit = max(i for i, call in enumerate(calls, 1) if call == "rename journal.new")
    for at in range(1, commit):
        run = root.with_name(f"run{at}")
        shutil.copytree(root, run)
        wanted = plan(Run.open(run), recipe)
        count = 0

        def hook(operation: str, path: str, details: Mapping[str, Any], at: int = at) -> None:
            nonlocal count
            count += 1
            if count == at:
                saves_a_step(run)  # noqa: B023

        with hooked(hook):
            code = exit_code(lambda: surgery.apply(Run.open(run), wanted))  # noqa: B023
        assert code == 1, f"call {at} ({calls[at - 1]}): exit {code}"
        shutil.rmtree(run / "global_step10")
        assert snapshot(run) == snapshot(root), f"call {at} ({calls[at - 1]})"
        shutil.rmtree(run)


SQUEUE = """#!/bin/sh
echo "$*" > "$0.asked"
[ -n "$SAYS" ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
echo "$SAYS"
"""


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `squeue` that says what SAYS holds, first on the path."""
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(SQUEUE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return program


@pytest.mark.parametrize(
    ("says", "alive"),
    [
        ("RUNNING node[1-4]", True), ("COMPLETING node7", True), ("SUSPENDED node7", True),
        ("PENDING ", False), ("TIMEOUT node7", False), ("", False),
    ],
)  # fmt: skip
def test_the_job_of_a_trainer_on_another_node_is_asked_for(
    trained: Trained, squeue: Path, monkeypatch: pytest.MonkeyPatch, says: str, alive: bool
) -> None:
    root = trained()
    record = {"host": "node7", "pid": 4711, "start_time": 12, "slurm_job": "815"}
    (root / "trainer.pid").write_text(json.dumps(record))
    monkeypatch.setenv("SAYS", says)
    signs = Run.open(root).writers()
    assert "--jobs=815" in squeue.with_name("squeue.asked").read_text()
    wanted = plan(Run.open(root), from_data({"set": {"lr": 1e-4}}))
    if alive:
        state, _, nodes = says.partition(" ")
        assert signs == [f"trainer.pid: its job 815 is {state} on {nodes}, squeue says"]
        with pytest.raises(SurgeryError, match="its job 815 is"):
            surgery.apply(Run.open(root), wanted)
    else:
        assert signs == []
        surgery.apply(Run.open(root), wanted)
    monkeypatch.setenv("SLURM_JOB_ID", "815")  # the script of that job, which starts it again
    assert Run.open(root).writers() == []


@pytest.mark.parametrize("job", [None, 815, "815; touch pwned", "", "8" * 40, ["815"]])
def test_a_job_that_is_no_number_is_not_asked_for(
    trained: Trained, squeue: Path, job: object
) -> None:
    root = trained()
    record = {"host": "node7", "pid": 4711, "start_time": 12, "slurm_job": job}
    (root / "trainer.pid").write_text(json.dumps(record))
    assert Run.open(root).writers() == []
    assert not squeue.with_name("squeue.asked").exists()
