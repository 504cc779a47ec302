"""advise: what the logs say of the run, and what to do about it. It writes at most a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import disk
from ckptsurgeon.cli import new_file
from ckptsurgeon.cli.options import Common
from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.look.advise.rules import RULES
from ckptsurgeon.operations.events import ORDERS
from ckptsurgeon.operations.key import unknown_value

if TYPE_CHECKING:
    from ckptsurgeon.logs.curves import Curves
    from ckptsurgeon.report.advice import Proposal
    from ckptsurgeon.run.run import Run


def _rules() -> list[str]:
    return [*RULES]


def _orders() -> list[str]:
    return [*ORDERS]


@dataclass(frozen=True)
class RunOrLogs:
    """What a command accepts that reads the curves of a run, or of logs alone."""

    tb: Annotated[
        list[Path] | None,
        typer.Option("--tb", metavar="DIR", help="Logs to read instead, at any depth; repeatable."),
    ] = None
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="A file to read instead: CSV, JSON lines, trainer_state.json, printed lines.",
        ),
    ] = None
    rule: Annotated[
        str | None,
        typer.Option(
            "--rule",
            metavar="NAME",
            help=f"Judge by one rule: {' '.join(RULES)}.",
            autocompletion=_rules,
        ),
    ] = None
    tag: Annotated[
        list[str] | None,
        typer.Option(
            "--tag",
            metavar="SIGNAL=NAME",
            help="The name of loss, grad-norm, loss-scale or lr in the logs; repeatable.",
        ),
    ] = None
    step: Annotated[
        str | None,
        typer.Option(
            "--step", metavar="NAME", help="The column that counts updates in --log FILE."
        ),
    ] = None
    branch: Annotated[
        list[str] | None,
        typer.Option("--branch", metavar="FILE", help="An event file of the newest branch."),
    ] = None
    order: Annotated[
        str | None,
        typer.Option(
            "--order",
            metavar="BY",
            help="Order files by wall, mtime or name.",
            autocompletion=_orders,
        ),
    ] = None

    def run(self, common: Common) -> Run | None:
        """The run, without which bare logs can be read too."""
        if self.rule is not None and self.rule not in RULES:
            raise UsageError(f"--rule {self.rule!r} is not known", next=f"one of {' '.join(RULES)}")
        if self.order is not None and self.order not in ORDERS:
            raise unknown_value(self.order, ORDERS, "--order")
        try:
            return common.open_run()
        except UsageError:
            if (self.tb or self.log) and common.run_dir is None:
                return None
            raise

    def read(self, run: Run | None) -> Curves:
        """The curves in what the options name, else in the run's own logs."""
        from ckptsurgeon.logs import curves, rows
        from ckptsurgeon.logs.tensorboard import event_file
        from ckptsurgeon.look.logged import own

        tags, branch = _tags(self.tag or ()), self.branch or ()
        if self.log is not None:
            return rows.of_file(self.log, tags, self.step)
        if not self.tb:
            assert run is not None
            read = own(run, tags, branch=branch, order=self.order)
            return replace(read, notes=(*read.notes, *_unlogged(run, read)))
        found: list[Path] = []
        for folder in self.tb:
            if not disk.is_folder(folder):
                raise UsageError(
                    f"{folder} is not a directory", next="--tb DIR, with event files in it"
                )
            below = [folder, *sorted(filter(disk.is_folder, disk.below(folder, past_closed=True)))]
            found += [here for here in below if event_file.files(here)]
        if not found:
            raise UsageError(
                f"no event file in {', '.join(map(str, self.tb))}, nor below",
                next="--tb DIR, with *tfevents* files in it",
            )
        return curves.of_folders(found, tags, branch=branch, order=self.order)


