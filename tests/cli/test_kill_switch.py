"""A kill switch of who is gone does not stop the next trainer; one of who may be there is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.launch.kill_switch import clear_left
from ckptsurgeon.transaction import lock
from tests.cli.conftest import Surgeon
from tests.conftest import Trained

SQUEUE = """#!/bin/sh
case "$SAYS" in
  "") echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
  down) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1;;
  silent) exit 0;;
esac
echo "$SAYS"
"""
GONE = ("", "silent", "TIMEOUT n1", "CANCELLED n1", "PENDING ", "NODE_FAIL n1")
THERE = ("down", "RUNNING n[1-2]", "COMPLETING n1", "SUSPENDED n1", "STOPPED n1")
PERSONS = ("", "1", "815", "job", "job x", "job 815 now", "watch this space", "watch", "x" * 101)


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(SQUEUE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@given(
    number=st.integers(1, 10**12),
    own=st.integers(1, 10**12) | st.none(),
    said=st.sampled_from([*GONE, *THERE]),
    persons=st.sampled_from(PERSONS) | st.none(),
    end=st.sampled_from(["", "\n"]),
    by_word=st.booleans(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_goes_if_its_job_is_gone_stays_if_a_persons_and_is_refused_else(
    trained: Trained, squeue: None, tmp_path: Path,
    number: int, own: int | None, said: str, persons: str | None, end: str, by_word: bool,
) -> None:  # fmt: skip
    root = tmp_path / "run"
    if not root.exists():
        trained().rename(root)
        (root / "ckptsurgeon.yaml").write_text(
            json.dumps({"relaunch": {"command": ["x"], "kill_switch": "stop"}})
        )
    switch = tmp_path / "other" if by_word else root / "stop"
    switch.unlink(missing_ok=True)
    words = ["train.py", "kill_switch_path=/nowhere", f"kill_switch_path={switch}"]
    argv = words if by_word else []
    text = (f"job {number}" if persons is None else persons) + end
    switch.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAYS", said)
        if own is None:
            patch.delenv("SLURM_JOB_ID", raising=False)
        else:
            patch.setenv("SLURM_JOB_ID", str(own))
        if persons is not None or own == number:
            assert clear_left(Run.open(root), argv) == ""
        elif said in GONE:
            told = clear_left(Run.open(root), argv)
            assert told == f"{switch}: job {number} left this kill switch, and is gone: removed"
            assert not switch.exists()
            assert clear_left(Run.open(root), argv) == ""
            return
        else:
            with pytest.raises(SurgeryError, match=f"{switch}: job {number} put this") as caught:
                clear_left(Run.open(root), argv)
            assert caught.value.untouched.startswith("no trainer was started")
        assert switch.read_text() == text


def test_the_job_that_asks_keeps_its_own(
    trained: Trained, squeue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signal came before its trainer was there: that one saves, and the job is requeued."""
    run = Run.open(trained())
    (run.root / "kill-switch").write_text("job 4711\n")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SAYS", "")
    assert clear_left(run, [f"kill_switch_path={run.root}/kill-switch"]) == ""
    assert (run.root / "kill-switch").exists()


def test_that_of_a_watch_goes_with_it(trained: Trained) -> None:
    run = Run.open(trained())
    switch = run.root / "kill-switch"
    argv = [f"kill_switch_path={switch}"]
    switch.write_text("watch 0001\n")
    code = (
        "import pathlib, sys, time\nfrom ckptsurgeon.transaction import lock\n"
        "with lock.hold(pathlib.Path(sys.argv[1]), 'a watch', lock.WATCHER):\n"
        "    print('held', flush=True); time.sleep(600)"
    )
    watch = subprocess.Popen(
        [sys.executable, "-c", code, str(run.root)], stdout=subprocess.PIPE, text=True
    )
    assert watch.stdout is not None
    watch.stdout.readline()
    with pytest.raises(SurgeryError, match="a watch put this kill switch there, and is there: "):
        clear_left(run, argv)
    watch.kill()
    watch.stdout.close()
    watch.wait()
    assert lock.holder(run.root, lock.WATCHER) is not None
    assert "a watch left this kill switch" in clear_left(run, argv) and not switch.exists()


def test_relaunch_says_so_and_starts_or_starts_nothing(
    trained: Trained, surgeon: Surgeon, squeue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained()
    code = (
        "import os\n"
        "os.write(1, b'{\"step\": 9}\\n')\n"
        f"assert not os.path.exists({str(root / 'stop')!r})"
    )
    own = {"command": [sys.executable, "-c", code], "kill_switch": "stop"}
    (root / "ckptsurgeon.yaml").write_text(json.dumps({"relaunch": own}))
    (root / "stop").write_text("job 815\n")
    monkeypatch.setenv("SAYS", "RUNNING n1")
    said = surgeon("relaunch", "-C", root)
    assert said.exit_code == 1 and "job 815 put this kill switch there" in said.stderr
    assert '{"step": 9}' not in said.stdout
    monkeypatch.setenv("SAYS", "")
    said = surgeon("relaunch", "--dry-run", "-C", root)
    assert said.exit_code == 0 and (root / "stop").exists()
    said = surgeon("relaunch", "-C", root)
    assert '{"step": 9}' in said.stdout and "AssertionError" not in said.stderr
    assert f"{root / 'stop'}: job 815 left this kill switch, and is gone: removed" in said.stderr
