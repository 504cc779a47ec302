"""Plain values of a command line are taken as they are, without loading pydantic; what is not
taken is refused in our own words.

Typer hands every value to pydantic, also one that was not given. To load it takes as long as a
surgery on a small run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand

from ckptsurgeon.cli.parameter_types import parameter_types


class Refused(typer.BadParameter):
    """Why a command does not take what was typed, as we say it."""


class Unexpected(typer.BadParameter):
    """Words that a command does not take."""

    def __init__(self, ctx: Any, words: Sequence[str]) -> None:
        super().__init__(f"unexpected {' '.join(words)}", ctx)
        self.words = tuple(words)


class NoSuchCommand(typer.BadParameter):
    """A word where a command is expected, and the commands that there are."""

    def __init__(self, ctx: Any, name: str, known: Sequence[str]) -> None:
        super().__init__(f"no such command {name}", ctx)
        self.name, self.known = name, tuple(known)


class PlainCommand(TyperCommand):
    """A command that takes plain values as they are."""

    allow_extra_args = True  # which are refused below

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise Unexpected for arguments that the command has not."""
        left = super().parse_args(ctx, args)
        if left and not ctx.resilient_parsing:
            raise Unexpected(ctx, left)
        return left

    def make_parser(self, ctx: Any) -> Any:
        """One that raises Refused for an option of one value that is given twice."""
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parsed(args: list[str]) -> Any:
            options, left, order = parse(args=args)
            if not ctx.resilient_parsing:
                _refuse_twice(ctx, order)
            return options, left, order

        parser.parse_args = parsed
        return parser

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, and --help."""
        return taking_plain(self.callback, super().get_params(ctx))


def _refuse_twice(ctx: Any, given: Sequence[Any]) -> None:
    """Which of two values is meant, nobody knows. A flag that has no opposite may stand twice."""
    for parameter, times in Counter(given).items():
        alone = getattr(parameter, "is_flag", False) and not parameter.secondary_opts
        if times == 1 or parameter.param_type_name != "option" or parameter.multiple or alone:
            continue
        names = "/".join((*parameter.opts[:1], *parameter.secondary_opts[:1]))
        raise Refused(f"{names} is given {times} times: which one is meant?", ctx, parameter)


def taking_plain(function: Any, parameters: Sequence[Any]) -> list[Any]:
    """The parameters of `function`. They take what needs no conversion: nothing, a default, a
    text, a path, a whole number. Every other value goes Typer's way; Refused says of a number what
    is wrong with it."""
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
            try:
                return convert(ctx, value)
            except typer.BadParameter:
                if (why := _wrong(value, hint)) is None:
                    raise
                argument = parameter.param_type_name == "argument"
                name = parameter.metavar if argument else parameter.opts[0]
                raise Refused(f"'{name.strip('[].')}' must be {why}", ctx, parameter) from None
        return plain if parameter.callback is None else parameter.callback(ctx, parameter, plain)

    return process


def _wrong(value: Any, hint: Any) -> str | None:
    """What a number would be that is taken; None for what is no number."""
    if hint is None:
        return None
    annotation, info = get_args(hint)
    kind = _kind(annotation)
    each, kinds = (value, get_args(kind)) if get_args(kind) else ([value], (kind,))
    if not each or kinds[0] not in (int, float):
        return None
    try:
        numbers = [kinds[0](text) for text in each]
    except (ValueError, OverflowError):
        return "a whole number" if kinds[0] is int else "a number"
    if info.min is not None and min(numbers) < info.min:
        return f"at least {info.min}"
    if info.max is not None and max(numbers) > info.max:
        return f"at most {info.max}"
    return None


def _kind(annotation: Any) -> Any:
    """The type of a value that is given."""
    return next((item for item in get_args(annotation) if item is not type(None)), annotation)


def _plain(value: Any, hint: Any) -> Any:
    """The value as its type; None where Typer must look at it."""
    if not value or hint is None:
        return None
    annotation, info = get_args(hint)
    kind = _kind(annotation)
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
