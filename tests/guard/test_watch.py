"""What a watch sees, whom it tells and what it does: once, and within its bounds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard import trouble
from ckptsurgeon.guard.event import ASKED, READY, STARTED
from ckptsurgeon.guard.policy import Policy, load
from ckptsurgeon.guard.trainer import Process, Trainer
from ckptsurgeon.guard.watch import Watch
from ckptsurgeon.look.logged import own
from ckptsurgeon.look.ready import ready
from tests.cli.conftest import Surgeon, hints
from tests.conftest import Trained
from tests.faults.inject import KILLED, Fault, hooked, outcome
from tests.guard.conftest import Policies, own_trainer, pages, states
from tests.support.event_logs import write_log
from tests.support.launch import REPO
from tests.support.snapshot import exact_snapshot, snapshot


def without_watch(root: Path) -> dict[Any, Any]:
    return {name: it for name, it in snapshot(root).items() if ".ckptsurgeon" not in str(name)}


# --- advise --------------------------------------------------------------------------------------


def test_a_person_is_told_once_with_a_recipe_a_plan_and_a_picture(
    surgeon: Surgeon, diverged: Path, policy: Policies, tmp_path: Path
) -> None:
    before = without_watch(diverged)
    said = surgeon("watch", policy(), "--once", "-C", diverged)
    assert said.exit_code == 3 and "0001 diverged at 20" in said.stdout, said.stdout
    assert without_watch(diverged) == before
    (page,) = pages(tmp_path)
    event = page["event"]
    assert (event["cause"], event["state"], event["signal"]) == ("diverged", "asked", "loss")
    assert {*event["files"]} >= {"recipe.yaml", "plan.txt", "advice.json"}
    assert json.loads(Path(event["files"]["advice.json"]).read_text())["verdict"] == "diverged"
    again = surgeon("watch", policy(), "--once", "-C", diverged)
    assert (again.exit_code, len(pages(tmp_path))) == (0, 1)
    assert again.stdout.startswith("nothing new is wrong: you were asked about it: diverged at 201")

    (words,) = hints(page["next"])
    assert surgeon(*words, "--yes").exit_code == 0
    for log in (diverged / "tensorboard").glob("*tfevents*"):
        log.unlink()
    write_log(diverged / "tensorboard", [2.0 + 0.01 * (k % 7) for k in range(200)] + [9.0] * 200)
    assert surgeon("watch", policy(), "--once", "-C", diverged).exit_code == 3
    assert len(pages(tmp_path)) == 2, "it diverged once more after a surgery"


def test_a_healthy_run_is_not_touched(
    surgeon: Surgeon, trained: Trained, policy: Policies, tmp_path: Path
) -> None:
    root = trained()
    before = exact_snapshot(root)
    for words in (["--once"], ["--once", "-n"], ["--once", "--json"]):
        assert surgeon("watch", policy(do="apply"), *words, "-C", root).exit_code == 0
    assert exact_snapshot(root) == before and pages(tmp_path) == []


def test_a_dry_run_says_it_and_writes_nothing(
    surgeon: Surgeon, diverged: Path, policy: Policies, tmp_path: Path
) -> None:
    before = exact_snapshot(diverged)
    said = surgeon("watch", policy(do="apply"), "--once", "-n", "-C", diverged)
    assert said.exit_code == 3 and "diverged at 20" in said.stdout
    assert exact_snapshot(diverged) == before and pages(tmp_path) == []


def test_a_word_that_did_not_arrive_is_said_again(
    surgeon: Surgeon, diverged: Path, policy: Policies, tmp_path: Path
) -> None:
    deaf = policy(notify=["/no/such/pager"])
    said = surgeon("watch", deaf, "--once", "-C", diverged)
    assert "nobody was told" in said.stdout and not events.read(diverged)[0].notified
    surgeon("watch", policy(), "--once", "-C", diverged)
    surgeon("watch", policy(), "--once", "-C", diverged)
    assert len(pages(tmp_path)) == 1 and events.read(diverged)[0].notified


def test_only_what_the_policy_names_is_looked_for(
    surgeon: Surgeon, diverged: Path, policy: Policies
) -> None:
    said = surgeon("watch", policy(on=["hung"], hung=1e6), "--once", "-C", diverged)
    assert (said.exit_code, events.read(diverged)) == (0, [])


def test_silence_is_told_once_and_once_more_after_a_word(
    surgeon: Surgeon, trained: Trained, policy: Policies, tmp_path: Path
) -> None:
    root = trained()
    (root / "train.yaml").unlink()  # the bundled trainer has saved its last step
    rule = policy(on=["hung"], hung=0.5)

    def written(ago: float) -> None:
        for path in root.rglob("*"):
            if path.is_file() and ".ckptsurgeon" not in path.parts:
                os.utime(path, (time.time() - ago,) * 2)

    written(10)
    assert surgeon("watch", rule, "--once", "-C", root).exit_code == 0
    written(300)
    assert surgeon("watch", rule, "--once", "-C", root).exit_code == 3
    assert surgeon("watch", rule, "--once", "-C", root).exit_code == 0
    (event,) = events.read(root)
    assert event.what == "nothing was logged or saved for 5 minutes"
    assert len(pages(tmp_path)) == 1


def contradict(root: Path) -> None:
    """Two trainings at the same time."""
    for _ in range(2):
        write_log(root / "tensorboard", [2.0] * 400)


def test_one_look_that_can_not_be_taken_is_no_good_word(
    surgeon: Surgeon, trained: Trained, policy: Policies
) -> None:
    contradict(root := trained())
    said = surgeon("watch", policy(), "--once", "-C", root)
    assert said.exit_code == 1 and "lineage of the logs can't be proven" in said.stderr


def test_a_watch_that_is_blind_asks_once(trained: Trained) -> None:
    contradict(root := trained())
    said: list[str] = []
    looks = iter(range(8))

    class Ended(Exception):
        """What ends the test."""

    def opened() -> Run:
        if next(looks, None) is None:
            raise Ended
        return Run.open(root)

    rule = Policy(hung=0.001, every=0.1, notify=["/no/such/pager"])
    watch = Watch(opened, lambda run: own(run, {}), rule, said.append, Trainer(None, ()))
    with pytest.raises(Ended):
        watch.follow()
    (event,) = events.read(root)
    assert (event.cause, event.state) == ("blind", ASKED) and "lineage" in event.what
    assert len(said) == 4 and said[1].startswith("can't look") and said[2].startswith("0001"), said


# --- apply ---------------------------------------------------------------------------------------


def acting(root: Path, trainer: Trainer, **keys: Any) -> Watch:
    def read(run: Run) -> Any:
        return own(run, {})

    return Watch(lambda: Run.open(root), read, Policy(do="apply", **keys), print, trainer)


class NoTrainer(Trainer):
    """Starts nothing: what a kill at a call of the disk leaves has no use for a process."""

    def start(self, run: Run, event: events.Event) -> events.Event:
        return event


def test_it_operates_and_starts_the_trainer_and_the_log_says_who_did(
    surgeon: Surgeon, diverged: Path, policy: Policies, tmp_path: Path
) -> None:
    began = diverged / "began"
    own_trainer(diverged, f"open({str(began)!r}, 'w'); print('iteration 9')")
    before = without_watch(diverged)
    said = surgeon("watch", policy(do="apply"), "--once", "-C", diverged)
    assert said.exit_code == 0, said.stdout
    (event,) = events.read(diverged)
    assert (event.state, event.receipt, event.recipe) == (STARTED, "0001", "skip the data")
    assert "why: watch 0001: diverged at 20" in surgeon("log", "-C", diverged).stdout
    for _ in range(200):
        if began.exists() and not Process(event.pid, event.born).runs:
            break
        time.sleep(0.1)
    began.unlink()
    printed = events.folder(diverged, "0001") / "trainer.log"
    assert "iteration 9" in printed.read_text() and pages(tmp_path) == []
    surgeon("undo", "--yes", "-C", diverged)
    assert without_watch(diverged) == before


def test_a_trainer_that_only_prints_is_seen_by_what_it_prints(
    surgeon: Surgeon, diverged: Path, policy: Policies, tmp_path: Path
) -> None:
    """By the file that `--log` names, and after its start by the watch's own."""
    shutil.rmtree(diverged / "tensorboard")
    line = "print(f' iteration {k:8d}/     400 | lm loss: {loss:.6E} |')"
    code = f"for k in range(9, 400):\n    loss = 2 + (k * 7 % 11) / 100\n    {line}"
    own_trainer(diverged, code)
    log = tmp_path / "train.log"
    bad = code.replace("\n    print", "\n    loss += 7 * (k > 200)\n    print")
    with log.open("w") as out:
        subprocess.run([sys.executable, "-c", bad], stdout=out, check=True)
    words = ["watch", policy(do="apply"), "--once", "--log", log, "-C", diverged]
    said = surgeon(*words)
    assert said.exit_code == 0 and "0001 diverged at 20" in said.stdout, said.stdout
    (event,) = events.read(diverged)
    assert (event.state, event.receipt) == (STARTED, "0001")
    for _ in range(200):
        if not Process(event.pid, event.born).runs:
            break
        time.sleep(0.1)
    printed = events.folder(diverged, "0001") / "trainer.log"
    assert "iteration      399" in printed.read_text()
    assert surgeon(*words).exit_code == 0 and len(events.read(diverged)) == 1
    printed.write_text(log.read_text())
    again = surgeon(*words)
    assert again.exit_code == 3 and "0002 diverged at 20" in again.stdout


