"""A pipe where a file should be: no command waits for somebody to write to it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trained
from tests.hostile.hostile_run import call, fifo
from tests.hostile.watched import audited
from tests.support.surgeries import operate
from tests.support.tiny_run import make_run

LOOKS = (
    ("status",), ("show",), ("verify", "--level", "4"), ("doctor", "--vitals"), ("advise",),
    ("log",), ("set-lr", "4e-4", "-n"), ("rollback", "--to", "4", "-n"), ("reset", "moments", "-n"),
    ("undo", "-n"), ("prune", "--keep", "1", "-n"), ("relaunch", "-n"), ("diff", "4", "8"),
    ("report", "-o", "OUT.svg"), ("export", "OUT.safetensors"), ("fork", "OUT", "--copy"),
    ("repair-latest", "-n"), ("shrink", "-n"), ("recover",),
)  # fmt: skip


@contextmanager
def no_wait() -> Iterator[list[str]]:
    """The pipes that are opened as a file is: that fails here, and would wait elsewhere."""
    waits: list[str] = []

    def refuse(event: str, details: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, _, flags = details
        try:
            info = Path(path).stat()
        except (OSError, TypeError, ValueError):
            return
        if stat.S_ISFIFO(info.st_mode) and not flags & os.O_NONBLOCK:
            waits.append(f"{path}")
            raise OSError("it would wait here for ever")

    with audited(refuse):
        yield waits


def files(root: Path) -> list[Path]:
    """One of each kind: what differs in numbers alone is of one kind."""
    kinds: dict[str, Path] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            name = "".join("#" if c.isdigit() else c for c in path.relative_to(root).as_posix())
            kinds[name] = path
    return list(kinds.values())


def every_pipe(root: Path, out: Path) -> None:
    found: list[str] = []
    for path in files(root):
        kept = out / "kept"
        shutil.copy2(path, kept)
        fifo(path)
        for words in LOOKS:
            typed = [word.replace("OUT", str(out / "new")) for word in words]
            with no_wait() as waits:
                status, said, error = call(*typed, "-y", "-C", str(root))
            found += [f"{words}: {path}" for path in waits]
            assert status in range(6), (path, words, said, error)
            assert "Traceback" not in error, (path, words, error)
            for made in out.glob("new*"):
                shutil.rmtree(made) if made.is_dir() else made.unlink()
        path.unlink()
        shutil.copy2(kept, path)
    assert not found, "\n".join(found)


def test_a_watch_sees_who_would_wait(tmp_path: Path) -> None:
    fifo(tmp_path / "pipe")
    with no_wait() as waits:
        with pytest.raises(OSError, match="for ever"):
            (tmp_path / "pipe").read_bytes()
        os.close(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK))
    assert waits == [str(tmp_path / "pipe")]


def test_a_pipe_in_a_run_of_the_bundled_trainer(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    operate(root, {"set": {"lr": 5e-4}})
    every_pipe(root, tmp_path)


def test_a_pipe_in_a_run_of_transformers(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (2, 4, 8))
    (root / "ckptsurgeon.yaml").write_text("{}\n")
    (root / "ckptsurgeon.log").touch()
    (root / "checkpoint-8" / "model.safetensors").touch()
    every_pipe(root, tmp_path)
