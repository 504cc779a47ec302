"""The one layer that changes the disk: whole writes, named errors, and nobody else beside it."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ckptsurgeon
from ckptsurgeon import disk
from ckptsurgeon.disk import files
from tests.faults.inject import Fault, hooked
from tests.support.direct import takes_direct_calls

PACKAGE = Path(ckptsurgeon.__file__).parent
DISK = sorted((PACKAGE / "disk").glob("*.py"))


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    """What a file system in memory can't do is tested here: holes, clones, direct calls."""
    return on_disk


# --- only disk/ ----------------------------------------------------------------------------------

OS_CALLS = {
    "chmod", "chown", "copy_file_range", "fchmod", "fchown", "ftruncate", "lchown", "link",
    "makedirs", "mkdir", "mkfifo", "mknod", "posix_fallocate", "pwrite", "pwritev", "remove",
    "removedirs", "rename", "renames", "replace", "rmdir", "sendfile", "setxattr", "symlink",
    "truncate", "unlink", "utime", "write", "writev",
}  # fmt: skip
PATH_CALLS = {
    "chmod", "hardlink_to", "lchmod", "mkdir", "rmdir", "symlink_to", "touch", "unlink",
    "write_bytes", "write_text",
}  # fmt: skip
HARMLESS = {("shutil", "get_terminal_size"), ("shutil", "which"), ("shutil", "disk_usage")}


