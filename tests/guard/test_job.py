"""The watch of a job: it starts the trainer, stops it, and stays within its bounds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptsurgeon import Run
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard.event import ASKED, READY, STARTED
from ckptsurgeon.guard.policy import Policy
from ckptsurgeon.guard.trainer import Process, Trainer
from ckptsurgeon.run.writers import FLUSH_S
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.guard.conftest import Policies, own_trainer, pages, states
from tests.support.launch import REPO


def test_a_job_starts_again_as_often_as_the_policy_says(
    surgeon: Surgeon, trained: Trained, policy: Policies, tmp_path: Path
) -> None:
    root = trained()
    rule = policy(do="apply", max_restarts=2)

    def after(status: int) -> int:
        said = surgeon("watch", rule, "--after", status, "--json", "-C", root)
        assert json.loads(said.stdout)["asked"] is (states(root)[-1:] == [ASKED])
        return said.exit_code

    assert after(0) == 3 and events.read(root) == []
    assert [after(9), after(9), after(9)] == [0, 0, 3]
    assert states(root) == [READY, READY, ASKED]
    assert pages(tmp_path)[0]["event"]["why"] == "2 starts brought no new step (max_restarts 2)"


def test_a_trainer_that_ends_well_and_has_diverged_is_treated(
    surgeon: Surgeon, diverged: Path, policy: Policies
) -> None:
    """It may have ended before its watch looked again. One that a person stopped is left alone."""
    own_trainer(diverged, "pass", kill_switch="stop")
    (diverged / "stop").write_text("a person was here")
    rule = policy(do="apply")
    assert surgeon("watch", rule, "--after", 0, "-C", diverged).exit_code == 3
    assert events.read(diverged) == []
    (diverged / "stop").unlink()
    said = surgeon("watch", rule, "--after", 0, "-C", diverged)
    assert said.exit_code == 0 and "0001 diverged at 20" in said.stdout, said.stdout
    assert states(diverged) == [READY] and len(Run.open(diverged).receipts()) == 1
    assert surgeon("watch", rule, "--after", 0, "-C", diverged).exit_code == 3, "no word since"


@pytest.mark.parametrize(("do", "status"), [("advise", 0), ("apply", 0), ("apply", 1)])
@pytest.mark.long
def test_a_watch_looks_once_more_at_what_has_ended(
    surgeon: Surgeon, trained: Trained, policy: Policies, do: str, status: int
) -> None:
    """All that the trainer logs comes at its very end, and its loss may be why it ends."""
    root = trained()
    for path in (root / "tensorboard").glob("*tfevents*"):
        path.unlink()
    losses = "[2.0 + 0.01 * (k % 7) for k in range(200)] + [9.0] * 200"
    code = (
        f"import pathlib, sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from tests.support.event_logs import write_log\n"
        f"log = pathlib.Path({str(root)!r}) / 'tensorboard'\n"
        f"was = pathlib.Path({str(root / 'was')!r})\n"
        "if was.exists(): sys.exit()\n"
        f"write_log(log, {losses})\n"
        "was.touch()\n"
        f"sys.exit({status})"
    )
    own_trainer(root, code)
    said = surgeon("watch", policy(do=do), "--start", "-C", root)
    found = [(each.cause, each.state) for each in events.read(root) if each.cause]
    assert found == [("diverged", ASKED if do == "advise" else STARTED)], said.stdout


@pytest.mark.parametrize("operates", [False, True])
@pytest.mark.long
def test_a_watch_that_asked_says_so_when_its_trainer_ends_well(
    surgeon: Surgeon, diverged: Path, policy: Policies, operates: bool
) -> None:
    """Unless somebody has operated since. What was logged before its start is not judged."""
    words = ["set", "eps=1e-6", "--yes", "-C", str(diverged)]
    operate = [sys.executable, "-m", "ckptsurgeon", *words] if operates else ["true"]
    asked = events.folder(diverged, "0002") / "event.json"
    (log,) = (diverged / "tensorboard").glob("*tfevents*")  # whose writer is this process
    log = log.rename(log.with_name(log.name.replace(f".{os.getpid()}.", ".4194305.")))
    code = (
        "import pathlib, subprocess, time\n"
        f"asked, log = pathlib.Path({str(asked)!r}), pathlib.Path({str(log)!r})\n"
        "for _ in range(4000):\n"
        "    log.touch()\n"
        "    if asked.exists() and 'asked' in asked.read_text(): break\n"
        "    time.sleep(0.05)\n"
        f"if {operates}: log.unlink()\n"  # as a person cuts what is bad
        f"subprocess.run({operate!r}, check=True, cwd={str(REPO)!r})"
    )
    own_trainer(diverged, code)
    said = surgeon("watch", policy(), "--start", "--json", "-C", diverged)
    assert states(diverged) == [STARTED, ASKED] and "the trainer has ended" in said.stderr
    assert said.exit_code == (0 if operates else 3), said.stderr
    document = json.loads(said.stdout)
    assert document["asked"] is not operates
    assert [each["state"] for each in document["events"]] == [STARTED, ASKED]


def test_a_broken_promise_is_not_started_again(
    surgeon: Surgeon, trained: Trained, policy: Policies, tmp_path: Path
) -> None:
    root = trained()
    said = surgeon("watch", policy(do="apply"), "--after", 4, "-C", root)
    assert said.exit_code == 3 and "another start would do the same" in said.stdout
    assert len(pages(tmp_path)) == 1


def test_a_torn_save_is_passed_over(surgeon: Surgeon, trained: Trained, policy: Policies) -> None:
    root = trained()
    shard = max((root / "global_step8").glob("*"), key=lambda path: path.stat().st_size)
    os.truncate(shard, 100)
    said = surgeon("watch", policy(do="apply"), "--after", 137, "-C", root)
    assert said.exit_code == 0 and "the start was repaired: surgery 0001" in said.stdout
    assert (root / "latest").read_text() == "global_step6"


def test_the_watch_of_a_job_stops_the_trainer_and_leaves_the_rest(
    surgeon: Surgeon, diverged: Path, policy: Policies
) -> None:
    switch = diverged / "stop"
    code = f"import os, time\nwhile not os.path.exists({str(switch)!r}): time.sleep(0.05)"
    own_trainer(diverged, code, kill_switch="stop")
    trainer = subprocess.Popen([sys.executable, "-c", code])
    rule = policy(do="apply")
    said = surgeon("watch", rule, "--job", "--pid", trainer.pid, "-C", diverged)
    assert trainer.wait() == 0 and said.exit_code == 3
    assert switch.read_text() == "watch 0001\n" and Run.open(diverged).receipts() == []
    assert surgeon("watch", rule, "--after", 0, "-C", diverged).exit_code == 0
    assert not switch.exists() and len(Run.open(diverged).receipts()) == 1
    assert states(diverged) == [READY]


# --- the trainer ---------------------------------------------------------------------------------


def test_one_that_does_not_end_is_killed_with_all_that_it_started(
    trained: Trained, tmp_path: Path
) -> None:
    run = Run.open(trained())
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "inner = 'import time; time.sleep(600)'\n"
        "rank = subprocess.Popen([sys.executable, '-c', inner], start_new_session=True)\n"
        "print(rank.pid, flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    rank = Process.of(int(trainer.stdout.readline()))
    at = Process.of(trainer.pid)
    assert rank is not None and at is not None
    assert Trainer(at, ()).stop(run, Policy(stop_within=0.3), "0001", hung=True) == ""
    trainer.stdout.close()
    assert trainer.wait() == -signal.SIGKILL and not rank.runs


@pytest.mark.parametrize("known", [True, False])
def test_one_that_died_while_it_saved_is_gone_once_its_step_is_quiet(
    trained: Trained, known: bool
) -> None:
    root = trained()
    own_trainer(root, "pass", kill_switch="stop")
    run = Run.open(root)
    torn = root / f"global_step{max(run.steps()) + 1}" / "mp_rank_00_model_states.pt"
    torn.parent.mkdir()
    torn.write_bytes(b"half of it")
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    at = Process.of(trainer.pid) if known else None
    pointed = time.time() - FLUSH_S
    for pointer in run.pointers():
        os.utime(root / pointer, (pointed, pointed))
    os.utime(torn, (pointed + 4, pointed + 4))
    assert "may be saving it" in (run.trainer() or "")
    assert Trainer(at, ()).stop(run, Policy(stop_within=0.1), "0001", hung=known) == ""
    assert run.trainer() is None
    trainer.kill()
    assert trainer.wait() == -(signal.SIGTERM if known else signal.SIGKILL)


def test_a_kill_switch_that_a_person_set_stays(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    own_trainer(root, "pass", kill_switch="stop")
    (root / "stop").write_text("watch this space")
    rule = root.parent / "rule.yaml"
    rule.write_text("watch: {do: apply}")
    assert surgeon("watch", rule, "--after", 9, "-C", root).exit_code == 0
    assert (root / "stop").read_text() == "watch this space"


def test_a_later_watch_knows_what_an_earlier_one_has_started(trained: Trained) -> None:
    root = trained()
    own_trainer(root, "import time; time.sleep(600)")
    run = Run.open(root)
    event = events.write(root, events.new(root, "", "the trainer was started"))
    first = Trainer(None, ())
    event = first.start(run, event)
    assert first.now(run) == Process(event.pid, event.born)
    later = Trainer(None, ())
    assert later.now(run) is not None, "its number was not kept, its output is open"
    events.write(root, event)
    assert Trainer(None, ()).now(run) == Process(event.pid, event.born)
    assert Trainer(None, ()).stop(run, Policy(stop_within=20), "0001", hung=False) == ""
    assert first.now(run) is None and Trainer(None, ()).now(run) is None
    assert first.status() in (-signal.SIGTERM, 128 + signal.SIGTERM)
