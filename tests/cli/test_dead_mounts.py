"""A mount beside a run whose server is gone: nothing in it is needed, no command ends with it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Surgeon
from tests.support.tiny_run import make_run

REASONS = [errno.EIO, errno.ESTALE, errno.ENOTCONN]
PLACES = ["scratch", "logs", "wandb", "../runs", "../scratch"]
"""Beside the run, and one above: of any name, and of those that trainers log into."""
COMMANDS = [
    ["status"], ["show"], ["verify"], ["log"], ["doctor"], ["advise"], ["diff", "2", "4"],
    ["set", "beta2=0.9", "-n"], ["rollback", "--to", "2", "-n"], ["reset", "moments", "-n"],
    ["rollback", "--to", "2", "--yes"], ["undo", "--yes"], ["redo", "--yes"],
]  # fmt: skip


@contextmanager
def dead(folder: Path, reason: int) -> Iterator[None]:
    """No call on the folder is answered, nor on what was in it; the listing of the one above is."""
    real = {name: getattr(os, name) for name in ("stat", "lstat", "scandir", "listdir", "open")}

    def failing(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any = ".", *words: Any, **named: Any) -> Any:
            if not isinstance(path, int) and Path(
                os.path.normpath(Path.cwd() / os.fsdecode(path))
            ).is_relative_to(folder):
                raise OSError(reason, os.strerror(reason), str(path))
            return ask(path, *words, **named)

        return asked

    try:
        for name, call in real.items():
            setattr(os, name, failing(call))
        yield
    finally:
        for name, call in real.items():
            setattr(os, name, call)


@pytest.mark.parametrize("place", PLACES)
def test_no_command_ends_with_a_dead_mount_beside_the_run(
    surgeon: Surgeon, tmp_path: Path, place: str
) -> None:
    """Each says and does what it would without it; a plan names one that may have logs."""
    said: dict[bool, list[tuple[int, str]]] = {}
    for is_dead in (False, True):
        above = tmp_path / str(is_dead)
        root = make_run(above / "in" / "run", (2, 4))
        mount = Path(os.path.normpath(root.parent / place))
        mount.mkdir()
        reason = REASONS[PLACES.index(place) % len(REASONS)]
        said[is_dead] = []
        for words in COMMANDS:
            if is_dead:
                with dead(mount, reason):
                    done = surgeon(*words, "-C", root)
            else:
                done = surgeon(*words, "-C", root)
            text = done.stdout + done.stderr
            if is_dead and "-n" in words and mount.name in ("logs", "wandb", "runs"):
                assert "can't be looked at" in text or words[0] != "rollback", text
            said[is_dead].append((done.exit_code, done.stderr))
    assert [code for code, _ in said[True]] == [code for code, _ in said[False]], said[True]


def test_a_wrong_path_is_answered_beside_a_dead_mount(surgeon: Surgeon, tmp_path: Path) -> None:
    """Where no run is, too, and where one is below."""
    make_run(tmp_path / "some" / "run", (2, 4))
    (tmp_path / "mount").mkdir()
    (tmp_path / "some" / "mount").mkdir()
    for mount in (tmp_path / "mount", tmp_path / "some" / "mount"):
        with dead(mount, errno.ENOTCONN):
            lost = surgeon("status", "-C", tmp_path / "sone")
            assert f"ckptsurgeon status -C {tmp_path / 'some'}" in lost.stderr, lost.stderr
            none = surgeon("status", "-C", tmp_path / "some")
            assert f"ckptsurgeon -C {tmp_path / 'some/run'} status" in none.stderr, none.stderr


@pytest.mark.parametrize("named", [True, False])
def test_logs_that_can_not_be_looked_at_stop_what_needs_them(
    surgeon: Surgeon, tmp_path: Path, named: bool
) -> None:
    """An edit does, as a live trainer is known by them; what it is told to do next works, and names
    them too."""
    root = make_run(tmp_path / "run", (2, 4))
    mount = tmp_path / "mount" if named else root / "mount"
    mount.mkdir()
    if named:
        (root / "ckptsurgeon.yaml").write_text(f"tensorboard: [{mount}]\n")
    why = f"{mount}: Stale file handle"
    with dead(mount, errno.ESTALE):
        for words in (["show"], ["verify"], ["log"]):
            assert surgeon(*words, "-C", root).exit_code == 0
        for words in (["set", "eps=1e-6", "-n"], ["rollback", "--to", "2", "--yes"], ["advise"]):
            refused = surgeon(*words, "-C", root)
            assert (refused.exit_code, refused.stdout) == (1, "")
            assert f"error: {why}\n" in refused.stderr
            assert f"next: ckptsurgeon -C {root} status\n" in refused.stderr
        shown = surgeon("status", "-C", root)
        assert shown.exit_code == 0 and "can't be looked at" in shown.stdout
        found = surgeon("doctor", "-C", root)
        assert "the logs can't be looked at: " in " ".join(found.stdout.split()), found.stdout
        told = json.loads(surgeon("status", "--json", "-C", root).stdout)
        assert (told["logs_unread"], told["logs"], told["writers"]) == (why, None, None)
