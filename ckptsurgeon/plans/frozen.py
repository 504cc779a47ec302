"""What `dataclass(frozen=True)` makes, in a fifth of the time: a start makes a hundred of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A dataclass with equality, hash and repr by its fields, of which `dataclass` compiles none
    but `__init__` from text. That no field is set anew is what mypy checks, and nothing when it
    runs: what a caller of the API holds is `held`."""
    return _completed(dataclass(repr=False, eq=False)(cls))


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def held(cls: type[T]) -> type[T]:
    """The same for what a caller of the API holds: that a field is set anew is refused when it
    runs, too, in twice the time."""
    return _completed(dataclass(frozen=True, repr=False, eq=False)(cls))


def _completed(made: type[T]) -> type[T]:
    """The class with the methods that `dataclass` did not compile."""
    names = [each.name for each in fields(made) if each.compare]  # type: ignore[arg-type]
    methods = {"_compared": _values(names), "__eq__": _equal, "__hash__": _hash, "__repr__": _text}
    for name, method in methods.items():
        if name not in made.__dict__:
            setattr(made, name, method)
    return made


def _values(names: list[str]) -> Callable[[Any], Any]:
    """What gives the values of these fields, to compare and to hash."""
    if len(names) > 1:
        return attrgetter(*names)
    return staticmethod(lambda made: tuple(getattr(made, name) for name in names))


def _equal(self: Any, other: Any) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return self._compared(self) == self._compared(other)


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _text(self: Any) -> str:
    values = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(values)})"
