"""stdout that is closed, full, or whose reader has gone: what was done is told as done."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import on_terminal
from tests.conftest import Trained
from tests.support.launch import REPO

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
@pytest.mark.long
def test_a_closed_stream_is_no_traceback(trained: Trained, closed: str) -> None:
    root = trained()
    done = shell(f"surgeon set-lr 5e-4 --yes -C {root} {closed}")
    assert (done.returncode, receipts(root)) == (0, ["0001"])
    assert "Traceback" not in done.stderr


@pytest.mark.long
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
    lost = "what would be done can't be shown: No space left on device"
    assert done.stderr.startswith(f"error: {lost}\nuntouched: the run is exactly as it was\n")
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", ["set-lr 5e-4 --yes", "set-lr 5e-4 --yes --json"])
@pytest.mark.long
def test_a_reader_of_one_line_decides_nothing(trained: Trained, words: str) -> None:
    """The plan was shown, or was not: then stderr says that nothing was done."""
    root = trained()
    for reader in ("head -1", "true"):
        before = receipts(root)
        done = shell(f"surgeon {words} -C {root} | {reader}")
        if done.returncode == 0:
            assert len(receipts(root)) == len(before) + 1
            shell(f"surgeon undo --yes -C {root}")
        else:
            assert (done.returncode, receipts(root)) == (1, before)
            assert done.stderr.startswith(
                "error: what would be done can't be shown: Broken pipe\nuntouched: "
            )


@pytest.mark.long
def test_no_attic_is_removed_that_could_not_be_named(trained: Trained) -> None:
    """Where the reader has gone, as where the disk behind stdout is full."""
    root = trained()
    shell(f"surgeon rollback --to 4 --yes -C {root}")
    attic = root / ".ckptsurgeon" / "attic" / "0001"
    reader, gone = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "ckptsurgeon", "prune", "--keep", "0", "--yes", "-C", str(root)]
    with os.fdopen(gone, "wb") as unread, Path("/dev/full").open("wb") as full:
        for stdout, why in ((unread, "Broken pipe"), (full, "No space left on device")):
            done = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True)
            assert (done.returncode, attic.is_dir()) == (1, True)
            assert why in done.stderr and "Traceback" not in done.stderr
        done = subprocess.run([*words, "--quiet"], stdout=unread, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, attic.exists()) == (0, False), done.stderr


@pytest.mark.parametrize("words", ["status -C {}", "--help", "status --help", "--version"])
@pytest.mark.long
def test_what_is_looked_at_and_can_not_be_shown_is_an_error(trained: Trained, words: str) -> None:
    done = shell(f"surgeon {words.format(trained())} > /dev/full")
    assert done.returncode == 1
    lost = "the answer can't be written to stdout: No space left on device"
    assert done.stderr.startswith(f"error: {lost}\nuntouched: the run is exactly as it was\n")
    assert "Exception ignored" not in done.stderr


def test_no_command_asks_whether_its_answer_goes_to_a_terminal() -> None:
    """A law: who keeps an answer in a file knows what another sees. Only colours may differ, which
    `report/terminal.py` decides, and bars of progress, on stderr."""
    asks = {
        f"{path.relative_to(REPO)}: {line.strip()}"
        for path in (REPO / "ckptsurgeon").rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if "isatty" in line and not re.search(r"sys\.(stdin|stderr)\.isatty\(\)", line)
    }
    assert {line.partition(":")[0] for line in asks} == {
        "ckptsurgeon/report/terminal.py",
        "ckptsurgeon/report/progress.py",
    }, asks


def test_what_status_says_on_a_terminal_it_says_in_a_pipe(diverged: Path) -> None:
    code, shown = on_terminal("", "-C", diverged, "status")
    piped = shell(f"COLUMNS=100 surgeon status -C {diverged} | tee {diverged}/kept")
    assert (code, piped.returncode) == (0, 0)
    assert piped.stdout == shown == (diverged / "kept").read_text()
    assert "the loss diverged at step 201" in shown
