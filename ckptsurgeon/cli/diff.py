"""diff: how two steps, two runs, or a run before and after a surgery differ."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.on import Cluster
from ckptsurgeon.cli.options import Common, Jobs
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import Again, Hint, again, command
from ckptsurgeon.operations.completion import saved_steps

if TYPE_CHECKING:
    from ckptsurgeon.run.run import Run

DIFFERENT = 3
"""The exit code, as of `plan --exit-code`."""


def _refuse_absent(run: Run | None, *texts: str) -> None:
    """Raise where neither step is saved: the same command with one step that is saved would be
    refused for the other."""
    if run is None or not all(text.isdecimal() and len(text) <= 18 for text in texts):
        return
    steps = run.steps()
    if not any(int(text) in steps for text in texts):
        raise UsageError(
            f"steps {' and '.join(texts)} are not saved in {run.root}",
            next=command("status", why="list all steps"),
        )


def _meant(common: Common, word: str) -> Hint:
    """What may be meant by one word alone: a surgery, or a step and its newest other one."""
    run = _here(common)
    if run is not None and any(receipt.id == word for receipt in run.receipts()):
        return command("diff", "--receipt", word)
    steps = [] if run is None else run.steps()
    if len(steps) > 1 and word in ("latest", str(steps[-1])):
        return command("diff", steps[-2], word)
    return command("diff", word, "latest")


def _same(hint: Hint, a: str, b: str) -> bool:
    """Whether a step would be compared with itself."""
    return isinstance(hint, Again) and hint.swapped in ((a, b), (b, a))


def _here(common: Common) -> Run | None:
    """The run that a step alone is of; two runs can be compared from anywhere."""
    try:
        return common.open_run()
    except UsageError:
        if common.run_dir is not None:
            raise
        return None


def diff(
    a: Annotated[
        str | None,
        typer.Argument(
            metavar="A",
            help="STEP, RUN:STEP or RUN.",
            autocompletion=saved_steps,
            show_default=False,
        ),
    ] = None,
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="The same, to compare with.", autocompletion=saved_steps),
    ] = None,
    receipt: Annotated[
        str | None,
        typer.Option("--receipt", metavar="ID", help="Before and after this surgery."),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Compare every element of every tensor too.")
    ] = False,
    jobs: Jobs = None,
    *,
    common: Common,
    cluster: Cluster,
) -> None:
    """Compare two steps or two runs, or a run before and after a surgery.

    Without --tensors it reads no tensor: hyperparameters, schedule, counters, pointers, arguments.
    Steps that are cut into shards in different ways are compared by what they mean, and with
    --tensors by their joined weights. It exits 3 when there is a difference.

    Examples:
    ckptsurgeon diff 6 8
    ckptsurgeon diff 6 latest --tensors
    ckptsurgeon diff --receipt 0001
    """
    from ckptsurgeon.look.diff.diff import diff as compare
    from ckptsurgeon.look.diff.sides import Side
    from ckptsurgeon.look.diff.surgery import of_receipt

    if (receipt is None) == (a is None) or (a is None) != (b is None):
        raise UsageError(
            "diff takes two steps or runs, or one receipt",
            next=(
                command("diff", "A", "B") if a is None or b else _meant(common, a),
                command("diff", "--receipt", "ID"),
            ),
        )
    if cluster.shared and not tensors:
        raise UsageError(f"{cluster.shared} belongs to --tensors", next=again("--tensors"))
    quiet = common.quiet or common.as_json or not tensors
    with report.Progress(sys.stderr, quiet=quiet) as progress:
        if receipt is not None:
            run = common.open_run()
            with cluster.workers(jobs, [run.root], progress) as readers:
                found = of_receipt(run, receipt, tensors=tensors, jobs=readers, progress=progress)
        else:
            assert a is not None and b is not None
            here = _here(common)
            _refuse_absent(here, a, b)
            try:
                sides = Side.parse(a, here), Side.parse(b, here)
            except UsageError as error:  # neither side is offered the other's step
                error.hints = tuple(hint for hint in error.hints if not _same(hint, a, b))
                raise
            roots = [side.run.root for side in sides]
            with cluster.workers(jobs, roots, progress) as readers:
                found = compare(*sides, tensors=tensors, jobs=readers, progress=progress)
    common.answer(lambda: report.diff(found, common.style), lambda: report.diff_json(found))
    if not found.same:
        raise typer.Exit(DIFFERENT)
