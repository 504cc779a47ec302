"""The command line as a user calls it, in this process and on a terminal of its own."""

from __future__ import annotations

import math
import os
import pty
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ckptsurgeon.cli import app
from ckptsurgeon.report import progress
from tests.conftest import Trained
from tests.support.event_logs import write_log
from tests.support.launch import REPO

Surgeon = Callable[..., Result]
PLAIN = {"NO_COLOR": None, "FORCE_COLOR": None, "CKPTSURGEON_RUN": None, "COLUMNS": "100"}


@pytest.fixture(autouse=True)
def _no_phase_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed of a phase that takes long is no part of an answer, on a busy machine too."""
    monkeypatch.setattr(progress, "PATIENCE", math.inf)


def invoke(*words: object, input: str | None = None, **env: str) -> Result:
    """`invoke("status", "-C", run)`: the result, with stdout, stderr and exit_code."""
    runner = CliRunner(env={**PLAIN, **env})
    return runner.invoke(app, [str(word) for word in words], input=input)


@pytest.fixture
def surgeon() -> Surgeon:
    """`invoke`, for a test that calls it by this name."""
    return invoke


def hints(text: str) -> list[list[str]]:
    """The commands in an output, each without what is said about it after four spaces."""
    found = (line.partition("ckptsurgeon ")[2] for line in text.splitlines())
    return [shlex.split(command.split("    ")[0]) for command in found if command]


def on_terminal(answer: str | dict[str, str], *words: object) -> tuple[int, str]:
    """Exit status and output of a process whose stdin, stdout and stderr are one terminal.

    `answer` is typed when the process asks, or each of several once its prompt is there; Ctrl-C is
    typed as `\\x03`."""
    answers = {"[y/N]": answer} if isinstance(answer, str) else dict(answer)
    keeper, terminal = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *map(str, words)],
        cwd=REPO,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            read = os.read(keeper, 4096)
        except OSError:  # EIO: the last holder of the terminal is gone
            break
        if not read:
            break
        output += read
        for prompt in [each for each in answers if each.encode() in output]:
            os.write(keeper, answers.pop(prompt).encode())
    os.close(keeper)
    return process.wait(timeout=600), output.decode().replace("\r\n", "\n")


# In the process itself, not between fork and exec: a suite that has trained in this process is too
# large to be forked. One that was started in the background ignores Ctrl-C, and so would this.
OWN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "ckptsurgeon", *sys.argv[1:]])
"""


@pytest.fixture
def diverged(trained: Trained) -> Path:
    """Real checkpoints at 2, 4, 6 and 8, beside logs whose loss leaves its course at 60."""
    root = trained()
    for path in (root / "tensorboard").glob("*tfevents*"):
        path.unlink()
    dice = random.Random(2)
    losses = [2 + dice.gauss(0, 0.05) for _ in range(200)] + [9.0] * 200
    write_log(root / "tensorboard", losses)
    return root