def mutations(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every call that creates, writes, renames, truncates or removes."""
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Call) and _mutates(node)
        imported = isinstance(node, ast.ImportFrom) and _by_name(node)
        if called or imported:
            yield getattr(node, "lineno", 0), ast.unparse(node)


def _mutates(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
        return call.func.id == "open" and any(_writes(mode) for mode in modes)
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
    name = call.func.attr
    if owner == "disk":
        return False
    if owner == "os":
        return name in OS_CALLS or (name == "open" and "O_RDONLY" not in ast.unparse(call))
    if owner in ("shutil", "tempfile"):
        return (owner, name) not in HARMLESS
    if name == "open":  # of a path; `Archive.open(path)` is something else
        modes = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "mode")]
        return any(isinstance(mode, ast.Constant) and _writes(mode) for mode in modes)
    if name in ("rename", "replace"):  # of a path: one argument; of a string: two
        return len(call.args) == 1 and not call.keywords
    return name in PATH_CALLS


def _by_name(node: ast.ImportFrom) -> bool:
    """Whether it imports such a call, to make it by its own name."""
    names = {alias.name for alias in node.names}
    if node.module in ("shutil", "tempfile"):
        return any((node.module, name) not in HARMLESS for name in names)
    return node.module == "os" and bool(names & {*OS_CALLS, "open"})


def _writes(mode: ast.expr) -> bool:
    return not isinstance(mode, ast.Constant) or bool(set(str(mode.value)) & set("wax+"))


def _found(module: Path) -> list[tuple[int, str]]:
    return list(mutations(module.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "module",
    sorted(set(PACKAGE.rglob("*.py")) - set(DISK)),
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_no_other_module_changes_the_disk(module: Path) -> None:
    found = _found(module)
    assert not found, f"{module.name}: only ckptsurgeon/disk may do this: {found}"


def test_the_check_finds_what_the_layer_does() -> None:
    assert {module.stem for module in DISK if _found(module)} == {
        "cache", "copies", "files", "names", "owners",
    }  # fmt: skip
    assert sum(len(_found(module)) for module in DISK) >= 10


@pytest.mark.parametrize(
    "source",
    [
        "open('x', 'w')",
        "open('x', mode='r+b')",
        "Path('x').open('ab')",
        "path.write_text('x')",
        "a.rename(b)",
        "a.replace(b)",
        "os.open('x', os.O_RDWR)",
        "os.ftruncate(3, 0)",
        "shutil.rmtree('x')",
        "open('x', how)",
        "from os import replace",
        "from shutil import rmtree",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert list(mutations(source))


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "open('x', 'rb')",
        "Path('x').open('rb')",
        "'a'.replace('a', 'b')",
        "dataclasses.replace(plan, id='1')",
        "os.open('x', os.O_RDONLY | os.O_DIRECTORY)",
        "shutil.get_terminal_size()",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert not list(mutations(source))


# --- whole writes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SHORT", "EINTR"])
def test_a_write_goes_on_until_all_is_written(tmp_path: Path, kind: str) -> None:
    data = bytes(range(256)) * 8
    with hooked(Fault(kind, 2, sticky=kind == "SHORT")):
        disk.write_new(tmp_path / "new", data)
    assert (tmp_path / "new").read_bytes() == data


def test_a_call_that_is_always_broken_fails_in_the_end(tmp_path: Path) -> None:
    fault = Fault("EINTR", 1, sticky=True)
    with hooked(fault), pytest.raises(InterruptedError):
        disk.make_directory(tmp_path / "new")
    assert fault.calls == disk.calls.INTERRUPTED_CALLS


@pytest.mark.parametrize("kind", ["", "watched", "SHORT", "EINTR"])
def test_many_short_writes_are_few_calls(tmp_path: Path, kind: str) -> None:
    """What lies between is zeros, whether it was written or not; no part is written twice."""
    chance = random.Random(3)
    spans, expected, at = [], bytearray(), 0
    for number in range(400):
        gap = chance.choice((0, 1, 500, 4000, 4001, 50_000)) if number else 70
        length = chance.choice((1, 30, 900, 40_000)) if number != 200 else (1 << 20) + 9
        spans.append((at + gap, at + gap + length))
        expected += bytes(gap) + chance.randbytes(length)
        at += gap + length
    data = b"".join(expected[start:end] for start, end in spans)
    calls: list[tuple[int, int]] = []

    def watch(operation: str, path: str, details: Mapping[str, Any]) -> None:
        calls.append((details["offset"], details["offset"] + len(details["data"])))

    path = tmp_path / "new"
    with disk.created(path) as descriptor:
        hook = {"": None, "watched": watch}.get(kind) if kind in ("", "watched") else Fault(kind, 3)
        with hooked(hook) if hook else contextlib.nullcontext():
            disk.write_each(descriptor, path, data, spans, 4000)
    assert path.read_bytes() == expected
    if kind == "watched":
        far = sum(after[0] - before[1] > 4000 for before, after in pairwise(spans))
        assert far < len(calls) <= far + 2 + (len(expected) >> 20) < len(spans)
        assert max(end - start for start, end in calls) <= (1 << 20) + 9
        assert all(end <= start for (_, end), (start, _) in pairwise(calls))


@pytest.mark.parametrize("refused", ["", "flag", "call", "SHORT"])
def test_a_long_row_is_written_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """In whole windows, where the file system allows it; elsewhere through the cache."""
    window = 1 << 14
    monkeypatch.setattr(files, "WRITTEN_AT_ONCE", window)
    monkeypatch.setattr(files, "LONG", 4 * window)
    chance = random.Random(5)
    spans, expected = [(77, 78)], bytearray(77) + b"x"
    while len(expected) < 20 * window:
        gap, length = chance.choice((0, 9, 900)), chance.choice((1, 300, 3 * window))
        spans.append((len(expected) + gap, len(expected) + gap + length))
        expected += bytes(gap) + chance.randbytes(length)
    data = b"".join(expected[start:end] for start, end in spans)
    if refused == "flag":

        def refuse(_: int, command: int, flags: int = 0) -> int:
            if command == fcntl.F_SETFL and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O here")
            return set_flags(_, command, flags)

        set_flags = fcntl.fcntl
        monkeypatch.setattr(files.fcntl, "fcntl", refuse)
    past: list[int] = []
    path = tmp_path / "new"
    with disk.created(path) as descriptor:

        def watch(operation: str, name: str, details: Mapping[str, Any]) -> int | None:
            if _flags(descriptor) & os.O_DIRECT:
                past.append(details["offset"])
                if refused == "call":
                    raise OSError(errno.EINVAL, "blocks of another size")
                if refused == "SHORT":
                    return 700
            return None

        with hooked(watch):
            disk.write_each(descriptor, path, data, spans, 1000)
        assert not _flags(descriptor) & os.O_DIRECT
    assert path.read_bytes() == expected
    if takes_direct_calls(path) and refused != "flag":
        whole = range(window, len(expected) - window + 1, window)
        assert past == [*(whole[:1] if refused else whole)]


def _flags(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def test_an_error_names_its_path(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with disk.created(path) as descriptor:
        calls: list[Callable[[], None]] = [
            lambda: disk.write_at(descriptor, path, 0, b"x"),
            lambda: disk.write_each(descriptor, path, b"xy", [(0, 1), (9, 10)], 4),
            lambda: disk.write_each(descriptor, path, b"xy", [(0, 1), (9, 10)], 8),
            lambda: disk.truncate(descriptor, path, 1),
            lambda: disk.fsync_file(descriptor, path),
        ]
        for call in calls:
            with hooked(Fault("EIO", 1)), pytest.raises(OSError) as caught:
                call()
            assert caught.value.filename == str(path)
            assert caught.value.errno == errno.EIO


def test_a_span_is_copied_with_and_without_the_kernel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(200)) * 1000)

    refused = False

    def copy(name: str) -> bytes:
        path = tmp_path / name
        with disk.created(path) as descriptor:
            disk.write_at(descriptor, path, 0, b"head")
            disk.copy_at(descriptor, path, 4, source, 1000, 150_000)
        return path.read_bytes()

    def no_kernel(operation: str, path: str, details: Mapping[str, Any]) -> None:
        nonlocal refused
        if operation == "copy" and not refused:
            refused = True
            raise OSError(errno.EXDEV, "Invalid cross-device link", path)

    expected = b"head" + source.read_bytes()[1000:150_000]
    assert copy("fast") == expected
    with hooked(no_kernel):
        assert copy("slow") == expected
    assert refused


def test_a_kernel_that_copies_nothing_is_not_the_end_of_the_source(tmp_path: Path) -> None:
    """copy_file_range(2) answers 0, and no error, on some network file systems."""
    source, path = tmp_path / "source", tmp_path / "new"
    source.write_bytes(b"0123456789")
    asked = 0

    def nothing(operation: str, path: str, details: Mapping[str, Any]) -> int | None:
        nonlocal asked
        asked += operation == "copy"
        return 0 if operation == "copy" and asked == 1 else None

    with hooked(nothing), disk.created(path) as descriptor:
        disk.copy_at(descriptor, path, 0, source, 2, 9)
    assert asked == 2
    assert path.read_bytes() == b"2345678"


def test_a_span_past_the_end_is_an_error(tmp_path: Path) -> None:
    source, path = tmp_path / "source", tmp_path / "new"
    source.write_bytes(b"0123456789")
    with disk.created(path) as descriptor, pytest.raises(OSError, match="ends before byte 20"):
        disk.copy_at(descriptor, path, 0, source, 5, 20)


# --- what it refuses -----------------------------------------------------------------------------


def test_a_new_file_never_replaces_one(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    with pytest.raises(FileExistsError):
        disk.write_new(tmp_path / "there", b"lost")
    assert (tmp_path / "there").read_text() == "kept"


def test_a_symbolic_link_is_not_followed_for_a_write(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(OSError), disk.opened(tmp_path / "link"):
        pass
    with pytest.raises(FileExistsError):
        disk.write_new(tmp_path / "link", b"lost")
    disk.link(tmp_path / "link", tmp_path / "second")
    assert (tmp_path / "second").is_symlink()
    assert (tmp_path / "target").read_text() == "kept"


CALLS: dict[str, Callable[[Path], object]] = {
    "make_directory": lambda folder: disk.make_directory(folder / "new"),
    "remove_directory": lambda folder: disk.remove_directory(folder / "empty"),
    "remove_file": lambda folder: disk.remove_file(folder / "file"),
    "rename from": lambda folder: disk.rename(folder / "file", folder.parent / "taken"),
    "rename to": lambda folder: disk.rename(folder.parent / "own", folder / "file"),
    "link from": lambda folder: disk.link(folder / "file", folder.parent / "taken"),
    "link to": lambda folder: disk.link(folder.parent / "own", folder / "new"),
    "symlink": lambda folder: disk.symlink("x", folder / "new"),
    "created": lambda folder: disk.write_new(folder / "new", b"x"),
    "opened": lambda folder: disk.opened(folder / "file").__enter__(),
    "set_times": lambda folder: disk.set_times(folder / "file", 0),
    "fsync_directory": lambda folder: disk.fsync_directory(folder / "empty"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_folder_on_the_way_that_is_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere" / "empty").mkdir(parents=True)
    (tmp_path / "elsewhere" / "file").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "own").write_text("own")
    (tmp_path / "run" / "step").symlink_to(tmp_path / "elsewhere")
    before = {str(path): path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(NotADirectoryError):
        CALLS[name](tmp_path / "run" / "step")
    assert {str(path): path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (tmp_path / "run" / "step").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "step")
    CALLS[name](tmp_path / "run" / "step")


def test_a_fifo_is_not_written_in_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"), disk.opened(tmp_path / "fifo"):
        pass


# --- times and rights ----------------------------------------------------------------------------


def test_times_and_rights_are_set_exactly(tmp_path: Path) -> None:
    like, path = tmp_path / "like", tmp_path / "new"
    like.write_text("x")
    like.chmod(0o640)
    with disk.created(path) as descriptor:
        disk.copy_rights(descriptor, path, like.stat())
    before = path.stat().st_atime_ns
    disk.set_times(path, 1_700_000_000_123_456_789)
    info = path.stat()
    assert (info.st_mode & 0o777, info.st_mtime_ns) == (0o640, 1_700_000_000_123_456_789)
    assert info.st_atime_ns == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_new_file_gets_the_owner_of_the_old_one(tmp_path: Path) -> None:
    like, path = tmp_path / "like", tmp_path / "new"
    like.write_text("x")
    os.chown(like, 65534, 65534)
    with disk.created(path) as descriptor:
        disk.copy_rights(descriptor, path, like.stat())
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)
