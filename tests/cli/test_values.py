"""Plain values are taken without pydantic, and they are what Typer makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from ckptsurgeon.cli.build import build
from ckptsurgeon.cli.commands import commands
from ckptsurgeon.errors import UsageError

TEXTS = ["8", "08", "-1", "+8", "1_0", "1e3", "9" * 30, "٨", " 8 ", "x", "", "a b", "~", "../x"]


def outcome(ctx: typer.Context, parameter: Any, value: Any, *, plain: bool) -> tuple[str, Any]:
    """What a parameter makes of a value, by our way or by Typer's own; errors have words of their
    own."""
    function = parameter.process_value if plain else type(parameter).process_value
    try:
        given = function(ctx, value) if plain else function(parameter, ctx, value)
    except (typer.BadParameter, UsageError):  # Typer's own, or that of an option's callback
        return "error", None
    empty = given in (None, (), [])  # Typer makes these one after the conversion
    return "value", None if empty else list(given) if isinstance(given, tuple) else given


@pytest.mark.parametrize("name", list(commands()))
@pytest.mark.long
def test_a_value_is_what_typer_makes_of_it(name: str) -> None:
    command = build(commands()[name])
    values: list[Any] = [None, *TEXTS]
    ctx = typer.Context(command)
    for parameter in command.get_params(ctx):
        lists = [[text] for text in TEXTS] + [TEXTS, []]
        many = parameter.multiple or parameter.nargs == -1
        for value in [None, *lists] if many else values:
            ours, theirs = (outcome(ctx, parameter, value, plain=plain) for plain in (True, False))
            assert ours == theirs, (parameter.name, value)
