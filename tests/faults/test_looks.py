"""A look at a name that fails, as on a network file system, is no answer: nothing is half done."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import disk
from ckptsurgeon.cli.usage import from_system
from ckptsurgeon.formats.step_folders import files_below
from ckptsurgeon.transaction import kept
from tests.faults.sweep import Stage, verdict
from tests.faults.toy import SCENARIOS
from tests.faults.world import Scenario

SOURCE = Path(disk.__file__).parents[1]


class Looks:
    """The looks at names below a folder: which of them fails, and how many there were."""

    def __init__(self, below: Path, at: int = 0) -> None:
        self.below, self.at, self.seen = str(below), at, 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        real = os.stat, os.lstat
        try:
            os.stat, os.lstat = map(self._failing, real)  # type: ignore[assignment]
            yield
        finally:
            os.stat, os.lstat = real  # type: ignore[assignment]

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(path: Any, *words: Any, **named: Any) -> Any:
            if isinstance(path, (str, Path)) and str(path).startswith(self.below):
                self.seen += 1
                if self.seen == self.at:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *words, **named)

        return ask


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_a_look_that_fails_leaves_the_run_before_or_after(
    scenario: Scenario, tmp_path: Path
) -> None:
    looks = Looks(tmp_path)

    def act(world: Path) -> None:
        with looks():
            try:
                scenario.act(world)
            except OSError as error:  # where it reads; `main` makes of it what is said then
                raise from_system(error) from error

    stage = Stage(replace(scenario, act=act), tmp_path)
    most, codes = looks.seen, set()
    assert most > 20
    for at in range(1, most + 1):
        stage.reset()
        looks = Looks(tmp_path, at)
        ended = stage.act()
        assert looks.seen >= at
        assert verdict(stage, ended) is None, f"{at} of {most}"
        codes.add(ended.code)
    assert codes >= {1, 5}


@pytest.mark.parametrize("reason", [errno.EIO, errno.EACCES, errno.ENOENT])
def test_a_folder_that_can_not_be_listed_is_not_empty(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that this user may not list, as some beside a run, is passed over where logs are looked
    for; a step is as a whole or not at all."""
    (tmp_path / "part/inner").mkdir(parents=True)
    (tmp_path / "part/inner/events.out.tfevents.1.host").touch()
    here = str(tmp_path / "part/inner")
    events = "part/*/events*"
    logs = [
        lambda: [*disk.walk(tmp_path, past_closed=True)],
        lambda: [*disk.below(tmp_path, past_closed=True)],
        lambda: [*disk.matching(tmp_path, events, past_closed=True)],
        lambda: disk.names_in(Path(here)),
    ]
    steps: list[Callable[[], object]] = [
        lambda: files_below(tmp_path),
        lambda: [*disk.below(tmp_path)],
        lambda: [*disk.matching(tmp_path, events)],
    ]
    for name in ("listdir", "scandir"):
        real = getattr(os, name)

        def ask(path: Any, real: Callable[..., Any] = real) -> Any:
            if str(path) == here:
                raise OSError(reason, os.strerror(reason), here)
            return real(path)

        monkeypatch.setattr(os, name, ask)
    refused = {errno.EIO: [*logs, *steps], errno.EACCES: steps, errno.ENOENT: []}[reason]
    for act in [*logs, *steps]:
        with pytest.raises(OSError, match=os.strerror(reason)) if act in refused else nullcontext():
            act()


def test_a_record_of_what_was_kept_that_can_not_be_read_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an undo would take a file that somebody wrote to for one that nobody did."""
    record = tmp_path / kept.record_file("0001")
    record.parent.mkdir(parents=True)
    assert kept.rewritten(tmp_path, "0001", ["file"]) == []
    record.write_text('{"file": [1, 1, ""]}')
    (tmp_path / "file").write_text("other")
    assert kept.rewritten(tmp_path, "0001", ["file"]) == ["file"]

    def fail(*_: Any) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(OSError, match="Stale file handle"):
        kept.rewritten(tmp_path, "0001", ["file"])


def test_only_what_is_not_there_is_said_to_be_absent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    for ask, there in (
        (disk.is_there, {".", "file", "nowhere", "loop"}),
        (disk.exists, {".", "file"}),
        (disk.is_folder, {"."}),
        (disk.is_file, {"file"}),
        (disk.is_link, {"nowhere", "loop"}),
    ):
        names = [".", "file", "nowhere", "loop", "gone", "file/below", "n" * 300, "a\0b"]
        assert {name for name in names if ask(tmp_path / name)} == there
        assert ask(str(tmp_path)) == ("." in there)
        with Looks(tmp_path, 1)(), pytest.raises(OSError, match="Input/output error"):
            ask(tmp_path / "file")


ASKED = ("exists", "is_file", "is_dir", "is_symlink", "glob", "rglob", "lexists", "isfile", "isdir")
"""What swallows errors: of `Path` from Python 3.13 or 3.14 on, of `os.path` in all releases."""
ENTRIES = ("entry", "item")
"""Names of what `os.scandir` gives, whose looks raise."""


def test_each_look_at_a_name_is_one_that_raises() -> None:
    asked = []
    for path in sorted({*SOURCE.rglob("*.py")} - {SOURCE / "__main__.py"}):  # it looks at no run
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else node
            if not isinstance(called, ast.Attribute) or called.attr not in ASKED:
                continue
            owner = ast.unparse(called.value)
            if owner == "Path" or (isinstance(node, ast.Call) and owner not in ("disk", *ENTRIES)):
                asked.append(f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(called)}")
    assert asked == []


def test_a_pattern_names_what_is_there_and_no_more(tmp_path: Path) -> None:
    for name in ("zero/a/exp_avg.pt", "zero/b[0]/exp_avg.pt", "zero/b[0]/.hidden.pt", "zero/c.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "zero/d").symlink_to("a")

    def named(pattern: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in disk.matching(tmp_path, pattern)]

    assert named("zero/*/*.pt") == [
        "zero/a/exp_avg.pt",
        "zero/b[0]/.hidden.pt",
        "zero/b[0]/exp_avg.pt",
        "zero/d/exp_avg.pt",
    ]
    assert named("zero/c.pt") == ["zero/c.pt"]
    assert named("gone/*.pt") == named("zero/c.pt/*") == named("zero/e.pt") == []
    below = {str(path.relative_to(tmp_path)) for path in disk.below(tmp_path / "zero")}
    assert "zero/d" in below and "zero/d/exp_avg.pt" not in below
