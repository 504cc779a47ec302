"""A mirror gives the bytes of its objects, whoever reads them and however; no server is needed."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run
from ckptsurgeon.disk import cache
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.remote import mirror, reads
from ckptsurgeon.remote.address import Address
from ckptsurgeon.remote.mirror import Mirror
from ckptsurgeon.remote.ranges import Ranges
from ckptsurgeon.remote.store import Object
from tests.support.tiny_run import make_run

POISON = b"\xa5"


class Objects:
    """The store of a bucket whose objects are here: key -> bytes."""

    bucket = "bucket"

    def __init__(self, **objects: bytes) -> None:
        self.objects = objects
        self.got: list[tuple[str, int, int]] = []

    def list(self, prefix: str) -> Iterator[Object]:
        """Those whose key begins so."""
        for key, data in self.objects.items():
            if key.startswith(prefix):
                yield Object(key, len(data), str(hash(data)), 1_700_000_000 * 10**9)

    def get(self, key: str, etag: str, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Bytes of one, in two pieces."""
        data = self.objects[key]
        assert str(hash(data)) == etag and 0 <= start < end <= len(data)
        self.got.append((key, start, end))
        middle = (start + end) // 2
        yield from ((at, data[at:to]) for at, to in ((start, middle), (middle, end)) if at < to)


@contextmanager
def mirrored(store: Objects, folder: Path, prefix: str = "") -> Iterator[Mirror]:
    """A mirror of the store, in use."""
    made = Mirror(store, folder, prefix)  # type: ignore[arg-type]
    made.look_below(made.top)
    with reads.through(made):
        try:
            yield made
        finally:
            made.keep()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not fetched is no zeros."""
    hollow = cache.make_hollow

    def make(path: Path, size: int, mtime_ns: int) -> None:
        hollow(path, size, mtime_ns)
        cache.fill(path, 0, POISON * size, mtime_ns)

    monkeypatch.setattr(cache, "make_hollow", make)


def noise(size: int, seed: int = 0) -> bytes:
    """No byte of it is the poison."""
    return random.Random(seed).randbytes(size).replace(POISON, b"\xa6")


def mapped(path: Path) -> bytes:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data[:]


def by_descriptor(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 30)
    finally:
        os.close(descriptor)


WAYS: dict[str, Callable[[Path], bytes]] = {
    "read_bytes": Path.read_bytes,
    "mmap": mapped,
    "os.open": by_descriptor,
    "numpy.fromfile": lambda path: numpy.fromfile(path, "u1").tobytes(),
    "numpy.memmap": lambda path: numpy.memmap(path, "u1", "r").tobytes(),
    "by a path of bytes": lambda path: by_descriptor(os.fsencode(path)),  # type: ignore[arg-type]
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("way", WAYS)
def test_whoever_opens_a_file_has_all_of_it(way: str, tmp_path: Path) -> None:
    store = Objects(**{"run/a/file": noise(300_000), "run/b": b"", "other": b"no"})
    with mirrored(store, tmp_path, "run") as made:
        assert not store.got
        path = Path(made.top, "a", "file")
        assert path.stat().st_size == 300_000 and not store.got
        assert WAYS[way](path) == store.objects["run/a/file"]
        assert Path(made.top, "b").read_bytes() == b""
        assert [path.name for path in Path(made.root).iterdir()] == ["run"]
        before = len(store.got)
        assert WAYS[way](path) == store.objects["run/a/file"] and len(store.got) == before


@pytest.mark.usefixtures("poisoned")
@settings(max_examples=30)
@given(st.data())
def test_ranges_are_the_objects(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Through any sequence of reads and of commands, with objects that are overwritten between."""
    folder = tmp_path_factory.mktemp("mirror")
    store = Objects()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GRAIN", "GAP", "SMALL", "LONG"):
            least = int(name in ("GRAIN", "LONG"))
            patch.setattr(mirror, name, data.draw(st.integers(least, 64), name))
        for seed in range(data.draw(st.integers(1, 3), "commands")):
            for key in data.draw(st.sets(st.sampled_from("abc"), min_size=1), "overwritten"):
                store.objects[key] = noise(data.draw(st.integers(1, 400)), seed)
            with mirrored(store, folder) as made:
                for _ in range(data.draw(st.integers(0, 6))):
                    key = data.draw(st.sampled_from(sorted(store.objects)))
                    whole = store.objects[key]
                    start = data.draw(st.integers(0, len(whole)))
                    end = data.draw(st.integers(start, len(whole)))
                    path = Path(made.root, key)
                    descriptor = reads.opened(path)
                    try:
                        got = reads.bytes_at(path, descriptor, start, end - start)
                        assert got == whole[start:end]
                        assert reads.seek(descriptor, 0, os.SEEK_HOLE) is None
                        assert reads.status(path).st_mtime == 1_700_000_000
                    finally:
                        os.close(descriptor)
                if store.objects and data.draw(st.booleans()):
                    key = data.draw(st.sampled_from(sorted(store.objects)))
                    assert Path(made.root, key).read_bytes() == store.objects[key]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12), st.integers(0, 60))