def test_the_same_first_sign_again_is_a_persons_to_judge(
    surgeon: Surgeon, diverged: Path, policy: Policies, tmp_path: Path
) -> None:
    own_trainer(diverged, "pass")
    assert surgeon("watch", policy(do="apply"), "--once", "-C", diverged).exit_code == 0
    for log in (diverged / "tensorboard").glob("*tfevents*"):
        log.unlink()
    write_log(diverged / "tensorboard", [2.0 + 0.01 * (k % 7) for k in range(200)] + [9.0] * 200)
    before = without_watch(diverged)
    said = surgeon("watch", policy(do="apply"), "--once", "-C", diverged)
    assert said.exit_code == 3 and "that did not help" in said.stdout
    assert states(diverged) == [STARTED, ASKED] and without_watch(diverged) == before
    assert [page["event"]["id"] for page in pages(tmp_path)] == ["0002"]


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.long
def test_killed_at_any_call_it_is_gone_on_with_and_operates_once(
    diverged: Path, tmp_path: Path, every: int
) -> None:
    for log in (diverged / "tensorboard").glob("*tfevents*"):  # whose writer is this process
        log.rename(log.with_name(log.name.replace(f".{os.getpid()}.", ".4194305.")))
    before = without_watch(diverged)
    whole = tmp_path / "whole"
    subprocess.run(["cp", "-a", diverged, whole], check=True)
    call = 1
    while True:
        look_again()
        ended = outcome(lambda: acting(diverged, NoTrainer(None, ())).once(), Fault("KILL", call))
        look_again()
        killed = ended.code == KILLED
        again = acting(diverged, NoTrainer(None, ()))
        if states(diverged)[-1:] not in ([READY], [STARTED]) and not again.after(0):
            assert not events.read(diverged), call  # killed before anything was written
            assert again.once()
        run = Run.open(diverged)
        assert states(diverged)[-1] in (READY, STARTED), call
        assert [each.why[:8] for each in run.receipts()] == ["watch 00"], call
        assert ready(run, level=2).ready and look.verify(run).findings == (), call
        surgery.apply(run, surgery.plan_undo(run))
        assert without_watch(diverged) == before, call
        if not killed:
            break
        subprocess.run(["rm", "-rf", diverged], check=True)
        subprocess.run(["cp", "-a", whole, diverged], check=True)
        call += every
    assert call > 40


