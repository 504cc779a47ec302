"""The options that every command accepts, and how a command gets them."""

from __future__ import annotations

import errno
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ckptsurgeon.cli.commands import Command, examples, exit_codes
from ckptsurgeon.cli.values import PlainCommand
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.report import Style

if TYPE_CHECKING:
    from ckptsurgeon.run.run import Run

REMEDIES = {
    errno.EACCES: "run as the user who owns it, or change its rights",
    errno.EPERM: "run as the user who owns it, or change its rights",
    errno.EROFS: "mount it writable, then run the same command again",
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "free some space, then run the same command again",
    errno.ENOENT: "check the path: it does not exist",
}
"""What helps against an error of the operating system."""
AllowGlobal = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-global", metavar="NAME", help="A module.name that shards may hold; repeatable."
    ),
]


class Nowhere(io.TextIOBase):
    """Stands for a stdout or stderr that is closed: takes every text, keeps none."""

    def write(self, text: str) -> int:
        """As if it was written."""
        return len(text)


class Cancelled(SurgeryError):
    """Ctrl-C while nothing was committed."""

    exit_code = 130


@dataclass(frozen=True)
class Common:
    """What every command accepts."""

    run_dir: Annotated[
        Path | None,
        typer.Option("--run", "-C", metavar="DIR", help="The run, found upward from DIR [here]."),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would happen and stop.")
    ] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document (docs/json.md).")] = (
        False
    )
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False

    def open_run(self) -> Run:
        """The run that -C, or the working directory, lies in."""
        from ckptsurgeon.run.run import Run

        return Run.open(self.run_dir or Path())

    @property
    def style(self) -> Style:
        """What an answer may look like."""
        return Style.of(sys.stdout)

    @property
    def where(self) -> Path | None:
        """What -C must name so that a command of the same run can be typed here, if anything."""
        named = self.run_dir
        return None if named is None or named.resolve() == Path.cwd() else named

    def here(self, text: str) -> str:
        """`text` with -C in each of its commands, where it is needed: a hint is typed as it is."""
        if self.where is None:
            return text
        named = f"ckptsurgeon -C {shlex.quote(str(self.where))} "
        return re.sub(r"\bckptsurgeon (?=[a-z])", lambda _: named, text)

    def answer(self, text: Callable[[], str], document: Callable[[], Mapping[str, Any]]) -> None:
        """Make and print the text, or with --json the document; with -q neither."""
        if not self.quiet:
            print(json.dumps(document(), ensure_ascii=False) if self.as_json else text())

    def report(self, text: Callable[[], str], document: Callable[[], Mapping[str, Any]]) -> None:
        """As `answer`, of what is done: a reader that has gone and a full disk do not undo it, so
        stderr is told, and the exit code is that of the act."""
        try:
            self.answer(text, document)
            sys.stdout.flush()
        except OSError:
            sys.stdout = Nowhere()
            if not self.quiet:
                print(text(), file=sys.stderr)


@dataclass(frozen=True)
class Editing(Common):
    """What every command that edits accepts."""

    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The logbook line that `log` shows.")
    ] = None
    relaunch: Annotated[
        bool,
        typer.Option("--relaunch", help="Start the trainer afterwards and check its first line."),
    ] = False
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, help="Files worked on at once.")
    ] = 8
    allow_global: AllowGlobal = None
    no_tb_note: Annotated[
        bool,
        typer.Option("--no-tb-note", help="Do not write a note about the surgery into the logs."),
    ] = False


@dataclass(frozen=True)
class OneLiner(Editing):
    """What every command that is a recipe of one section accepts."""

    print_recipe: Annotated[
        bool, typer.Option("--print-recipe", help="Print the same request as YAML and stop.")
    ] = False


@dataclass(frozen=True)
class LogOneLiner(OneLiner):
    """What a command accepts that works on logs alone too."""

    tb: Annotated[
        list[Path] | None,
        typer.Option(
            "--tb", metavar="DIR", help="Logs without checkpoints, at any depth; repeatable."
        ),
    ] = None

    def open_run(self) -> Run:
        """The log folders of --tb, else the run."""
        from ckptsurgeon.run.run import Run

        return Run.of_logs(self.tb) if self.tb else super().open_run()

    @property
    def where(self) -> Path | None:
        """The first log folder has the receipts."""
        return self.tb[0] if self.tb else super().where


def _carry_out(function: Callable[..., None], given: Mapping[str, Any]) -> None:
    try:
        function(**given)
    except KeyboardInterrupt:
        raise Cancelled("stopped by Ctrl-C", next="run the same command again") from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of stdout has gone: Typer ends with 1, silently
            raise
        where = f"{error.filename}: " if error.filename else ""
        remedy = REMEDIES.get(error.errno or 0, "ckptsurgeon status")
        raise SurgeryError(
            f"{where}{error.strerror or error}", untouched="nothing was committed", next=remedy
        ) from None


def build(row: Command) -> Any:
    """The command of Typer for a row of the table; its help ends with exit codes and examples."""
    function = row.function()
    text, _, _ = (function.__doc__ or "").partition("Examples:\n")
    shown = "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples(function))])
    epilog = f"{exit_codes(row.codes, row.more)}\n\n{shown}"
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    add = single.command(row.name, cls=PlainCommand, help=inspect.cleandoc(text), epilog=epilog)
    add(command(function))
    return typer.main.get_command(single)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as Typer wants it: a parameter of a class above becomes the options in that class.

    Ctrl-C inside `function` becomes Cancelled, what the disk refuses a SurgeryError, and an error's
    commands get the -C that they need."""
    hints = get_type_hints(function, include_extras=True)
    bundles: dict[str, type[Common]] = {}
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
        for name, bundle in bundles.items():
            given[name] = bundle(**{item.name: given.pop(item.name) for item in fields(bundle)})
        common = next(given[name] for name in bundles)
        try:
            _carry_out(function, given)
        except SurgeryError as error:
            error.next = tuple(common.here(hint) for hint in error.next)
            raise

    invoke.__doc__ = function.__doc__
    invoke.__name__ = function.__name__
    invoke.__annotations__ = {item.name: item.annotation for item in parameters}
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return invoke
