"""A folder that looks like the objects below a prefix, and has the bytes of them that were needed.

Each object is a file of its size and time; `map.json` beside the mirror says which bytes of which
ETag are in it. The map is written before files are made anew, and after bytes are durable: what it
says is there, whenever a process ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ckptsurgeon.disk import cache
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import again, shell
from ckptsurgeon.remote import reads
from ckptsurgeon.remote.address import Address
from ckptsurgeon.remote.ranges import Ranges
from ckptsurgeon.remote.store import CONNECTIONS, Object, Store

GRAIN = 1 << 13
"""Every range begins and ends at a multiple of it: a request costs more than these bytes."""
HEAD = 1 << 14
"""Bytes at the start of a shard that are fetched before they are asked for: torch writes a pickle
there."""
SMALL = 1 << 18
"""An object of at most so many bytes is fetched whole."""
GAP = 1 << 16
"""Bytes between two ranges that are fetched with them, rather than by a request more."""
LONG = 8 << 20
"""Bytes of one request, at most, and how far a reader from start to end is run ahead of."""
MAP = "map.json"
MIRRORS = 64
"""So many processes may have a mirror of the same bucket at once."""


class Mirror:
    """The mirror of one bucket at `folder`, as far as prefixes of it were listed."""

    def __init__(self, store: Store, folder: Path, prefix: str) -> None:
        self.root = str(folder / reads.MIRROR / store.bucket)
        self.top = str(Path(self.root, prefix))
        self.lock = threading.Lock()
        self.failure: Exception | None = None
        self.store, self._folder = store, folder
        self._objects: dict[str, Object] = {}
        self._listed: list[str] = []
        self._keys: dict[int, str] = {}
        self._lost: set[int] = set()
        """Files whose object changed since they were opened."""
        self._touched: set[str] = set()
        self._asked: Counter[tuple[str, str]] = Counter()
        """Of how many files in a folder, by the end of their names, a first range was needed."""
        self._begun: set[str] = set()
        self._there = self._load()
        self._pool = ThreadPoolExecutor(CONNECTIONS)

    # --- names -----------------------------------------------------------------------------------

    def look_below(self, folder: str) -> None:
        """The names below `folder`, where it is one of the mirror and not known yet."""
        if folder != self.root and not folder.startswith(f"{self.root}/"):
            return
        prefix = folder[len(self.root) + 1 :]
        if not any(_within(prefix, known) for known in self._listed):
            with self._failing():
                self._list(prefix)
            self._listed.append(prefix)

    def refresh(self) -> None:
        """The names, and what changed, as the store has them now."""
        for prefix in self._listed:
            with self._failing():
                self._list(prefix)

    def key(self, path: Path) -> str:
        """The key of the object that a path in the mirror stands for, be it there or not."""
        return _absolute(path)[len(self.root) + 1 :]

    def object(self, key: str) -> Object | None:
        """The object of this key as the last listing has it."""
        return self._objects.get(key)

    def age(self, path: str) -> float | None:
        """How many seconds before the last listing an object was written, by the store's clock."""
        item = self._objects.get(path[len(self.root) + 1 :])
        return None if item is None else self.store.now - item.modified_ns / 1e9

    def _list(self, prefix: str) -> None:
        below = f"{prefix}/" if prefix else ""
        found = {item.key: item for item in self.store.list(below)}
        folders = {prefix} | {key.rstrip("/") for key in found if key.endswith("/")}
        files = {key: item for key, item in found.items() if not key.endswith("/")}
        for key in files:
            self._refuse_odd(key)
        folders |= {str(above) for key in (*files, *folders) for above in _above(key)}
        if clash := sorted(folders & files.keys()):
            raise UsageError(
                f"s3://{self.store.bucket}/{clash[0]} is an object, and there are others below it",
                next="copy the run to a disk without it, and name its folder there with -C",
            )
        stale = [key for key, item in files.items() if not self._is_current(item)]
        gone = [key for key in self._there if key.startswith(below) and key not in files]
        if lost := self._there.keys() & {*stale, *gone}:
            self._there = {k: known for k, known in self._there.items() if k not in lost}
            self._save()
        other = {*stale, *(key for key in self._objects if key not in files)}
        self._lost |= {inode for inode, key in self._keys.items() if key in other}
        self._remove_others(prefix, files.keys(), folders)
        for name in sorted(folders, key=len):
            cache.make_folder(Path(self.root, name))
        for key in stale:
            cache.make_hollow(self._path(key), files[key].size, files[key].modified_ns)
        old = (key for key in self._objects if not key.startswith(below))
        self._objects = {key: self._objects[key] for key in old} | files

    def _refuse_odd(self, key: str) -> None:
        """Raise UsageError for a key that is no name of a file."""
        parts = key.split("/")
        if "\0" in key or {"", ".", ".."} & set(parts) or max(map(_bytes, parts)) > 255:
            raise UsageError(
                f"s3://{self.store.bucket}/{key} has a key that is no name of a file",
                next="give the object another name, or copy the run to a disk without it",
            )

    def _is_current(self, item: Object) -> bool:
        """Whether the file is there, and nothing in it is of another object."""
        known = self._there.get(item.key)
        try:
            status = self._path(item.key).lstat()
        except OSError:
            return False
        same = (status.st_size, status.st_mtime_ns) == (item.size, item.modified_ns)
        return same and (known is None or known[0] == item.etag)

    def _remove_others(self, prefix: str, files: Collection[str], folders: Collection[str]) -> None:
        """What an earlier listing had below the prefix."""
        for here, inner, names in os.walk(Path(self.root, prefix), topdown=False):
            below = here[len(self.root) + 1 :]
            for name, known in (*((n, files) for n in names), *((n, folders) for n in inner)):
                if f"{below}/{name}".lstrip("/") not in known:
                    cache.remove(Path(here, name))

    def _path(self, key: str) -> Path:
        return Path(self.root, key)

    def refuse_nothing(self, address: Address) -> None:
        """Raise UsageError where the listing of the address has no file."""
        if not self._objects:
            above = f"s3://{address.bucket}/{address.prefix.rpartition('/')[0]}".rstrip("/")
            raise UsageError(
                f"no object is below {address}/",
                next=shell(["aws", "s3", "ls", f"{above}/"], why="what is there"),
            )

    # --- bytes -----------------------------------------------------------------------------------

    def fetch(self, path: str) -> None:
        """All bytes of the file at `path`, if it is one of the mirror."""
        item = self._objects.get(path[len(self.root) + 1 :])
        if item is not None:
            self._fetch(item, [(0, item.size)])

    def follow(self, path: str, inode: int) -> None:
        """The file at `path` is asked for by this inode from now on."""
        key = path[len(self.root) + 1 :]
        if path.startswith(f"{self.root}/") and key in self._objects:
            self._keys[inode] = key
            self._lost.discard(inode)

    def follows(self, inode: int) -> bool:
        """Whether it does so."""
        return inode in self._keys

    def need(self, inode: int, ranges: Iterable[reads.Range]) -> None:
        """So many bytes of the file, as far as they are in it."""
        key = self._keys.get(inode)
        if key is None:
            return
        if inode in self._lost:
            with self._failing():
                what = f"s3://{self.store.bucket}/{key} changed while it was read"
                raise SurgeryError(what, next=again())
        if key not in self._begun:
            self._begun.add(key)
            self._asked[kind := _kind(key)] += 1
            if self._asked[kind] == 2:
                self._begin_others(kind)
        self._fetch(self._objects[key], ranges)

    def _begin_others(self, kind: tuple[str, str]) -> None:
        """The first and last bytes of all files of this kind, at once: who opens the second shard
        of a step opens the others too, one after the other."""
        others = [item for key, item in self._objects.items() if _kind(key) == kind]
        self._get_all(
            (item, piece)
            for item in others
            for piece in self._lacking(item, [(0, HEAD), (item.size - GRAIN, item.size)])
        )

    def _fetch(self, item: Object, ranges: Iterable[reads.Range]) -> None:
        self._get_all((item, piece) for piece in self._lacking(item, ranges))

    def _get_all(self, wanted: Iterable[tuple[Object, reads.Range]]) -> None:
        with self._failing():
            jobs = list(wanted)
            if len(jobs) == 1:
                self._get(*jobs[0])
            elif jobs:
                for _ in self._pool.map(lambda job: self._get(*job), jobs):
                    pass

    def _lacking(self, item: Object, ranges: Iterable[reads.Range]) -> list[reads.Range]:
        """What must be fetched for these ranges, in requests."""
        with self.lock:
            there = self._there.get(item.key, (item.etag, Ranges()))[1]
            wanted = Ranges()
            for start, end in ranges:
                start, end = max(start, 0), min(end, item.size)
                if not there.lacking(start, end):
                    continue
                end += min(there.before(start), LONG)  # it reads from the start to the end
                whole = item.size <= SMALL
                start = 0 if whole else start // GRAIN * GRAIN
                end = item.size if whole else min(-(-end // GRAIN) * GRAIN, item.size)
                for lack in there.lacking(start, end):
                    wanted.add(*lack)
        joined: list[reads.Range] = []
        for start, end in wanted:
            if joined and start - joined[-1][1] <= GAP:
                start = joined.pop()[0]
            joined.append((start, end))
        return [
            (at, min(at + LONG, end)) for start, end in joined for at in range(start, end, LONG)
        ]

    def _get(self, item: Object, piece: reads.Range) -> None:
        path = self._path(item.key)
        for at, data in self.store.get(item.key, item.etag, *piece):
            with self.lock, reads.unwatched():
                cache.fill(path, at, data, item.modified_ns)
                there = self._there.setdefault(item.key, (item.etag, Ranges()))[1]
                there.add(at, at + len(data))
                self._touched.add(item.key)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An error inside is no answer about the run, whoever catches it."""
        try:
            with reads.unwatched():
                yield
        except OSError as error:
            self.failure = self.failure or SurgeryError(
                f"the mirror of s3://{self.store.bucket} can't be written: {error.strerror}",
                next=f"XDG_CACHE_HOME=DIR with more room, or free some of {self._folder.parent}",
            )
            raise self.failure from None
        except SurgeryError as error:
            self.failure = self.failure or error
            raise

    # --- the map ---------------------------------------------------------------------------------

    def _load(self) -> dict[str, tuple[str, Ranges]]:
        try:
            with reads.unwatched():
                found = json.loads(Path(self._folder, MAP).read_bytes())
            return {
                key: (str(etag), Ranges([(int(start), int(end)) for start, end in ranges]))
                for key, (etag, ranges) in found.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _save(self) -> None:
        there = {key: (etag, list(ranges)) for key, (etag, ranges) in self._there.items()}
        cache.replace(Path(self._folder, MAP), json.dumps(there).encode())

    def keep(self) -> None:
        """Note for the next command what is there, once it is durable."""
        self._pool.shutdown()
        with contextlib.suppress(OSError), reads.unwatched():  # a next one fetches it again
            for key in sorted(self._touched):
                cache.make_durable(self._path(key))
            if self._touched:
                self._save()


@contextmanager
def mirrored(address: Address) -> Iterator[tuple[Path, Path]]:
    """The folders that stand for the bucket and for the address, while the block reads it. Raises
    UsageError where nothing is there."""
    store = Store(address.bucket)
    folder, lock = _free(store)
    try:
        mirror = Mirror(store, folder, address.prefix)
        mirror.look_below(mirror.top)
        mirror.refuse_nothing(address)
        with reads.through(mirror):
            try:
                yield Path(mirror.root), Path(mirror.top)
            finally:
                mirror.keep()
    finally:
        os.close(lock)


def _free(store: Store) -> tuple[Path, int]:
    """A folder for the mirror that no other process has, and its lock. The first one that is free
    has what the last command fetched."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    name = hashlib.sha256(f"{store.endpoint}\n{store.bucket}".encode()).hexdigest()[:12]
    for number in range(MIRRORS):
        folder = Path(os.path.realpath(home), "ckptsurgeon", name, str(number))
        try:
            cache.make_folder(folder)
            lock = cache.locked(folder / "lock")
        except OSError as error:
            raise SurgeryError(
                f"{folder} can't be made: {error.strerror}",
                next="XDG_CACHE_HOME=DIR for what is fetched of a bucket",
            ) from None
        if lock is not None:
            return folder, lock
    raise SurgeryError(
        f"{MIRRORS} commands read s3://{store.bucket} at once", next="wait for one of them"
    )


def _absolute(path: Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100


def _within(prefix: str, known: str) -> bool:
    return not known or prefix == known or prefix.startswith(f"{known}/")


def _kind(key: str) -> tuple[str, str]:
    """Its folder, and how its name ends."""
    folder, _, name = key.rpartition("/")
    return folder, name.rpartition(".")[2]


def _above(key: str) -> Iterator[str]:
    while "/" in key:
        key = key.rpartition("/")[0]
        yield key


def _bytes(part: str) -> int:
    return len(part.encode("utf-8", "surrogateescape"))
