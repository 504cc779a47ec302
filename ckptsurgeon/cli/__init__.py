"""The command line: what `ckptsurgeon` starts; every error leaves in three lines."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ckptsurgeon.cli.commands import commands, exit_codes
from ckptsurgeon.cli.usage import from_click, from_system
from ckptsurgeon.cli.values import NoSuchCommand, taking_plain
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import TYPED, Typed, again
from ckptsurgeon.report.terminal import checked
from ckptsurgeon.version import VERSION


class Surgeon(TyperGroup):
    """The group of all commands, of which one is loaded when it is asked for. What it raises leaves
    as three lines and an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(commands())  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None."""
        from ckptsurgeon.cli.build import build

        row = commands().get(cmd_name)
        return None if row is None else build(row)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` begin with. Raises NoSuchCommand for another word; one that looks
        like an option is Click's to refuse."""
        name = str(args[0])
        if name in commands() or name.startswith("-") or ctx.resilient_parsing:
            resolved = super().resolve_command(ctx, args)
            _take_options_of(resolved[1])
            return resolved
        raise NoSuchCommand(ctx, name, list(commands()))

    def invoke(self, ctx: Any) -> Any:
        """Load the command and carry it out. Raises Cancelled for Ctrl-C before it has begun, of
        which Typer would say nothing."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from ckptsurgeon.cli.options import Cancelled

            raise Cancelled("stopped by Ctrl-C", next=again()) from None

    def get_params(self, ctx: Any) -> list[Any]:
        """The options before the command."""
        return taking_plain(self.callback, super().get_params(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands in --help, none of which is loaded for it."""
        with formatter.section("Commands"):
            formatter.write_dl([(row.name, row.help) for row in commands().values()])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        with checked():
            self._main(args, extra)

    def _main(self, args: Sequence[str] | None, extra: dict[str, Any]) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        if any(word.endswith("-completion") for word in words):
            _in_our_order()
        from ckptsurgeon.cli.options import OPENED

        typed, opened = TYPED.set(Typed(tuple(words))), OPENED.set(None)
        try:
            status = super().main(words or ["--help"], prog_name="ckptsurgeon", **extra)
        except SurgeryError as error:
            sys.exit(_fail(error, words))
        except OSError as error:
            sys.exit(_fail(from_system(error), words))
        except Exception as error:
            # Click's own errors; their class is public neither in Click's nor in Typer's package.
            if not hasattr(error, "format_message"):
                raise
            from ckptsurgeon.cli.typed import follow_refused

            follow_refused(getattr(error, "ctx", None), words)
            sys.exit(_fail(from_click(error, words, commands()), words))
        finally:
            TYPED.reset(typed)
            OPENED.reset(opened)
        sys.exit(status if isinstance(status, int) else 0)


def _take_options_of(command: Any) -> None:
    """From here on no hint adds an option to the command that was typed which it has not, or one
    that stands there with another value."""

    def takes(option: str) -> bool:
        return any(option in (*item.opts, *item.secondary_opts) for item in command.params)

    def spellings(option: str) -> Collection[str]:
        items = [item for item in command.params if option in item.opts]
        return [name for item in items if not (item.multiple or item.is_flag) for name in item.opts]

    if command is not None:
        TYPED.set(replace(TYPED.get(), takes=takes, spellings=spellings))


app = typer.Typer(
    cls=Surgeon,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        print(f"ckptsurgeon {VERSION}   {_readers()}", flush=True)
        raise typer.Exit


def _readers() -> str:
    """Which readers of shards and event files this installation uses."""
    from ckptsurgeon.files.native import shards
    from ckptsurgeon.logs.tensorboard.event_file import native

    compiled = [
        name for name, it in (("shards", shards), ("event files", native)) if it is not None
    ]
    if len(compiled) == 2:
        return "compiled readers"
    return f"compiled reader of {compiled[0]} only" if compiled else "readers in Python: slower"


@app.callback(epilog=exit_codes((0, 1, 2, 3, 4, 5, 130)))
def ckptsurgeon(
    ctx: typer.Context,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "-C",
            metavar="DIR",
            envvar="CKPTSURGEON_RUN",
            help="The run to work on (same as -C on any command).",
        ),
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="What describes the files of the run."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hyperparameter surgery on sharded checkpoints.

    The value you set is the value the next step uses, and if anything goes wrong the run is exactly
    as it was."""
    given = {"run_dir": run_dir, "format_name": format_name}
    defaults = {name: value for name, value in given.items() if value is not None}
    if defaults:
        ctx.default_map = {name: dict(defaults) for name in commands()}


def main() -> None:
    """The console script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this, as a daemon may do
            from ckptsurgeon.cli.options import Nowhere

            setattr(sys, name, Nowhere())
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal gets ? for →, and no traceback
    app()


def _in_our_order() -> None:
    """Bash sorts what it is given as text, 100 before 50: the script that Typer writes for it says
    that it must not."""
    from typer import _completion_shared as shared

    scripts: dict[str, str] = getattr(shared, "_completion_scripts", {})
    if bash := scripts.get("bash"):
        scripts["bash"] = bash.replace(" -o default -F ", " -o default -o nosort -F ")


def _fail(error: SurgeryError, words: Sequence[str]) -> int:
    from ckptsurgeon import report
    from ckptsurgeon.cli.options import OPENED, Cancelled, Declined

    if "--json" in words:
        import json

        document = {"schema": report.SCHEMA, "run": OPENED.get(), **report.error_json(error)}
        print(json.dumps(document), file=sys.stderr)
    elif isinstance(error, Declined):
        print("declined: nothing was changed", file=sys.stderr)
    else:
        if isinstance(error, Cancelled) and sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal wrote ^C where the cursor stood
        print(report.error(error, report.Style.of(sys.stderr)), file=sys.stderr)
    return error.exit_code
