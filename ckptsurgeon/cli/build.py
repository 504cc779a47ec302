"""A row of the table of commands becomes a command of Typer, with the options that all share."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ckptsurgeon.cli.commands import Command, examples, exit_codes
from ckptsurgeon.cli.options import Cancelled, Common
from ckptsurgeon.cli.parameter_types import parameter_types
from ckptsurgeon.cli.typed import follow
from ckptsurgeon.cli.usage import from_system
from ckptsurgeon.cli.values import PlainCommand
from ckptsurgeon.hints import again


def _carry_out(function: Callable[..., None], given: Mapping[str, Any]) -> None:
    try:
        function(**given)
    except KeyboardInterrupt:
        raise Cancelled("stopped by Ctrl-C", next=again()) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of stdout has gone: Typer ends with 1, silently
            raise
        raise from_system(error) from None


def build(row: Command) -> Any:
    """The command of Typer for a row of the table; its help ends with exit codes and examples."""
    function = row.function()
    text, _, _ = (function.__doc__ or "").partition("Examples:\n")
    shown = "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples(function))])
    epilog = f"{exit_codes(row.codes, row.more)}\n\n{shown}"
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    add = single.command(
        row.name, cls=PlainCommand, help=inspect.cleandoc(text.rstrip()), epilog=epilog
    )
    add(command(function))
    made = typer.main.get_command(single)
    for parameter in made.params:
        if parameter.param_type_name == "argument":  # whose metavar says enough
            parameter.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
    return made


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as Typer wants it: a parameter of a class above becomes the options in that class.

    A STEP may be the name of its folder, or `latest`; `function` gets its number. Ctrl-C inside
    `function` becomes Cancelled, what the disk refuses a SurgeryError, and every hint follows what
    was typed."""
    hints = parameter_types(function)
    steps = [name for name, hint in hints.items() if _is_step(hint)]
    hints |= {name: _typed(hints[name]) for name in steps}
    bundles: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            parameters.append(
                parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        bundles[parameter.name] = hint  # type: ignore[assignment]
        types = get_type_hints(hint, include_extras=True)
        parameters += [
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=item.default,
                annotation=types[item.name],
            )
            for item in fields(hint)
        ]

    def invoke(**given: Any) -> None:
        from ckptsurgeon.files.one_look import one_look

        for name, bundle in bundles.items():
            given[name] = bundle(**{item.name: given.pop(item.name) for item in fields(bundle)})
        common = next(given[name] for name, kind in bundles.items() if issubclass(kind, Common))
        follow(common, *(given[name] for name in bundles if given[name] is not common))
        with one_look():
            given |= {name: common.step(given[name]) for name in steps}
            _carry_out(function, given)

    invoke.__doc__ = function.__doc__
    invoke.__name__ = function.__name__
    invoke.__annotations__ = {item.name: item.annotation for item in parameters}
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return invoke


def _is_step(hint: Any) -> bool:
    return any(getattr(item, "metavar", None) == "STEP" for item in get_args(hint))


def _typed(hint: Any) -> Any:
    """The hint of a STEP for Typer, to which it is a text."""
    annotation, info = get_args(hint)
    return Annotated[str if annotation is int else str | None, info]
