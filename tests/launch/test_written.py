"""A command that lies in a run is shown before it runs, and asked about where others wrote it."""

from __future__ import annotations

import os
import pty
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ckptsurgeon import Run
from ckptsurgeon.launch import written
from tests.hostile.hostile_run import call
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
NOBODY = 65534


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield make_run(Path(name) / "run")


def starts(root: Path, code: str) -> Path:
    """The run's own file has Python run `code`."""
    file = root / "ckptsurgeon.yaml"
    file.write_text(yaml.safe_dump({"relaunch": {"command": [sys.executable, "-c", code]}}))
    return file


@pytest.fixture
def proof(root: Path) -> Path:
    """The file that the command of the run makes."""
    proof = root.parent / "proof"
    starts(root, f"open({str(proof)!r}, 'w')")
    return proof


def test_what_is_started_is_shown_with_the_file_that_says_so(root: Path, proof: Path) -> None:
    _, _, said = call("relaunch", "-C", root)
    assert proof.exists()
    assert f"starts: {sys.executable} -c " in said
    assert f"as {root / 'ckptsurgeon.yaml'} says" in said


@ROOT
def test_a_script_is_written_with_a_word_of_what_it_starts(root: Path, proof: Path) -> None:
    written_by_others(root, "the file")
    script = root.parent / "job.sh"
    status, _, said = call("relaunch", "--slurm", "-o", script, "-C", root)
    assert status == 0 and script.exists() and not proof.exists(), said
    assert f"starts: {sys.executable} -c " in said
    assert f"as {root / 'ckptsurgeon.yaml'} says; {root / 'ckptsurgeon.yaml'} belongs to" in said


OTHERS = (
    "the file",
    "the folder",
    "anybody writes the file",
    "anybody writes the folder",
    "a link",
)


def written_by_others(root: Path, how: str) -> None:
    file = root / "ckptsurgeon.yaml"
    if how == "the file":
        os.chown(file, NOBODY, NOBODY)
    elif how == "the folder":
        os.chown(root, NOBODY, NOBODY)
    elif how == "a link":
        elsewhere = root.parent / "elsewhere"
        elsewhere.mkdir()
        file.rename(elsewhere / "settings")
        os.chown(elsewhere / "settings", NOBODY, NOBODY)
        file.symlink_to(elsewhere / "settings")
    else:
        (file if how.endswith("file") else root).chmod(0o777)


@ROOT
@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.long
def test_yes_does_not_start_what_others_wrote(root: Path, proof: Path, how: str) -> None:
    written_by_others(root, how)
    before = snapshot(root)
    edit = ("set", "lr=1e-4", "--relaunch", "--yes")
    for words in (("relaunch",), ("relaunch", "--yes"), ("relaunch", "--json", "--yes"), edit):
        status, _, said = call(*words, "-C", root)
        assert status == 1, said
        assert "no terminal to ask on" in said
        assert str(proof) in said
        if "--json" not in words:
            typed = shlex.split(said.rpartition("next: ")[2].partition("    ")[0])
            assert typed[typed.index("--") + 1 :] == written.words(Run.open(root))
    assert not proof.exists()
    assert snapshot(root) == before
    assert call("relaunch", "--dry-run", "-C", root)[0] == 0
    assert not proof.exists()
    assert call("relaunch", "-C", root, "--exec", "--", "touch", proof)[0] == 0
    assert proof.exists()


@ROOT
@pytest.mark.parametrize("answer", ["n", "y"])
def test_on_a_terminal_the_command_is_asked_about(
    root: Path, proof: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by_others(root, "the file")
    master, slave = pty.openpty()
    os.write(master, f"{answer}\n".encode())
    with os.fdopen(slave, "r") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        from ckptsurgeon.cli import app

        with pytest.raises(SystemExit):
            app(["relaunch", "-C", str(root)])
    os.close(master)
    assert proof.exists() is (answer == "y")


def test_ones_own_command_is_not_asked_about(root: Path, proof: Path) -> None:
    assert written.by_others(written.file(Run.open(root))) == ""
    root.parent.chmod(0o1777)
    assert written.by_others(written.file(Run.open(root))) == ""
