"""`ready` answers in one line and an exit code, repairs once, and becomes the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.guard import ready
from ckptsurgeon.guard.ready import decide
from ckptsurgeon.transaction import lock
from tests.cli.conftest import Surgeon, hints
from tests.faults.inject import KILLED, Fault, outcome
from tests.faults.sweep import faults, reports, sound
from tests.faults.torn_run import ASIDE, TORN, make
from tests.support.launch import REPO
from tests.support.snapshot import exact_snapshot, snapshot
from tests.support.tiny_run import make_run
from tests.support.transcripts import BLOCK, matches

STEPS = (2, 4, 6)
SAY = ("--", sys.executable, "-c", "print('trains')")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "run", STEPS)


def shard(root: Path, step: int) -> Path:
    return root / f"global_step{step}/mp_rank_00_model_states.pt"


def cut(root: Path, *steps: int) -> Path:
    for step in steps:
        os.truncate(shard(root, step), 60)
    return root


def started(*words: object) -> subprocess.Popen[str]:
    """A process of its own: `ready` may become another program."""
    command = [sys.executable, "-m", "ckptsurgeon", "ready", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPO, stdout=pipe, stderr=pipe, text=True)


# --- one line ------------------------------------------------------------------------------------


def test_it_says_in_one_line_what_the_next_start_loads(surgeon: Surgeon, run: Path) -> None:
    said = surgeon("ready", "-C", run)
    folder = run / "global_step6"
    assert said.stdout == f"ready: step 6, {folder}, sound at level 2\n"
    assert (said.stderr, said.exit_code) == ("", 0)
    assert surgeon("ready", "--print", "-C", run).stdout == f"{folder}\n"
    assert surgeon("ready", "-q", "-C", run).stdout == ""


def test_a_torn_step_is_not_ready_and_the_line_ends_with_what_mends_it(
    surgeon: Surgeon, run: Path
) -> None:
    before = exact_snapshot(cut(run, 6))
    said = surgeon("ready", "-C", run)
    assert said.exit_code == 4 and said.stdout.count("\n") == 1 and said.stderr == ""
    assert said.stdout.startswith(f"not ready: {shard(run, 6)}: ")
    quiet = surgeon("ready", "--print", "-C", run)
    assert (quiet.stdout, quiet.exit_code) == ("", 4) and "not ready" in quiet.stderr
    shown = surgeon("ready", "--repair", "-n", "-C", run)
    assert shown.exit_code == 4 and exact_snapshot(run) == before
    (words,) = hints(shown.stdout)
    mended = surgeon(*words)
    path = run / "global_step4"
    wanted = f"ready: step 4, {path}, sound at level 2; repaired by surgery 0001\n"
    assert (mended.stdout, mended.exit_code) == (wanted, 0)
    assert (run / "latest").read_text() == "global_step4" and shard(run, 6).is_file()
    assert "why: ready: " in surgeon("log", "-C", run).stdout


def test_a_repair_goes_to_no_newer_step(surgeon: Surgeon, run: Path) -> None:
    """Whoever made the pointers name an old step has a reason."""
    (run / "latest").write_text("global_step2")
    assert "step 2" in surgeon("ready", "--repair", "-C", run).stdout
    before = snapshot(cut(run, 2))
    said = surgeon("ready", "--repair", "-C", run)
    assert said.exit_code == 4 and snapshot(run) == before
    assert json.loads(surgeon("ready", "--json", "-C", run).stdout)["sound"] is None


def test_a_promise_that_is_broken_is_no_reason_to_lose_steps(surgeon: Surgeon, run: Path) -> None:
    """The bytes are sound: a person looks into what edited them."""
    before = shard(run, 6).read_bytes()
    surgeon("set", "eps=1e-6", "--yes", "-C", run)
    shard(run, 6).write_bytes(before)
    now = snapshot(run)
    said = surgeon("ready", "--repair", "-C", run)
    assert said.exit_code == 4 and "receipt 0001" in said.stdout and snapshot(run) == now


def test_quick_looks_at_names_and_pointers(surgeon: Surgeon, run: Path) -> None:
    assert "level 0" in surgeon("ready", "--quick", "-C", run).stdout
    shard(run, 6).unlink()
    assert surgeon("ready", "--quick", "-C", run).exit_code == 4
    (run / "latest").write_text("global_step9")
    assert "names step 9, which is not saved" in surgeon("ready", "--quick", "-C", run).stdout
    assert surgeon("ready", "--quick", "--level", 1, "-C", run).exit_code == 2


def test_an_interrupted_surgery_is_ended_by_a_repair_alone(surgeon: Surgeon, run: Path) -> None:
    cut(run, 6)
    for call in range(1, 100):
        outcome(lambda: decide(Run.open(run), 2, repair=True), Fault("KILL", call))
        if Run.open(run).interrupted():
            break
    assert surgeon("ready", "-C", run).exit_code == 5
    assert "step 4" in surgeon("ready", "--repair", "-C", run).stdout
    assert Run.open(run).interrupted() is None


# --- from scratch --------------------------------------------------------------------------------


def test_a_run_without_a_step_is_ready_where_that_is_said(surgeon: Surgeon, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert surgeon("ready", "-C", new).exit_code == 2
    assert surgeon("ready", "--or-from-scratch", "-C", new).exit_code == 0
    new.mkdir()
    (new / "train.log").write_text("begins\n")
    assert surgeon("ready", "-C", new).exit_code == 4
    said = surgeon("ready", "--or-from-scratch", "-C", new)
    assert (said.stdout, said.exit_code) == ("ready: starts from scratch: no step is saved\n", 0)
    said = surgeon("ready", "--or-from-scratch", "--print", "-C", new)
    assert (said.stdout, said.exit_code) == ("", 0)


def test_what_may_be_a_step_is_never_trained_over(surgeon: Surgeon, tmp_path: Path) -> None:
    deep = tmp_path / "new/a/b"
    deep.mkdir(parents=True)
    (deep / "weights.pt").touch()
    assert surgeon("ready", "--or-from-scratch", "-C", tmp_path / "new").exit_code == 2


def test_lost_steps_are_no_start_from_scratch(surgeon: Surgeon, run: Path) -> None:
    for step in STEPS:
        shard(run, step).parent.rename(run.parent / f"away{step}")
    said = surgeon("ready", "--or-from-scratch", "--format", "deepspeed", "-C", run)
    assert said.exit_code in (2, 4) and "from scratch" not in said.stdout


# --- the command ---------------------------------------------------------------------------------


def test_it_becomes_the_command_when_it_is_ready(run: Path) -> None:
    code = "import os, sys; print(os.getpid()); sys.exit(7)"
    process = started("-C", run, "--", sys.executable, "-c", code)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 7 and out == f"{process.pid}\n" and err.startswith("ready: step 6")


def test_the_command_never_starts_otherwise(run: Path) -> None:
    process = started("-C", cut(run, *STEPS), "--repair", *SAY)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (4, "") and err.startswith("not ready")


def test_the_command_gets_its_own_signals_and_a_wrong_one_is_said(run: Path) -> None:
    if Path("/proc/self/status").exists():
        process = started("-C", run, "-q", "--", "grep", "SigIgn", "/proc/self/status")
        ignored = int(process.communicate(timeout=600)[0].split()[1], 16)
        assert ignored & 1 << 12 == 0  # SIGPIPE
    process = started("-C", run, "-q", "--", run / "no such program")
    assert "can't be started" in process.communicate(timeout=600)[1] and process.returncode == 1


# --- many nodes ----------------------------------------------------------------------------------


def test_of_two_at_once_one_decides_and_both_say_the_same(run: Path) -> None:
    cut(run, 6)
    both = [started("-C", run, "--repair", "--print") for _ in range(2)]
    said = [process.communicate(timeout=600) for process in both]
    assert [out for out, _ in said] == [f"{run / 'global_step4'}\n"] * 2, said
    assert len(Run.open(run).receipts()) == 1


def test_one_who_looked_too_early_looks_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other repairs between this one's look and its own repair."""
    cut(run, 6)
    own = ready._repaired

    def late(*given: object) -> object:
        monkeypatch.setattr(ready, "_repaired", own)
        decide(Run.open(run), 2, repair=True)
        return own(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(ready, "_repaired", late)
    seen = decide(Run.open(run), 2, repair=True, wait=60)
    assert seen.ready and seen.step == 4
    assert len(Run.open(run).receipts()) == 1


def test_it_waits_for_who_works_on_the_run(surgeon: Surgeon, run: Path) -> None:
    with lock.hold(run, "a long surgery"):
        refused = surgeon("ready", "--wait", 0, "-C", run)
        assert refused.exit_code == 1 and "a long surgery" in refused.stderr
        answers: list[int | None] = []
        waiting = threading.Thread(
            target=lambda: answers.append(decide(Run.open(run), 2, wait=600).step)
        )
        waiting.start()
        time.sleep(0.2)
        assert not answers
    waiting.join(600)
    assert answers == [6]


# --- what it costs -------------------------------------------------------------------------------

OPENED: list[str] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if OPENED is not None and event == "open":
        OPENED.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else "")


