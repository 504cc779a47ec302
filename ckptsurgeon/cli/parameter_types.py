"""The types of the parameters of a function that becomes a command, as Typer looks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints


def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Those of its parameters, with what `Annotated` adds.

    Python 3.10 makes an Optional of a parameter whose default is None: around `Annotated`, where
    Typer sees neither the name nor the help of an option, and no argument at all."""
    hints = get_type_hints(function, include_extras=True)
    return {name: _unwrapped(hint) for name, hint in hints.items()}


def _unwrapped(hint: Any) -> Any:
    inner = [each for each in get_args(hint) if get_origin(each) is Annotated]
    return inner[0] if inner and get_origin(hint) is not Annotated else hint
