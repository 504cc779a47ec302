"""A trainer that saves, a second surgeon, an input that changes: refused, and the run as it was."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, disk, look, plan, surgery
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run import writers
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
    mounts = writers.MOUNTS.read_text()
    for kind, refusal in (("nfs4", False), ("cifs", False), ("ext4", True)):
        (tmp_path / "mounts").write_text(re.sub(r" - \S+ ", f" - {kind} ", mounts))
        monkeypatch.setattr(writers, "MOUNTS", tmp_path / "mounts")
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