sys.addaudithook(_note)


@pytest.mark.parametrize("maker", [make, make_run])
def test_it_opens_the_pointers_and_one_step(
    surgeon: Surgeon, tmp_path: Path, maker: Callable[..., Path]
) -> None:
    """However many steps are saved."""
    global OPENED

    def opened(steps: int) -> list[str]:
        global OPENED
        root = maker(tmp_path / f"{steps}", range(1, steps + 1))
        OPENED = []
        try:
            assert surgeon("ready", "-C", root).exit_code == 0
            inside = [name for name in OPENED if name.startswith(f"{root}/")]
        finally:
            OPENED = None
        state = Run.open(root).format
        others = {str(path) for step in range(1, steps) for path in state.files(root, step)}
        assert others and not others & {*inside}
        return inside

    assert len(opened(40)) == len(opened(2)) > 0


# --- killed --------------------------------------------------------------------------------------


@pytest.mark.long
def test_killed_at_every_call_a_repair_is_before_or_after() -> None:
    found = reports((TORN, faults, ("KILL",)), (ASIDE, faults, ("KILL",), (False,), 3))
    sound(found, 60)
    assert all(set(report.codes) == {KILLED} for report in found)


def test_a_disk_that_refuses_leaves_the_run_as_it_was() -> None:
    found = reports((TORN, faults, ("EIO", "ENOSPC"), (False,), 4))
    sound(found, 20)
    assert set(found[0].codes) <= {1, 5}


