"""Random trees with shared parts and random edits: splicing agrees with plain Python."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import zipfile
from typing import Any

import pytest
import torch
import torch._weights_only_unpickler as weights_only
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import native
from ckptsurgeon.files.pickles import splice
from ckptsurgeon.files.pickles.scan import scan
from tests.support.torch_files import frozen, optimizer_state, read

KEYS = st.one_of(st.sampled_from(["lr", "betas", "step", "a"]), st.integers(-2, 300))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    st.text(max_size=5),
)
LISTS = st.lists(SCALARS, max_size=3)
VALUES = st.one_of(SCALARS, LISTS, LISTS.map(tuple), st.lists(LISTS, max_size=2))


@st.composite
def trees(draw: st.DrawFn) -> dict[Any, Any]:
    """A dict of containers that hold one another, so most of them more than once."""
    pool: list[Any] = [draw(SCALARS), (0.9, 0.99), "shared text"]
    for _ in range(draw(st.integers(2, 12))):
        some = draw(st.lists(st.sampled_from(pool), max_size=5))
        kind = draw(st.sampled_from(["dict", "list", "tuple", "ordered"]))
        if kind in ("dict", "ordered"):
            keys = draw(st.lists(KEYS, min_size=len(some), max_size=len(some), unique=True))
            pairs = zip(keys, some, strict=True)
            pool.append(dict(pairs) if kind == "dict" else collections.OrderedDict(pairs))
        else:
            pool.append(some if kind == "list" else tuple(some))
    mutable = [item for item in pool if isinstance(item, list)]
    if mutable and draw(st.booleans()):
        mutable[0].append(draw(st.sampled_from(mutable)))  # perhaps a cycle
    return dict(enumerate(pool)) | {"root": pool[-1]}


def slots(root: Any) -> list[tuple[Any, ...]]:
    """A path to each item of each dict and list."""
    out: list[tuple[Any, ...]] = []
    seen: set[int] = set()
    todo: list[tuple[tuple[Any, ...], Any]] = [((), root)]
    while todo:
        path, value = todo.pop()
        if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if not isinstance(value, tuple):
                out.append((*path, key))
            todo.append(((*path, key), item))
    return out


def step(root: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        root = root[key]
    return root


def like(old: Any, new: Any) -> Any:
    """The type that a value keeps when it is set."""
    if type(old) is float and type(new) is int:
        try:
            return float(new) if float(new) == new else new
        except OverflowError:
            return new
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if len(old) == len(new):
            new = [like(a, b) for a, b in zip(old, new, strict=True)]
        return tuple(new) if isinstance(old, tuple) else list(new)
    return new


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees(), st.sampled_from([2, 3, 4, 5]), st.booleans(), st.data())
@pytest.mark.long
def test_agrees_with_plain_python(
    tree: dict[Any, Any], protocol: int, in_python: bool, data: st.DataObject
) -> None:
    dumps = pickle._dumps if in_python else pickle.dumps  # type: ignore[attr-defined]
    before = dumps(tree, protocol)
    expected = pickle.loads(before)
    paths = slots(expected)
    chosen = data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4, unique=True))
    edits: dict[tuple[Any, ...], Any] = {}
    deleted: list[tuple[Any, ...]] = []
    for path in chosen:
        if data.draw(st.integers(0, 4)):
            edits[path] = data.draw(VALUES)
        else:
            deleted.append(path)
    places = [(id(step(expected, path[:-1])), path[-1]) for path in chosen]
    assume(len(set(places)) == len(places))
    holders = [step(expected, path[:-1]) for path in chosen]
    try:
        after = splice.splice(before, edits, delete=deleted)
    except SurgeryError as error:
        assert "overlap" in str(error) or "share" in str(error)
        assume(False)
    for holder, path in zip(holders, chosen, strict=True):
        if path in edits:
            holder[path[-1]] = like(holder[path[-1]], edits[path])
    for holder, path in sorted(zip(holders, chosen, strict=True), key=lambda p: -_index(p[1])):
        if path in deleted:
            del holder[path[-1]]
    assert frozen(pickle.loads(after)) == frozen(expected)
    assert frozen(pickle._loads(after)) == frozen(expected)  # type: ignore[attr-defined]
    inert = frozen(read(after))
    assert str(inert).replace("'Dict'", "'OrderedDict'") == str(frozen(expected))
    if protocol == 2 and _loads(before):
        popped = any(opcode.name == "POP" for opcode, _, _ in pickletools.genops(after))
        assert _loads(after) or (popped and "'cycle'" in str(frozen(tree)))


@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(st.data())
@pytest.mark.long
def test_a_large_pickle_is_edited_alike_by_both_machines(data: st.DataObject) -> None:
    """The native scan, where it was built, and the one in Python."""
    assert native.shards is None or scan(LARGE).native is not None
    edits: dict[tuple[Any, ...], Any] = {}
    deleted: list[tuple[Any, ...]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(LARGE_PATHS))
        if any(path[: len(p)] == p or p[: len(path)] == path for p in [*edits, *deleted]):
            continue
        if path[-1] == "new" or data.draw(st.booleans()):
            edits[path] = data.draw(VALUES)
        else:
            deleted.append(path)
    in_python = scan(LARGE, whole=True)
    try:
        expected = splice.splice(LARGE, edits, delete=deleted, scanned=in_python)
    except SurgeryError:
        with pytest.raises(SurgeryError):
            splice.splice(LARGE, edits, delete=deleted)
        return
    assert splice.splice(LARGE, edits, delete=deleted) == expected


def _large() -> bytes:
    """data.pkl of 600 Adam states and what is around them, in an order that no trainer uses."""
    tree = {
        "first": {"lr": 1e-4, "betas": (0.9, 0.99)},
        **optimizer_state(groups=600, numel=1),
        "module": collections.OrderedDict((f"layer.{i}", torch.ones(2, i % 4)) for i in range(300)),
        "shared": [torch.ones(3)] * 3,
        "last": {"lr": 1e-4, "names": [f"layer.{i}" for i in range(300)]},
    }
    file = io.BytesIO()
    torch.save(tree, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


LARGE = _large()
LARGE_PATHS: list[tuple[Any, ...]] = [
    ("first", "lr"), ("first", "betas"), ("first",), ("state", 7, "step"), ("state", 599),
    ("state", 300, "exp_avg"), ("state",), ("param_groups", 0, "betas"), ("param_groups", 1, "lr"),
    ("param_groups", 599, "betas"), ("param_groups", 300), ("module", "layer.7"), ("module",),
    ("shared", 0), ("shared",), ("last", "names"), ("last", "names", 7), ("last", "lr"),
    ("param_groups", 300, "betas", 0), ("param_groups", 5, "new"), ("state", 9, "new"),
]  # fmt: skip


def _index(path: tuple[Any, ...]) -> int:
    return path[-1] if isinstance(path[-1], int) else 0


def _loads(data: bytes) -> bool:
    try:
        weights_only.load(io.BytesIO(data))
    except pickle.UnpicklingError:
        return False
    return True
