"""The fields of a section: one conversion of what Python, a recipe or a flag gives for them.

Whoever builds a section gets the same values for the same spelling, or UsageError.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from numbers import Real
from typing import Any, ClassVar, TypeVar

from ckptsurgeon.errors import UsageError
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import ANY, FURTHER

F = TypeVar("F", bound="Fields")
SHARE = r"(\d+\.?\d*|\.\d+)"
SCALE = re.compile(rf"{SHARE}\s*%|{SHARE}\s*/\s*{SHARE}|[x*×]\s*{SHARE}|{SHARE}\s*[x*×]", re.ASCII)
SCALES = {"half": "0.5x", "double": "2x", "twice": "2x", "quarter": "0.25x", "tenth": "0.1x"}
"""How people write a share of the present value."""


class Fields:
    """A dataclass whose fields hold what their types say, however they were given.

    `key` is the path of its mapping in a recipe; without it the fields are keys of the recipe
    itself."""

    key: ClassVar[str] = ""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """What other programs call one of its keys."""
    rest: ClassVar[tuple[str, frozenset[str]]] = ("", frozenset())
    """A field, of text or number by key, that takes what is given under these further keys."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        if all(_is_default(item, getattr(self, item.name)) for item in dataclasses.fields(kind)):
            return  # five sections stand in each recipe, and their types take long to look up
        for name, hint in hints(kind).items():
            value = getattr(self, name)
            if name == self.rest[0]:
                new: Any = _further(kind, value, "")
            else:
                new = converted(hint, value, full_key(kind, name))
            object.__setattr__(self, name, new)  # the dataclass is frozen

    @classmethod
    def build(cls: type[F], data: Any, where: str = "") -> F:
        """From plain data by the keys of a recipe. Raises UsageError, which names `where`."""
        if not isinstance(data, Mapping):
            raise UsageError(
                f"{_in(where)}`{cls.key}` must be a mapping, not {data!r}",
                next=f"its keys are: {', '.join(names(cls))}",
            )
        field, further = cls.rest
        kind: Any = cls
        own, values = [name for name in names(cls) if name != field], dict[str, Any]()
        rest = {key: value for key, value in data.items() if key in further and key not in own}
        for key, value in data.items():
            if key in own:
                values[key] = converted(hints(kind)[key], value, full_key(cls, key), where)
            elif key not in rest:
                raise _unknown(cls, key, where)
        if rest:
            values[field] = _further(cls, rest, where)
        for name in names(cls):
            if is_required(cls, name) and name not in values:
                key = full_key(cls, name)
                raise UsageError(f"{_in(where)}`{key}` is missing", next=f"add {key}")
        return cls(**values)

    def check_values(self) -> None:
        """Raise UsageError for a value that its key does not take."""
        kind: Any = type(self)
        for name, key in keys(kind).items():
            value = getattr(self, name)
            if isinstance(value, Fields):
                value.check_values()
            elif name == self.rest[0]:
                for further, number in value.items():
                    limits = FURTHER.get(further, ANY)
                    Key(limits=limits).check(full_key(kind, further), number)
            else:
                key.check(full_key(kind, name), value)


def names(kind: type[Fields]) -> list[str]:
    """The fields."""
    return [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]


def is_required(kind: type[Fields], name: str) -> bool:
    """Whether a field has no default."""
    item = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return item.default is item.default_factory is dataclasses.MISSING


def _is_default(item: dataclasses.Field[Any], value: Any) -> bool:
    if item.default_factory is dataclasses.MISSING:
        return value is item.default
    made = item.default_factory()
    return type(value) is type(made) and bool(value == made)


def full_key(kind: type[Fields], name: str) -> str:
    """A field as a recipe has it: `set.lr`."""
    return f"{kind.key}.{name}" if kind.key else name