def test_undo_takes_it_back(run: Path) -> None:
    before = snapshot(cut(run, 6))
    assert decide(Run.open(run), 2, repair=True).receipt == "0001"
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    assert look.verify(Run.open(run)).findings != ()


# --- the page ------------------------------------------------------------------------------------


def test_the_page_shows_what_is_printed(
    surgeon: Surgeon, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cut(run, 6))
    page = (REPO / "docs" / "ready.md").read_text("utf-8")
    (shown,) = (body.splitlines() for name, body in BLOCK.findall(page))
    printed = []
    for line in shown:
        if line.startswith("$ ckptsurgeon "):
            said = surgeon(*line.split()[2:]).stdout.replace(str(run), "/runs/a")
            printed += [line, *said.splitlines()]
    assert matches(shown, printed), printed


def test_the_commands_of_the_page_are_taken(surgeon: Surgeon, run: Path) -> None:
    """Those of the init container and of the launchers, with this run in place of theirs."""
    page = (REPO / "docs" / "ready.md").read_text("utf-8")
    typed = re.findall(r"ckptsurgeon ready (-C RUN [^\n)]*)", page)
    typed += [text.replace(",", "") for text in re.findall(r"\[ckptsurgeon, ready, (.*)\]", page)]
    assert len(typed) == 4
    for words in typed:
        taken = words.replace("RUN", str(run)).replace("/runs/a", str(run)).partition(" -- ")[0]
        assert surgeon("ready", *taken.split()).exit_code == 0, words
