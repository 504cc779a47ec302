"""Reads a pickle by the C unpickler, with placeholders for all that the file names."""

from __future__ import annotations

import io
import pickle
from operator import attrgetter
from typing import Any, NamedTuple

from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.dtypes import STORAGES
from ckptsurgeon.files.pickles.scan import Scan
from ckptsurgeon.files.pickles.tree import WIDEST, Global, Object, Storage, Tensor, named

GETATTR = ("builtins.getattr", "__builtin__.getattr")


class _Getattr:
    """`getattr`, as one file uses it: some releases of Python 3.11, that of Debian 12 among them,
    save a member of an enum as the attribute of its class with this name.

    A member is an `Object` of the class with its name as the argument. `members` has each as
    `module.Class.name`; `other` is whether the file does anything else with it."""

    def __init__(self) -> None:
        self.members: set[str] = set()
        self.other = False

    def __call__(self, *args: Any) -> Object:
        match args:
            case (Global() as cls, str(name)):
                self.members.add(f"{cls!r}.{name}")
                return Object(cls, (name,))
        self.other = True
        return Object(named(*GETATTR[0].split(".")), args)

    def kept_in(self, tree: Any) -> bool:
        """Whether it is a value somewhere in `tree`, for a load to hand on."""
        todo, seen = [tree], set[int]()
        while todo:
            value = todo.pop()
            if value is self:
                return True
            if id(value) in seen or isinstance(value, (str, bytes, int, float, Tensor, Global)):
                continue
            seen.add(id(value))
            if isinstance(value, dict):
                todo += (*value, *value.values(), getattr(value, "state", None))
            elif isinstance(value, (list, tuple, set, frozenset)):
                todo += value
            elif isinstance(value, Object):
                parts = (value.args, value.keywords, value.state, value.items, value.appends)
                todo += (part for part in parts if part is not None)
        return False


class _Unpickler(pickle.Unpickler):
    """`tensors` are those that the native scan has made: where each stood is a NEXT_BUFFER, which
    `scan` lets no file have."""

    def __init__(self, scanned: Scan) -> None:
        data = scanned.data
        self.tensors: list[Tensor] = []
        if scanned.native is not None:
            data, self.tensors = scanned.native.shortened(STORAGES, Tensor)
        # Through a buffer the unpickler peeks ahead instead of asking for one byte at a time.
        file = io.BufferedReader(io.BytesIO(data), 1 << 16)
        super().__init__(file, encoding="utf-8", buffers=iter(self.tensors))
        self.globals: dict[tuple[str, str], Global] = {}
        self.getattr: _Getattr | None = None
        self.storages: list[Storage] = []

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in GETATTR:
            self.getattr = self.getattr or _Getattr()
            return self.getattr
        if (module, name) not in self.globals:
            f"{module}.{name}".encode()  # half of a surrogate pair is in no name that is imported
            self.globals[module, name] = named(module, name)
        return self.globals[module, name]

    def persistent_load(self, saved: Any) -> Any:
        if saved[0] == "module":  # a class with its source, in the legacy format
            return saved[1]
        kind, storage, key, _, numel = saved[:5]
        if kind != "storage" or (len(saved) > 5 and any(saved[5:])):
            raise ValueError(f"persistent id {kind!r} is not a whole storage")
        if type(key) is not str or type(numel) is not int or not 0 <= numel < WIDEST:
            raise ValueError(f"the storage {key!r:.99} has {numel!r:.99} elements")
        made = Storage(STORAGES[storage.name], key, numel)
        self.storages.append(made)
        return made


def read_with_globals(scanned: Scan) -> tuple[Any, frozenset[str]]:
    """`tree` and `globals` of what `read` gives."""
    read_of = read(scanned)
    return read_of.tree, read_of.globals


class Read(NamedTuple):
    """What a pickle holds. `tree`: dict, list, tuple, set, scalars, `Tensor`, `Object`, `Global`.
    `globals`: every `module.name` that a load would import, also where the tree does not hold it;
    of a member of an enum that is saved by its name, `module.Class.name`. `single`: the storages of
    its tensors that have one element, as key and dtype."""

    tree: Any
    globals: frozenset[str]
    single: set[tuple[str, str]]


def read(scanned: Scan) -> Read:
    """Read the whole pickle.

    What `scan` guarantees holds here. Raises DamagedFile; nothing that the file names is imported
    or called, whatever it holds."""
    tree, unpickler = _load(scanned)
    names = {".".join(name) for name in unpickler.globals}
    if (members := unpickler.getattr) is not None:
        names |= members.members
        names |= {GETATTR[0]} if members.other or members.kept_in(tree) else set()
    single = {(t.storage, t.dtype) for t in unpickler.tensors if t.storage_numel == 1}
    single |= {(s.key, s.dtype) for s in unpickler.storages if s.numel == 1}
    return Read(tree, frozenset(names), single)


def read_storages(scanned: Scan) -> set[tuple[str, str, int]]:
    """The storages that the pickle refers to, as dtype, key and number of elements. Raises
    DamagedFile."""
    unpickler = _load(scanned)[1]
    of_tensors = map(attrgetter("dtype", "storage", "storage_numel"), unpickler.tensors)
    return {*of_tensors, *map(attrgetter("dtype", "key", "numel"), unpickler.storages)}


def _load(scanned: Scan) -> tuple[Any, _Unpickler]:
    with collector_paused():
        try:
            unpickler = _Unpickler(scanned)
            return unpickler.load(), unpickler
        except Exception as error:
            # Placeholders meet values that no trainer writes: any kind of error can come of it.
            problem = " ".join(str(error).split())[:200]
            raise scanned.damaged(0, f"the pickle makes no sense: {problem}") from None
