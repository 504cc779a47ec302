"""A row of the table of commands becomes a command of Typer, with the options that all share."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ckptsurgeon.cli.bucket import at_hand
from ckptsurgeon.cli.commands import Command, commands, examples, exit_codes
from ckptsurgeon.cli.options import Cancelled, Common, OneLiner
from ckptsurgeon.cli.parameter_types import parameter_types
from ckptsurgeon.cli.sections import Flags
from ckptsurgeon.cli.typed import follow
from ckptsurgeon.cli.usage import as_typed, from_system
from ckptsurgeon.cli.values import PlainCommand
from ckptsurgeon.errors import UNTOUCHED
from ckptsurgeon.hints import again


def _carry_out(function: Callable[..., None], given: Mapping[str, Any], looks: bool) -> None:
    try:
        function(**given)
    except KeyboardInterrupt:
        raise Cancelled("stopped by Ctrl-C", next=again()) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of stdout has gone: Typer ends with 1, silently
            raise
        raise (from_system(error, UNTOUCHED) if looks else from_system(error)) from None


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
    add(command(function, row.name))
    made = typer.main.get_command(single)
    for parameter in made.params:
        if parameter.param_type_name == "argument":  # whose metavar says enough
            parameter.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
    return made


def command(function: Callable[..., None], command_name: str) -> Callable[..., None]:
    """`function` as Typer wants it: a parameter of a class above becomes the options in that class,
    and one that is a section of a recipe the flags of its keys.

    A STEP may be the name of its folder, or `latest`; `function` gets its number. Ctrl-C inside
    `function` becomes Cancelled, what the disk refuses a SurgeryError, and every hint follows what
    was typed."""
    bundles: dict[str, type[Any]] = {}
    sections: dict[str, Flags] = {}
    parameters: list[inspect.Parameter] = []
    hints = parameter_types(function)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if flags := Flags.of(hint):
            sections[name] = flags
            parameters += flags.parameters()
        elif is_dataclass(hint):
            bundles[name] = hint  # type: ignore[assignment]
            types = get_type_hints(hint, include_extras=True)
            parameters += [
                _parameter(item.name, item.default, types[item.name]) for item in fields(hint)
            ]
        else:
            parameters.append(_parameter(name, parameter.default, hint))
    steps = [item.name for item in parameters if _is_step(item.annotation)]
    types = {item.name: item.annotation for item in parameters}

    def invoke(**given: Any) -> None:
        from ckptsurgeon.files.one_look import one_look

        for name, bundle in bundles.items():
            given[name] = bundle(**{item.name: given.pop(item.name) for item in fields(bundle)})
        common = next(given[name] for name, kind in bundles.items() if issubclass(kind, Common))
        follow(common, *(given[name] for name in bundles if given[name] is not common))
        named = next(name for name in bundles if given[name] is common)
        with (
            at_hand(common, command_name, given) as given[named],
            one_look(),
            as_typed(command_name, types) if isinstance(common, OneLiner) else nullcontext(),
        ):
            given |= {name: given[named].step(given[name]) for name in steps}
            made = {
                name: flags.section({key: given.pop(key) for key in flags.keys})
                for name, flags in sections.items()
            }
            _carry_out(function, given | made, not commands()[command_name].changes)

    invoke.__doc__ = function.__doc__
    invoke.__name__ = function.__name__
    invoke.__annotations__ = types
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return invoke


def _parameter(name: str, default: Any, hint: Any) -> inspect.Parameter:
    hint = _typed(hint) if _is_step(hint) else hint
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=hint)


def _is_step(hint: Any) -> bool:
    return any(getattr(item, "metavar", None) == "STEP" for item in get_args(hint))


def _typed(hint: Any) -> Any:
    """The hint of a STEP for Typer, to which it is a text."""
    annotation, info = get_args(hint)
    return Annotated[str if annotation is int else str | None, info]
