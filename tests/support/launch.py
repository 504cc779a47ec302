"""The one way in which tests start the trainer, and other programs that import torch."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.warm import Request

REPO = Path(__file__).parent.parent.parent
ON_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def launch(*arguments: object, ranks: int = 1, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the trainer to its end and return what it printed; `status` is what it must exit with.

    It is a process of its own that shares only the import of its libraries with others. Tests of
    signals and of torchrun itself start the trainer as a user does."""
    return run_module("train", *arguments, ranks=ranks, status=status)


def first_line(root: Path, ranks: int = 1) -> str:
    """What the trainer that resumes this run says that its next step uses; it trains no step."""
    done = launch(f"--config={root / 'train.yaml'}", "--exit-after-first-line", ranks=ranks)
    return done.stdout.splitlines()[0]


def run_module(
    module: str,
    *arguments: object,
    ranks: int = 1,
    status: int = 0,
    environment: Mapping[str, str] | None = None,
    warm: str = "",
) -> subprocess.CompletedProcess[str]:
    """The same for any module of this repository, with `environment` above this process's own;
    with several ranks as torchrun does, which exits with 1 when a rank fails. All that name a
    module `warm` share its import."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        words = [str(word) for word in arguments]
        variables = {**os.environ, **ON_CPU, **(environment or {})}
        request = Request(module, words, variables, ranks, *map(str, files))
        codes = _answer(request, warm)
        out, err = (file.read_text("utf-8") for file in files)
    code = codes[0] if ranks == 1 else int(any(codes))
    assert code == status, f"exit {codes}\n{err[-3000:]}"
    return subprocess.CompletedProcess([module, *words], code, out, err)


def by_step(
    module: str, *arguments: object, ranks: int = 1, environment: Mapping[str, str] | None = None
) -> dict[int, Any]:
    """What a program says of each step."""
    quiet = {"PYTHONWARNINGS": "ignore", **(environment or {})}
    return said_by_step(run_module(module, *arguments, ranks=ranks, environment=quiet).stdout)


def said_by_step(text: str) -> dict[int, Any]:
    """The one line of JSON among all that a program's libraries print, by the step."""
    (line,) = (line for line in text.splitlines() if line.startswith('{"'))
    return {int(step): said for step, said in json.loads(line).items()}


def _answer(request: Request, warm: str) -> list[int]:
    server = _server(warm)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(asdict(request)) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, "the process that forks the trainers is gone"
    return list(json.loads(line))


@cache
def _server(warm: str) -> subprocess.Popen[str]:
    """One for each process of the test suite, and one more for a module; it ends with it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm", *[warm] * bool(warm)],
        cwd=REPO,
        env={**os.environ, **ON_CPU},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server