def converted(hint: Any, value: Any, key: str, where: str = "") -> Any:
    """`value` as the type `hint` has it: a number that is written out is that number. Raises
    UsageError, which names the `key` and `where` it was given, for what can't be meant."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if len(options) == 1:
            return converted(options[0], value, key, where)
        return _number(value, key, where)
    if isinstance(hint, type) and issubclass(hint, Fields):
        return value if isinstance(value, hint) else hint.build(value, where)
    if hint is float:
        return _number(value, key, where, relative=False)
    if typing.get_origin(hint) is list:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(not isinstance(item, (str, int)) or isinstance(item, bool) for item in items):
            raise _wrong(key, value, "a list of texts", where)
        return [str(item) for item in items]
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise _wrong(key, value, "a mapping of text to text", where)
        return {str(k): v for k, v in value.items()}
    if hint is int and _is_number(value) and value == value // 1:
        return int(value)  # 1e6 samples is how people write it
    if hint is str and _is_number(value):
        return str(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        words = {int: "a whole number", str: "a text", bool: "true or false"}
        raise _wrong(key, value, words[hint], where)
    return value


def _further(kind: type[Fields], given: Any, where: str) -> dict[str, float | str]:
    """The further keys of `rest`."""
    field, further = kind.rest
    if not isinstance(given, Mapping):
        raise _wrong(full_key(kind, field), given, "a mapping of keys to numbers", where)
    for key in given:
        if key not in further or key in names(kind):
            raise _unknown(kind, key, where)
    return {key: _number(value, full_key(kind, key), where) for key, value in given.items()}


def _number(value: Any, key: str, where: str, relative: bool = True) -> float | str:
    if _is_number(value):
        try:
            number = float(value)
        except OverflowError:  # of an int with hundreds of digits
            number = math.inf
        if not math.isfinite(number):
            raise _wrong(key, value, "a finite number", where)
        return number
    if isinstance(value, str):
        body = value[:-1] if value.endswith("x") and relative else value
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", body, re.ASCII):
            return value if body != value else _number(float(value), key, where)
    if not relative:
        raise _wrong(key, value, "a number", where)
    scale = _scale(value)
    hint = f"did you mean `{scale}`?" if scale else ""
    write = "write a number such as 3e-5, or a scale such as 0.5x"
    raise _wrong(key, value, "a number", where, hint or write)


def _scale(value: Any) -> str:
    """The scale that `half`, `50%`, `1/2`, `x0.5` or `0.5X` means; "" for anything else."""
    text = str(value).strip().lower()
    match = SCALE.fullmatch(text)
    if match is None:
        return SCALES.get(text, "")
    percent, over, under, after, before = match.groups()
    number, whole = float(percent or over or after or before), float(under or 1)
    if not whole or not math.isfinite(number):
        return ""
    return f"{number / (100 if percent else whole):g}x"


def _wrong(key: str, value: Any, wanted: str, where: str, hint: str = "") -> UsageError:
    what = f"{_in(where)}`{key}` is {value!r}, and not {wanted}"
    return UsageError(what, next=hint or f"write {wanted}")


def _unknown(kind: type[Fields], key: Any, where: str) -> UsageError:
    field, further = kind.rest
    known = [full_key(kind, name) for name in names(kind) if name != field]
    rare = [full_key(kind, name) for name in sorted(further)]
    return unknown_key(full_key(kind, str(key)), known, where, kind.synonyms, rare)


def _in(where: str) -> str:
    return f"{where}: " if where else ""


def _is_number(value: Any) -> bool:
    """Also numpy's."""
    return isinstance(value, Real) and value is not True and value is not False


@cache
def hints(kind: Any) -> dict[str, Any]:
    """The types of its fields, in their order."""
    found = typing.get_type_hints(kind)
    return {name: found[name] for name in names(kind)}


@cache
def keys(kind: Any) -> dict[str, Key]:
    """What is said of each field; of some nothing is."""
    found = typing.get_type_hints(kind, include_extras=True)
    said = {name: getattr(found[name], "__metadata__", ()) for name in names(kind)}
    return {
        name: next((each for each in more if isinstance(each, Key)), Key())
        for name, more in said.items()
    }
