"""What a pickle holds, as an inert tree: what the file names is neither imported nor called.

Each global becomes a `Global`, what a global would make becomes an `Object`, a torch tensor becomes
a `Tensor` that says where its bytes are. `reader` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

from ckptsurgeon.errors import count
from ckptsurgeon.files.dtypes import ITEM_BYTES, NUMPY, number
from ckptsurgeon.plans.edits import Each, Key

MOST_AXES = 64
WIDEST = 1 << 63


class Global(type):
    """A name that the file would import, `module.name`, and nothing of what is behind it.

    It is a class because the C unpickler instantiates nothing else. Calling it makes what stands
    for an instance, and runs none of the file's code. Two with the same name are equal."""

    module: str
    name: str

    def __new__(cls, module: str, name: str) -> Global:
        make = _MAKERS.get((module, name), _make_object)
        inside = {"module": module, "name": name, "__new__": make, "__slots__": ()}
        return super().__new__(cls, "Global", (), inside)

    def __init__(cls, module: str, name: str) -> None:
        super().__init__("Global", (), {})

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError("a Global does not change")

    def __eq__(cls, other: object) -> bool:
        if not isinstance(other, Global):
            return NotImplemented
        return (cls.module, cls.name) == (other.module, other.name)

    def __hash__(cls) -> int:
        return hash((cls.module, cls.name))

    def __repr__(cls) -> str:
        return f"{cls.module}.{cls.name}"


@dataclass(slots=True, unsafe_hash=True)  # not frozen: that makes it three times slower to make
class Storage:
    """Elements that tensors share: `numel` of `dtype`, the record `data/<key>`."""

    dtype: str
    key: str
    numel: int


@dataclass(slots=True, unsafe_hash=True)
class Tensor:
    """A tensor by where its elements are: `offset`, `size` and `stride` count elements of the
    storage, which has `storage_numel` of them. `whole` is whether it has all of them, side by side
    in the order of its shape, and there are some. What the native module makes is the same."""

    dtype: str
    storage: str
    storage_numel: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.whole = (
            not self.offset
            and prod(self.size) == self.storage_numel > 0 < min(self.size, default=1)
            and self.stride == strides(self.size)
        )

    @property
    def numel(self) -> int:
        return prod(self.size)


def strides(size: Sequence[int]) -> tuple[int, ...]:
    """Those of a tensor of this size that lies row after row."""
    return tuple(prod(size[axis + 1 :]) for axis in range(len(size)))


