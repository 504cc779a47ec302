"""Plain values of a command line are taken as they are, without loading pydantic.

Typer hands every value to pydantic, also one that was not given. To load it takes as long as a
surgery on a small run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from typer.core import TyperCommand

from ckptsurgeon.cli.parameter_types import parameter_types


class PlainCommand(TyperCommand):
    """A command that takes plain values as they are."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, and --help."""
        return taking_plain(self.callback, super().get_params(ctx))


def taking_plain(function: Any, parameters: Sequence[Any]) -> list[Any]:
    """The parameters of `function`. They take what needs no conversion: nothing, a default, a
    text, a path, a whole number. Every other value goes Typer's way, which also says what is
    wrong with it."""
    hints = parameter_types(function)
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = _process(parameter, hints.get(parameter.name))
    return list(parameters)


def _process(parameter: Any, hint: Any) -> Callable[[Any, Any], Any]:
    convert = parameter.process_value

    def process(ctx: Any, value: Any) -> Any:
        plain = value if isinstance(value, (bool, int, float, Path)) else _plain(value, hint)
        if (plain is None and value is not None) or (parameter.required and not value):
            return convert(ctx, value)
        return plain if parameter.callback is None else parameter.callback(ctx, parameter, plain)

    return process


def _plain(value: Any, hint: Any) -> Any:
    """The value as its type; None where Typer must look at it."""
    if not value or hint is None:
        return None
    annotation, info = get_args(hint)
    kind = next((item for item in get_args(annotation) if item is not type(None)), annotation)
    if list[str] in (annotation, kind):
        return list(value) if all(isinstance(item, str) for item in value) else None
    if not isinstance(value, str):
        return None
    if kind is Path:
        return None if info.exists else Path(value)
    if kind is int and value.isascii() and value.isdecimal() and len(value) < 19:
        number = int(value)
        low, high = info.min, info.max
        inside = (low is None or low <= number) and (high is None or number <= high)
        return number if inside else None
    return value if kind is str else None