def test_a_full_disk_is_told_although_nothing_can_be_kept(
    diverged: Path, policy: Policies, tmp_path: Path
) -> None:
    before = snapshot(diverged)
    rule = load(policy())
    for do in ("advise", "apply"):
        (tmp_path / "pages").unlink(missing_ok=True)
        full = replace(rule, do=do)
        watch = Watch(
            lambda: Run.open(diverged), lambda run: own(run, {}), full, print, NoTrainer(None, ())
        )
        for log in (diverged / "tensorboard").glob("*tfevents*"):
            assert log.stat().st_size
        with hooked(Fault("FULL", 1, sticky=True)):
            watch.once()
        (page,) = pages(tmp_path)
        assert page["event"]["cause"] == "diverged" and page["event"]["state"] == "asked"
        after = {name: it for name, it in snapshot(diverged).items() if ".ckptsurgeon" not in name}
        assert after == before


def test_of_two_watches_one_watches(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    command = [sys.executable, "-m", "ckptsurgeon", "watch", "-C", str(root)]
    first = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    lock = root / ".ckptsurgeon" / "watcher"
    while not lock.exists():
        assert first.poll() is None
        time.sleep(0.05)
    second = surgeon("watch", "--once", "-C", root)
    assert second.exit_code == 1 and "another process watches this run" in second.stderr
    assert surgeon("set", "eps=1e-6", "--yes", "-C", root).exit_code == 0, "a person may operate"
    first.terminate()
    first.communicate()
    assert first.returncode == 143 and not lock.exists()
    assert surgeon("watch", "--once", "-C", root).exit_code == 0


def test_the_first_save_is_held_against_the_step_that_was_loaded(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    assert trouble.of_the_first_save(run, 8, {}) is None
    assert trouble.of_the_first_save(run, 6, {}) == (8, None)
    file = next((root / "global_step6").glob("*optim_states.pt"))
    import torch

    content = torch.load(file, weights_only=False)

    def grow(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if key == "exp_avg_sq":
                inner += 1.0
            elif isinstance(inner, (dict, list, tuple)):
                grow(inner)

    grow(content)
    torch.save(content, file)
    look_again()
    found = trouble.of_the_first_save(Run.open(root), 6, {})
    assert found is not None and found[1] is not None
    assert found[1].cause == "cold-start" and "step 8 does not go on" in found[1].what


def test_a_policy_that_acts_needs_to_know_how_the_trainer_starts(
    surgeon: Surgeon, trained: Trained, policy: Policies
) -> None:
    root = trained()
    (root / "train.yaml").unlink()
    said = surgeon("watch", policy(do="apply"), "-C", root)
    assert said.exit_code == 1 and "no launch command is recorded" in said.stderr
    assert load(policy(do="apply")).acts