@dataclass(eq=False)
class Object:
    """An instance of a class that is not imported: how the file makes it.

    `state` is what BUILD gets, mostly the attributes; `items` and `appends` fill it if it is a
    container. Two objects are equal if they are the same one."""

    cls: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    keywords: dict[str, Any] | None = None
    items: dict[Any, Any] | None = None
    appends: list[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        self.state = _built(self.state, state)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.items is None:
            self.items = {}
        self.items[key] = value

    def extend(self, values: Sequence[Any]) -> None:
        if self.appends is None:
            self.appends = []
        self.appends += values

    def append(self, value: Any) -> None:
        self.extend((value,))

    add = append


class Dict(dict[Any, Any]):
    """An OrderedDict, which may have attributes (`_metadata` of a state dict): they are `state`."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = _built(getattr(self, "state", None), state)


def _built(old: Any, new: Any) -> Any:
    """Attributes after one more BUILD, whose state may be a pair of `__dict__` and slots."""
    pair = isinstance(new, tuple) and len(new) == 2 and isinstance(new[1], dict)
    halves = new if pair else (new,)
    if not all(isinstance(half, dict) for half in halves if half is not None):
        return new
    made = old if isinstance(old, dict) else {}
    for half in halves:
        made.update(half or {})
    return made


def class_of(value: Object) -> str:
    """What made it; of a tensor that torch rebuilds, the class that torch is told."""
    found = [each for each in (value.cls, *value.args) if isinstance(each, Global)]
    own = (each for each in found if not each.module.startswith("torch."))
    return repr(next(own, value.cls))


@lru_cache(256)
def named(module: str, name: str) -> Global:
    """One class for all files: 10,000 shards name the same ten."""
    return Global(module, name)


# --- what stands for an instance -----------------------------------------------------------------


def _make_object(cls: Global, *args: Any, **keywords: Any) -> Object:
    return Object(cls, args, keywords=keywords or None)


def _make_dict(cls: Global, *pairs: Any) -> Dict:
    """Empty, and filled later; Python 2 gave the pairs at once."""
    made = Dict(*pairs) if not pairs or all(type(key) is str for key, _ in pairs[0]) else None
    if made is None:
        raise ValueError("an OrderedDict is made of keys that are not all strings")
    return made


def _make_tuple(cls: Global, *args: Any) -> tuple[Any, ...]:
    return tuple(*args)


def _make_tensor(
    cls: Global, storage: Storage, offset: int, size: Any, stride: Any, *rest: Any
) -> Tensor:
    shape, steps, start = axes(size), axes(stride), index(offset)
    if len(shape) != len(steps):
        raise ValueError(
            f"a tensor has {count(len(shape), 'axis', 'axes')} and {count(len(steps), 'stride')}"
        )
    if not -WIDEST <= start < WIDEST:
        raise ValueError("a tensor begins beyond 63 bits")
    return Tensor(storage.dtype, storage.key, storage.numel, start, shape, steps)


def axes(numbers: Any) -> tuple[int, ...]:
    """Those of a shape, a stride or an offset, one for each axis. Raises ValueError for more than
    torch has, or for one of more than 63 bits: what is computed of them has few digits then."""
    if len(numbers) == 1:  # nearly all: flat
        found: tuple[int, ...] = (index(numbers[0]),)
    elif len(numbers) > MOST_AXES:
        raise ValueError(
            f"a tensor of {count(len(numbers), 'axis', 'axes')}; torch has up to {MOST_AXES}"
        )
    else:
        found = tuple(map(index, numbers))
    if any(not -WIDEST <= number < WIDEST for number in found):
        raise ValueError("an axis of more than 63 bits")
    return found


def _make_tensor_v3(
    cls: Global, storage: Storage, offset: int, size: Any, stride: Any, *rest: Any
) -> Tensor:
    dtype = rest[2].name
    numel = storage.numel * ITEM_BYTES[storage.dtype] // ITEM_BYTES[dtype]
    return _make_tensor(cls, Storage(dtype, storage.key, numel), offset, size, stride)


def _make_first(cls: Global, first: Any, *rest: Any) -> Any:
    return first


def _make_subclass(cls: Global, make: Global, kind: Global, args: Any, state: Any) -> Any:
    if kind.name == "DTensor":  # a pair, the second what its __slots__ hold
        slots = state[1] if isinstance(state, tuple) and len(state) == 2 else state
        local = slots.get("_local_tensor") if isinstance(slots, dict) else None
        if isinstance(local, Tensor):
            return local  # what this rank has of it
    made: Any = make(*args)
    return made


def _make_scalar(cls: Global, dtype: Any, data: Any = None) -> Any:
    """A number of numpy, as a schedule that is written with its cosine leaves it: the number, where
    the dtype is that of one."""
    kind, order = (*dtype.args[:1], *dtype.state[1:2]) if _is_dtype(dtype) else ("", "")
    if isinstance(data, Object) and data.args[1:] == ("latin1",):  # protocol 2 has no bytes
        data = data.args[0].encode("latin1")
    if kind not in NUMPY or not isinstance(data, bytes):
        return Object(cls, (dtype, data))
    return number(data, NUMPY[kind], ">" if order == ">" else "<")


def _is_dtype(value: Any) -> bool:
    made = isinstance(value, Object) and value.cls.name == "dtype"
    return made and bool(value.args) and isinstance(value.state, tuple)


_MAKERS = {
    ("numpy._core.multiarray", "scalar"): _make_scalar,
    ("numpy.core.multiarray", "scalar"): _make_scalar,
    ("collections", "OrderedDict"): _make_dict,
    ("torch", "Size"): _make_tuple,
    ("torch._utils", "_rebuild_tensor"): _make_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _make_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _make_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _make_first,
    ("torch._utils", "_rebuild_parameter_with_state"): _make_first,
    ("torch._tensor", "_rebuild_from_type_v2"): _make_subclass,
}


# --- what a path leads to ------------------------------------------------------------------------


def get(tree: Any, path: Sequence[Key]) -> Any:
    """The value under `path`: dict keys, list and tuple indices, attributes of objects.

    An attribute comes before an item of the same name; a dict key that is neither text nor a
    number goes by its `repr`. Raises KeyError with the path."""
    value = tree
    for depth, key in enumerate(path):
        try:
            value = _step(value, key)
        except (KeyError, IndexError, StopIteration, TypeError):
            raise KeyError(tuple(path[: depth + 1])) from None
    return value


def get_each(tree: Any, path: Sequence[Key | Each]) -> list[Any]:
    """The value under each path that `path` stands for, in the order of `Change.paths`. Raises
    KeyError with what leads nowhere."""
    values = [tree]
    for depth, step in enumerate(path):
        keys = keys_of(step)
        try:
            values = [
                value[key] if type(value) is dict and key in value else _step(value, key)
                for value in values
                for key in keys
            ]
        except (KeyError, IndexError, StopIteration, TypeError):
            raise KeyError(tuple(path[: depth + 1])) from None
    return values


def keys_of(step: Key | Each) -> tuple[Key, ...]:
    """The keys that a step of a path stands for."""
    return step.keys if isinstance(step, Each) else (step,)


def _step(value: Any, key: Key) -> Any:
    if type(value) is dict:  # nearly always
        return value[key] if key in value else _by_repr(value, key)
    if isinstance(value, Object):
        for place in (value.state, value.items, value.appends):
            if isinstance(place, dict) and key in place:
                return place[key]
            if isinstance(place, (list, tuple)) and isinstance(key, int):
                return place[key]
        raise KeyError(key)
    if isinstance(value, Dict) and key not in value:
        return value.state[key] if hasattr(value, "state") else value[key]
    if isinstance(value, dict):
        return value[key]
    if isinstance(value, (list, tuple)) and isinstance(key, int):
        return value[key]
    if isinstance(value, Tensor) and isinstance(value, Sequence) and isinstance(key, int):
        return value[key]  # a chunk of it
    raise KeyError(key)


def _by_repr(value: dict[Any, Any], key: Key) -> Any:
    if not isinstance(key, str):
        raise KeyError(key)
    return next(v for k, v in value.items() if not isinstance(k, (str, int)) and repr(k) == key)


def all_tensors(tree: Any) -> list[Tensor]:
    """Each tensor of `tree` once for each value that holds it, without a path: five times as fast
    as `tensors`."""
    out: list[Tensor] = []
    seen: set[int] = set()
    todo: list[Any] = [tree]
    parts: Any
    while todo:
        value = todo.pop()
        if type(value) is dict:  # nearly always
            parts = value.values()
        elif isinstance(value, Tensor):
            out.append(value)
            continue
        elif isinstance(value, dict):
            parts = (*value.values(), getattr(value, "state", None))
        elif isinstance(value, (list, tuple)):
            parts = value
        elif isinstance(value, Object):
            parts = (value.args, value.keywords, value.state, value.items, value.appends)
        else:
            continue
        if id(value) not in seen:
            seen.add(id(value))
            for part in parts:
                kind = type(part)
                if kind is Tensor:
                    out.append(part)
                elif kind not in _LEAVES:
                    todo.append(part)
    return out


_LEAVES = frozenset((int, float, str, bool, bytes, type(None)))


def tensors(tree: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Each tensor of `tree` once, with one path that leads to it."""
    seen: set[int] = set()
    todo: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while todo:
        path, value = todo.pop()
        if id(value) in seen or not isinstance(value, (Tensor, dict, list, tuple, Object)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, dict):
            todo += [((*path, key), item) for key, item in value.items()]
            todo.append((path, getattr(value, "state", None)))
        elif isinstance(value, (list, tuple)):
            todo += [((*path, key), item) for key, item in enumerate(value)]
        else:
            todo += [(path, part) for part in (value.args, value.keywords, value.state)]
            todo += [(path, value.items), (path, value.appends)]
