"""The options that every command accepts, in bundles."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptsurgeon.cli.usage import PAIR, loose_pairs
from ckptsurgeon.errors import SurgeryError, Unwritten
from ckptsurgeon.hints import TYPED, again
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.remote import reads
from ckptsurgeon.remote.address import Address
from ckptsurgeon.report.style import Style

if TYPE_CHECKING:
    from ckptsurgeon.run.run import Run

Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        metavar="N",
        min=1,
        help="Files worked on at once [8; 32 on a network's file system].",
    ),
]
AllowGlobal = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-global",
        metavar="NAME",
        help="Accept this global (module.name) in shards; repeatable.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every change, and each file.")]


NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
OPENED: ContextVar[str | None] = ContextVar("OPENED", default=None)
"""The path of the run that this command has opened."""


class Nowhere(io.TextIOBase):
    """Stands for a stdout or stderr that is closed: takes every text, keeps none."""

    def write(self, text: str) -> int:
        """As if it was written."""
        return len(text)


@contextmanager
def shown_first() -> Iterator[None]:
    """What is about to be done is shown inside. Raises SurgeryError where nobody can see it: of a
    reader that has gone Click would end in silence."""
    try:
        yield
    except (BrokenPipeError, Unwritten) as error:
        why = error.why if isinstance(error, Unwritten) else error.strerror
        raise SurgeryError(
            f"what would be done can't be shown: {why}",
            next=again("--quiet", why="shows errors only"),
        ) from None


class Cancelled(SurgeryError):
    """Ctrl-C while nothing was committed."""

    exit_code = 130


class Declined(SurgeryError):
    """The answer to the question of a command was not yes."""


@frozen
class Common:
    """What every command accepts."""

    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "-C",
            metavar="DIR",
            help="The run's folder, or one inside it, or s3://BUCKET/PREFIX [here].",
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would happen and stop.")
    ] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document (docs/json.md).")] = (
        False
    )
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help="What describes the files (docs/described.md)."
        ),
    ] = None
    optimizer: Annotated[
        Path | None,
        typer.Option(
            "--optimizer",
            metavar="FILE",
            help="A page on the optimizer (docs/optimizers.md).",
        ),
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False

    def open_run(self) -> Run:
        """The run that -C, or the working directory, lies in."""
        from ckptsurgeon.run.run import Run

        run = Run.open(self.run_dir or Path(), self.format_name or "", self.optimizer or "")
        reads.have_listed(run.logs.roots())
        OPENED.set(str(run.root))
        return run

    def step(self, text: str | None) -> int | None:
        """The step that was typed: a number, or the name of a folder of the run, or `latest`."""
        if text is None or NUMBER.fullmatch(text):
            return None if text is None else int(text)
        if PAIR.fullmatch(text) and (error := loose_pairs(TYPED.get().words)):
            raise error
        return self.open_run().step(text)

    @property
    def style(self) -> Style:
        """What an answer may look like."""
        return Style.of(sys.stdout)

    @property
    def where(self) -> Path | Address | None:
        """What -C must name so that a command of the same run can be typed here, if anything. A
        step's folder may have left the run since it was named, or since somebody stands in it."""
        from ckptsurgeon.run.moved import nearest

        if address := Address.of(self.run_dir):
            return address
        there = nearest(self.run_dir or Path())
        stands = there == Path() or there.resolve() == Path().resolve()
        return None if stands else there

    def answer(self, text: Callable[[], str], document: Callable[[], Mapping[str, Any]]) -> None:
        """Make and print the text, or with --json the document; with -q no text. Raises Unwritten
        or BrokenPipeError when it does not reach stdout: a plan that nobody can see is not applied.
        """
        if self.quiet and not self.as_json:
            return
        shown = self._in_json(document()) if self.as_json else text()
        reads.check()
        print(shown, flush=True)

    def _in_json(self, document: Mapping[str, Any]) -> str:
        """With the run that it is of; what has no schema, as a recipe, is no document."""
        if "schema" in document:
            document = {"schema": document["schema"], "run": OPENED.get(), **document}
        return json.dumps(document, ensure_ascii=False)

    def report(
        self,
        text: Callable[[], str],
        document: Callable[[], Mapping[str, Any]],
        wrote: Path | None = None,
    ) -> None:
        """As `answer`, of what is done: a reader that has gone and a full disk do not undo it, so
        stderr is told, of a file that it `wrote` only this, and the exit code is that of the act.
        """
        try:
            self.answer(text, document)
        except (BrokenPipeError, Unwritten):
            print(text() if wrote is None else f"wrote {wrote}", file=sys.stderr)


@frozen
class Editing(Common):
    """What every command that edits accepts."""

    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The reason, which `log` shows.")
    ] = None
    relaunch: Annotated[
        bool,
        typer.Option("--relaunch", help="Start the trainer afterwards and check its first line."),
    ] = False
    verbose: Verbose = False
    jobs: Jobs = None
    allow_global: AllowGlobal = None
    no_tb_note: Annotated[
        bool,
        typer.Option("--no-tb-note", help="Do not write a note about the surgery into the logs."),
    ] = False


@frozen
class OneLiner(Editing):
    """What every command that is a recipe of one section accepts."""

    print_recipe: Annotated[
        bool, typer.Option("--print-recipe", help="Print the same request as YAML and stop.")
    ] = False


@frozen
class MapOneLiner(OneLiner):
    """What a command accepts that fills the parameters of a step from those of another run."""

    print_map: Annotated[
        bool,
        typer.Option(
            "--print-map", help="Print which parameter would be filled from which and stop."
        ),
    ] = False


@frozen
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
    def where(self) -> Path | Address | None:
        """The first log folder has the receipts."""
        return self.tb[0] if self.tb else super().where
