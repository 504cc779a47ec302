"""stdout that is closed, full, or whose reader has gone: what was done is told as done."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.support.launch import REPO
from tests.support.tiny_run import make_run

SURGEON = f"{shlex.quote(sys.executable)} -m ckptsurgeon"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """What bash makes of `line`, with `surgeon` for the command; the status is the surgeon's."""
    return subprocess.run(
        ["bash", "-c", line.replace("surgeon", SURGEON) + "; exit ${PIPESTATUS[0]}"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )


def receipts(root: Path) -> list[str]:
    folder = root / ".ckptsurgeon" / "receipts"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_traceback(trained: Trained, closed: str) -> None:
    root = trained()
    done = shell(f"surgeon set-lr 5e-4 --yes -C {root} {closed}")
    assert (done.returncode, receipts(root)) == (0, ["0001"])
    assert "Traceback" not in done.stderr


def test_a_surgery_that_is_done_is_0_though_nobody_reads_the_end(trained: Trained) -> None:
    root = trained()
    done = shell(f"surgeon set-lr 5e-4 --yes --json -C {root} > /dev/full")
    assert (done.returncode, receipts(root)) == (0, ["0001"])
    assert "done: receipt 0001" in done.stderr
    done = shell(f"surgeon undo --yes --json -C {root} | true")
    assert (done.returncode, receipts(root)) == (0, ["0001", "0002"])


def test_a_plan_that_can_not_be_shown_is_not_applied(trained: Trained) -> None:
    root = trained()
    done = shell(f"surgeon set-lr 5e-4 --yes -C {root} > /dev/full")
    assert (done.returncode, receipts(root)) == (1, [])
    assert done.stderr.startswith("error: No space left on device\nuntouched: ")
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", ["status -C {}", "--help", "status --help", "--version"])
def test_what_is_looked_at_and_can_not_be_shown_is_an_error(trained: Trained, words: str) -> None:
    done = shell(f"surgeon {words.format(trained())} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device\nuntouched: ")
    assert "Exception ignored" not in done.stderr


READERS = {
    "gone": ("", False, False),
    "gone, unbuffered": ("1", False, False),
    "both gone": ("", True, False),
    "both gone, unbuffered": ("1", True, False),
    "after a line": ("1", False, True),
}
"""Who reads: PYTHONUNBUFFERED, whether stderr is read by the same, and whether one line is."""


def piped(words: str, reader: str, root: Path) -> tuple[int, str]:
    """Exit status and stderr of a command whose stdout is a pipe that nobody reads to its end."""
    unbuffered, both, one_line = READERS[reader]
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptsurgeon", *words.split(), "-C", str(root)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing if both else subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    if one_line:
        os.read(reading, 1)
    os.close(reading)
    _, errors = process.communicate(timeout=600)
    return process.returncode, errors or ""


EDITS = ("set-lr 5e-4", "undo", "rollback --to 2", "prune --keep 0")


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_that_closes_does_not_decide_whether_an_edit_is_done(
    tmp_path: Path, reader: str
) -> None:
    """With --yes it is applied, and stderr says so; without, it is refused there."""
    root, both = make_run(tmp_path / "run", (2, 4)), READERS[reader][1]
    status, errors = piped(EDITS[0], reader, root)
    assert (status, receipts(root)) == (1, []) and (both or errors.startswith("error: "))
    for done, words in enumerate(EDITS, 1):
        status, errors = piped(f"{words} --yes", reader, root)
        assert status == 0 and "Traceback" not in errors and "Exception ignored" not in errors
        assert len(receipts(root)) == min(done, 3)
        assert both or ("removed for good" if words.startswith("prune") else "done: ") in errors
    assert not list((root / ".ckptsurgeon" / "attic").iterdir())
    assert piped("prune --keep 0", reader, root)[0] == 0  # there is nothing to do
    assert piped("rollback --to 2", reader, root)[0] == 0
