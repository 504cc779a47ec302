"""The command line: one table of commands, and every error in three lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ckptsurgeon import report
from ckptsurgeon.cli import attic, copies, look, one_liners, recipes, run
from ckptsurgeon.cli.options import EDITS, LOOKS, Nowhere, command, exit_codes
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.version import VERSION

COMMANDS: tuple[tuple[str, Any, str], ...] = (
    ("status", look.status, exit_codes(LOOKS)),
    ("show", look.show, exit_codes(LOOKS)),
    ("log", look.log, exit_codes(LOOKS)),
    ("verify", look.verify, exit_codes((*LOOKS, 4))),
    ("doctor", look.doctor, exit_codes((*LOOKS, 4))),
    ("plan", recipes.plan, exit_codes((*LOOKS, 3, 5))),
    ("apply", recipes.apply, exit_codes(EDITS)),
    ("undo", recipes.undo, exit_codes(EDITS)),
    ("recover", recipes.recover, exit_codes(EDITS)),
    ("rollback", one_liners.rollback, exit_codes(EDITS)),
    ("set-lr", one_liners.set_lr, exit_codes(EDITS)),
    ("set", one_liners.set_values, exit_codes(EDITS)),
    ("reset", one_liners.reset, exit_codes(EDITS)),
    ("skip", one_liners.skip, exit_codes(EDITS)),
    ("swap-optimizer", one_liners.swap_optimizer, exit_codes(EDITS)),
    ("sync-replicas", one_liners.sync_replicas, exit_codes(EDITS)),
    ("repair-latest", one_liners.repair_latest, exit_codes(EDITS)),
    ("truncate-tb-events", one_liners.truncate_tb_events, exit_codes(EDITS)),
    ("rename-tb-events", one_liners.rename_tb_events, exit_codes(EDITS)),
    ("relaunch", run.relaunch, exit_codes((*LOOKS, 4, 5, 130), "else the status of the trainer")),
    ("fork", copies.fork, exit_codes((0, 1, 2, 4, 5, 130))),
    ("export", copies.export, exit_codes((0, 1, 2, 5, 130))),
    ("compact", attic.compact, exit_codes(EDITS)),
    ("shrink", attic.shrink, exit_codes(EDITS)),
    ("prune", attic.prune, exit_codes((0, 1, 2, 5, 130))),
    ("unlock", attic.unlock, exit_codes((0, 1, 2, 130))),
)
"""Name, function and exit codes, in the order in which --help lists them."""


class Surgeon(TyperGroup):
    """The group of all commands: what a command raises leaves as three lines and an exit code."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            status = super().main(words or ["--help"], prog_name="ckptsurgeon", **extra)
        except SurgeryError as error:
            sys.exit(_fail(error, words))
        except Exception as error:
            # Click's own errors; their class is public neither in Click's nor in Typer's package.
            if not hasattr(error, "format_message"):
                raise
            sys.exit(_fail(_from_click(error), words))
        sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(
    cls=Surgeon,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function, _epilog in COMMANDS:
    app.command(_name, epilog=_epilog)(command(_function))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ckptsurgeon {VERSION}")
        raise typer.Exit


@app.callback(epilog=exit_codes((0, 1, 2, 3, 4, 5, 130)))
def ckptsurgeon(
    ctx: typer.Context,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run", "-C", metavar="DIR", envvar="CKPTSURGEON_RUN", help="As -C of every command."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hyperparameter surgery on sharded checkpoints.

    The value you set is the value the next step uses, and if anything goes wrong the run is exactly
    as it was."""
    ctx.default_map = {name: {"run_dir": run_dir} for name, *_ in COMMANDS if run_dir is not None}


def main() -> None:
    """The console script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this, as a daemon may do
            setattr(sys, name, Nowhere())
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal gets ? for →, and no traceback
    app()


def _fail(error: SurgeryError, words: Sequence[str]) -> int:
    if "--json" in words:
        print(json.dumps(report.error_json(error)), file=sys.stderr)
    else:
        print(report.error(error, report.Style.of(sys.stderr)), file=sys.stderr)
    return error.exit_code


def _from_click(error: Any) -> SurgeryError:
    what = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ckptsurgeon"
    return UsageError(what[:1].lower() + what[1:], next=f"{path} --help")