def test_a_set_of_ranges_is_a_set_of_bytes(added: list[tuple[int, int]], start: int) -> None:
    ranges, known = Ranges(), set()
    for at, size in added:
        ranges.add(at, at + size)
        known |= {*range(at, at + size)}
        assert {byte for a, b in ranges for byte in range(a, b)} == known
        pairs = list(ranges)
        assert all(a < b for a, b in pairs)
        assert all(b < c for (_, b), (c, _) in pairwise(pairs))
        lacking = ranges.lacking(start, start + 15)
        assert {b for x, y in lacking for b in range(x, y)} == {*range(start, start + 15)} - known
        run = 0
        while start - run - 1 in known:
            run += 1
        assert ranges.before(start) == run


def test_a_later_command_fetches_only_what_is_new(tmp_path: Path) -> None:
    store = Objects(a=noise(1000), b=noise(1000, 1))
    for wanted in (["a", "b"], [], []):
        with mirrored(store, tmp_path) as made:
            for key in "ab":
                assert Path(made.root, key).read_bytes() == store.objects[key]
        assert [key for key, _, _ in store.got] == wanted
        store.got.clear()
    store.objects["b"] = noise(1000, 2)
    with mirrored(store, tmp_path) as made:
        assert [Path(made.root, key).read_bytes() for key in "ab"] == [*store.objects.values()]
    assert [key for key, _, _ in store.got] == ["b"]
    Path(made.root, "a").unlink()  # by somebody who needs the room
    store.got.clear()
    with mirrored(store, tmp_path) as made:
        assert Path(made.root, "a").read_bytes() == store.objects["a"]
    assert [key for key, _, _ in store.got] == ["a"]


def test_a_file_is_read_ahead_of_who_reads_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "SMALL", 0)
    store = Objects(a=noise(4 << 20))
    with mirrored(store, tmp_path) as made:
        path = Path(made.root, "a")
        descriptor = reads.opened(path)
        got = b"".join(reads.bytes_at(path, descriptor, at, 4096) for at in range(0, 4 << 20, 4096))
        os.close(descriptor)
    assert got == store.objects["a"] and len(store.got) < 12


@pytest.mark.parametrize("key", ["a//b", "/a", "a/../b", "a/./b", f"a/{'x' * 256}", "a\0b", ".."])
def test_keys_that_are_no_names_are_refused(key: str, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="no name of a file"),
        mirrored(Objects(**{key: b"x"}), tmp_path / "mirror"),
    ):
        pass
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_object_with_others_below_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"s3://bucket/a is an object, and there are others"),
        mirrored(Objects(**{"a": b"x", "a/b": b"x"}), tmp_path),
    ):
        pass


def test_what_became_a_folder_or_a_file(tmp_path: Path) -> None:
    for keys in (["a/b"], ["a"], ["a/b/c", "d"], []):
        store = Objects(**dict.fromkeys(keys, b"x"))
        with mirrored(store, tmp_path) as made:
            found = [p for p in Path(made.root).rglob("*") if p.is_file()]
            assert sorted(str(path.relative_to(made.root)) for path in found) == keys


def test_what_could_not_be_fetched_is_no_missing_file(tmp_path: Path) -> None:
    """Also where a caller takes any error for an absent file."""
    store = Objects(a=b"x")
    with mirrored(store, tmp_path) as made:
        reads.check()

        def fail(*_: object) -> Iterator[tuple[int, bytes]]:
            raise SurgeryError("no answer", next="wait")

        store.get = fail  # type: ignore[method-assign]
        with suppress(SurgeryError):
            Path(made.root, "a").read_bytes()
        with pytest.raises(SurgeryError, match="no answer"):
            reads.check()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mirrored(Objects(a=b"x"), tmp_path) as made:
        monkeypatch.setattr(cache, "fill", full)
        with pytest.raises(SurgeryError, match=r"mirror of s3://bucket .* No space left"):
            Path(made.root, "a").read_bytes()


def test_a_mirror_is_no_run_by_itself(tmp_path: Path) -> None:
    """Whoever opens its folder without the bucket would read holes."""
    run = make_run(tmp_path / "run")
    objects = {f"run/{p.relative_to(run)}": p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with mirrored(Objects(**objects), tmp_path / "m", "run") as made:
        assert Run.open(made.top).steps() == [4]
    with pytest.raises(UsageError, match="is the mirror of a bucket"):
        Run.open(made.top)


def test_no_run_above_the_address_is_taken(tmp_path: Path) -> None:
    """The folders above it are of this machine, not of the bucket."""
    make_run(tmp_path)
    with (
        mirrored(Objects(**{"deep/inside/file": b"x"}), tmp_path, "deep/inside") as made,
        pytest.raises(UsageError, match="no training run in"),
    ):
        Run.open(made.top)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        (Path("s3://bucket/a/b"), "s3://bucket/a/b"),
        (Path("s3://bucket"), "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
    ],
)
def test_an_address_is_shown_as_it_is_typed(typed: str | Path, shown: str) -> None:
    assert str(Address.of(typed)) == shown


@pytest.mark.parametrize("typed", ["runs/a", "/runs/s3:/x", "./s3://x", "C:/runs", None, "x:y"])
def test_what_is_no_address(typed: str | None) -> None:
    assert Address.of(typed) is None


@pytest.mark.parametrize("typed", ["gs://bucket/run", "az://c/x", "hf://b/x", "s3://", "s3:/"])
def test_other_addresses_are_refused(typed: str) -> None:
    with pytest.raises(UsageError, match=r"only s3://|names no bucket"):
        Address.of(typed)
