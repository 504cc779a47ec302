"""A file that has to be waited for where another should be: no command waits for it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench import chunked
from ckptsurgeon import whole_file
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
KERNEL = "/proc/kmsg"
"""A regular file, by what is said of it, whose reader waits for the next message."""


def kernel(path: Path) -> None:
    """The file becomes a link to it."""
    path.unlink(missing_ok=True)
    path.symlink_to(KERNEL)


PUT = {"pipe": fifo, "kernel": kernel}


@contextmanager
def no_wait() -> Iterator[list[str]]:
    """What is opened as a file is, and would be waited for: that fails here."""
    waits: list[str] = []

    def refuse(event: str, details: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, _, flags = details
        try:
            info = Path(path).stat()
        except (OSError, TypeError, ValueError):
            return
        waits_for = stat.S_ISFIFO(info.st_mode) or os.path.realpath(path) == KERNEL
        if waits_for and not flags & os.O_NONBLOCK:
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


def each_in_its_place(put: Callable[[Path], None], root: Path, out: Path) -> None:
    found: list[str] = []
    for path in files(root):
        kept = out / "kept"
        shutil.copy2(path, kept)
        put(path)
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


@pytest.mark.parametrize("kind", PUT)
def test_a_watch_sees_who_would_wait(tmp_path: Path, kind: str) -> None:
    PUT[kind](tmp_path / "file")
    with no_wait() as waits:
        with pytest.raises(OSError, match="for ever"):
            (tmp_path / "file").read_bytes()
        with suppress(PermissionError):  # only root reads what the kernel says
            os.close(os.open(tmp_path / "file", os.O_RDONLY | os.O_NONBLOCK))
    assert waits == [str(tmp_path / "file")]


@pytest.mark.slow
def test_in_a_run_of_the_bundled_trainer(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    operate(root, {"set": {"lr": 5e-4}})
    each_in_its_place(fifo, root, tmp_path)


@pytest.mark.parametrize("kind", ["pipe", pytest.param("kernel", marks=pytest.mark.slow)])
@pytest.mark.long
def test_in_a_run_of_transformers(tmp_path: Path, kind: str) -> None:
    root = make_run(tmp_path / "run", (2, 4, 8))
    (root / "ckptsurgeon.yaml").write_text("{}\n")
    (root / "ckptsurgeon.log").touch()
    (root / "metrics.csv").write_text("step,loss\n1,2.0\n2,1.5\n")
    (root / "checkpoint-8" / "model.safetensors").touch()
    assert call("set", "eps=1e-6", "--yes", "-C", root)[0] == 0
    each_in_its_place(PUT[kind], root, tmp_path)


@pytest.mark.parametrize("kind", PUT)
@pytest.mark.long
def test_in_a_run_of_torchtitan(tmp_path: Path, kind: str) -> None:
    chunked.make(tmp_path / "run", 2, 2)
    each_in_its_place(PUT[kind], tmp_path / "run", tmp_path)


def test_what_is_known_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """Whatever the size says."""
    kernel(tmp_path / "file")
    with pytest.raises(OSError):
        whole_file.read(tmp_path / "file", 1 << 40)