def advise(
    level: Annotated[
        int,
        typer.Option(
            "--level", metavar="0..4", min=0, max=4, help="How far saved steps are verified."
        ),
    ] = 2,
    recipe: Annotated[
        int | None,
        typer.Option("--recipe", metavar="N", min=1, help="Take recipe N, not the first."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the recipe there and show its plan."
        ),
    ] = None,
    *,
    logs: RunOrLogs,
    common: Common,
) -> None:
    """Say if the loss diverged, where to go back to, and what others did.

    It names the first signal that moved and the rule that says so (docs/advise.md), and changes
    nothing: its recipe is for `plan` and `apply`. Without a run it reads bare logs: --tb DIR or
    --log FILE. It exits 3 when the loss diverged.

    Examples:
    ckptsurgeon advise
    ckptsurgeon advise -o recipe.yaml --recipe 2
    ckptsurgeon advise --tb tensorboard --json
    """
    from ckptsurgeon.guard.proposal import proposal
    from ckptsurgeon.look.advise import DIVERGED
    from ckptsurgeon.look.advise import advise as judge
    from ckptsurgeon.report.advice import advice, advice_json, recipe_file

    run = logs.run(common)
    diagnosis = judge(logs.read(run), run, rule=logs.rule, level=level)
    proposals = [proposal(run, item) for item in diagnosis.remedies] if run is not None else []
    chosen = _chosen(proposals, recipe)
    written = output is not None and not common.dry_run
    if output is not None and written:
        if chosen is None:
            raise SurgeryError(
                f"nothing is proposed, so {output} is not written: {diagnosis.verdict}",
                untouched="nothing was written",
                next=command("advise", why="what the logs say"),
            )
        new_file.write(output, recipe_file(chosen, diagnosis).encode())
    name = (
        run.name if run is not None else ", ".join(path.name for path in diagnosis.curves.sources)
    )
    next: Hint | None = None
    if chosen is not None and not written:
        next = plan_of("recipe.yaml" if output is None else output, recipe)
    tell = partial(common.report, wrote=output) if written else common.answer
    tell(
        lambda: advice(diagnosis, proposals, name, common.style, chosen, next),
        lambda: advice_json(diagnosis, proposals, None if run is None else str(run.root)),
    )
    if run is not None and written and not common.as_json:
        _show(run, chosen, output, common)
    if diagnosis.verdict == DIVERGED:
        raise typer.Exit(3)


def plan_of(output: Path | str, number: int | None = None) -> Hint:
    """The command that writes the recipe of this number, or the first one, and shows its plan, by
    the logs that were typed."""
    words = ("advise", "-o", output, *(() if number is None else ("--recipe", number)))
    return command(*words, why="writes this recipe and shows its plan", real=True)


def _chosen(proposals: Sequence[Proposal], number: int | None) -> Proposal | None:
    """The recipe of that number, or the first that `plan` accepts."""
    if number is None or not proposals:
        from ckptsurgeon.guard.proposal import first

        return first(proposals)
    if number > len(proposals):
        raise UsageError(
            f"--recipe {number}: {count(len(proposals), 'recipe is', 'recipes are')} proposed",
            next=command("advise", why="lists them"),
        )
    if (chosen := proposals[number - 1]).recipe is None:
        raise SurgeryError(
            f"--recipe {number}: {chosen.refused}",
            untouched="nothing was written",
            next=command("advise", why="lists those that this run can take"),
        )
    return chosen


def _show(run: Run, chosen: Proposal | None, file: Path | None, common: Common) -> None:
    """The plan of the recipe that was written, and the command that applies it."""
    from ckptsurgeon import surgery
    from ckptsurgeon.cli.carry_out import show
    from ckptsurgeon.recipe.file import from_data

    assert chosen is not None and chosen.recipe is not None
    if not common.quiet:
        print()
    show(
        run, surgery.plan(run, from_data(chosen.recipe)), common, command("apply", file), wrote=file
    )


def _unlogged(run: Run, read: Curves) -> list[str]:
    """What was trained and saved, and is in no log."""
    from ckptsurgeon.look import log_end

    try:
        step = run.latest()
    except SurgeryError:
        return []
    found = log_end.early(run, step, read.kept)
    return [f"{finding.what}: what follows is not judged" for finding in found]


def _tags(pairs: Sequence[str]) -> dict[str, str]:
    from ckptsurgeon.logs.signals import NAMES

    named = {}
    for pair in pairs:
        signal, equals, name = pair.partition("=")
        if not equals or signal not in NAMES:
            raise UsageError(
                f"--tag {pair!r} is not SIGNAL=NAME", next=f"SIGNAL is one of {' '.join(NAMES)}"
            )
        named[signal] = name
    return named
