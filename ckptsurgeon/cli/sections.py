"""The keys of a section as options and arguments of a command, and the section that they make."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ckptsurgeon.files.plain_yaml import scalar
from ckptsurgeon.operations.completion import saved_steps
from ckptsurgeon.operations.fields import Fields, hints, is_required, keys
from ckptsurgeon.operations.key import Key


class Flags:
    """The keys of a section that have a flag, or those of them that are named. Typer gets texts:
    what they mean is said by the section, as in a recipe."""

    def __init__(self, kind: Any, named: tuple[str, ...] = ()) -> None:
        self.kind: Any = kind
        said = {name: key for name, key in keys(kind).items() if key.flag}
        self.keys = {name: said[name] for name in named or said}

    @classmethod
    def of(cls, hint: Any) -> Flags | None:
        """Of a parameter whose type is a section, or `Annotated` one with the names of some keys;
        None for every other type."""
        kind, *named = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        if not (isinstance(kind, type) and issubclass(kind, Fields)):
            return None
        return cls(kind, tuple(named))

    def parameters(self) -> list[inspect.Parameter]:
        """As a function has them of which Typer makes a command."""
        return [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=self._default(name),
                annotation=self._annotation(name, key),
            )
            for name, key in self.keys.items()
        ]

    def section(self, given: Mapping[str, Any]) -> Any:
        """The section that these values of the parameters make."""
        values = {}
        for name in self.keys:
            hint, value = hints(self.kind)[name], given[name]
            if value is None or value is False or value == []:
                continue
            if hint is bool:
                value = not getattr(self.kind, name)
            elif isinstance(value, str) and {int, float} & {hint, *typing.get_args(hint)}:
                value = scalar(value)
            values[name] = value
        return self.kind.build(values)

    def _default(self, name: str) -> Any:
        if hints(self.kind)[name] is bool:
            return False
        return inspect.Parameter.empty if is_required(self.kind, name) else None

    def _annotation(self, name: str, key: Key) -> Any:
        hint = hints(self.kind)[name]
        flag, _, metavar = key.flag.partition(" ")
        taken: Any = list[str] if typing.get_origin(hint) is list else str
        if not is_required(self.kind, name):
            taken = taken | None
        if not flag.startswith("-"):
            made = typer.Argument(metavar=key.flag, help=key.line, autocompletion=_completion(key))
            return Annotated[taken, made]
        if hint is bool:
            return Annotated[bool, typer.Option(flag, help=key.line)]
        made = typer.Option(flag, metavar=metavar, help=key.line, autocompletion=_completion(key))
        return Annotated[taken, made]


def _completion(key: Key) -> Any:
    if "STEP" in key.flag:
        return saved_steps
    return (lambda: [*key.one_of]) if key.one_of else None
