"""advise: what the logs say of the run, and what to do about it. It writes at most a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import disk
from ckptsurgeon.cli.options import Common
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.look.advise.rules import RULES

if TYPE_CHECKING:
    from ckptsurgeon.logs.curves import Curves
    from ckptsurgeon.look.advise.remedies import Remedy
    from ckptsurgeon.report.advice import Proposal
    from ckptsurgeon.run.run import Run


def advise(
    tb: Annotated[
        list[Path] | None,
        typer.Option("--tb", metavar="DIR", help="Logs to read instead, at any depth; repeatable."),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="A file to read instead: CSV, JSON lines, trainer_state.json, printed lines.",
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option("--rule", metavar="NAME", help=f"Judge by one rule: {' '.join(RULES)}."),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(
            "--tag",
            metavar="SIGNAL=NAME",
            help="What loss, grad-norm, loss-scale, lr are called in the logs; repeatable.",
        ),
    ] = None,
    level: Annotated[
        int,
        typer.Option(
            "--level", metavar="0..4", min=0, max=4, help="How far saved steps are verified."
        ),
    ] = 2,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the first recipe there."),
    ] = None,
    branch: Annotated[
        list[str] | None,
        typer.Option("--branch", metavar="FILE", help="An event file of the newest branch."),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", metavar="BY", help="Order files by wall, mtime or name."),
    ] = None,
    *,
    common: Common,
) -> None:
    """Say if the loss diverged, which signal moved first, where to go back to, what others did.

    It judges by published rules, which its answer names (docs/advise.md), and changes nothing: its
    recipe is for `plan` and `apply`. Without a run it reads bare logs: --tb DIR or --log FILE.

    Examples:
    ckptsurgeon advise
    ckptsurgeon advise --tb tensorboard --json
    """
    from ckptsurgeon.look.advise import advise as judge
    from ckptsurgeon.report.advice import advice, advice_json, recipe_file

    if rule is not None and rule not in RULES:
        raise UsageError(f"--rule {rule!r} is not known", next=f"one of {' '.join(RULES)}")
    run = _run(common, bare=bool(tb or log))
    curves = read(run, tb or (), log, _tags(tag or ()), branch or (), order)
    told = judge(curves, run, rule=rule, level=level)
    proposals = [proposal(run, item) for item in told.remedies] if run is not None else []
    if output is not None and not common.dry_run:
        chosen = next((item for item in proposals if item.recipe is not None), None)
        if chosen is None:
            raise SurgeryError(
                f"nothing is proposed, so {output} is not written: {told.verdict}",
                untouched="nothing was written",
                next="ckptsurgeon advise    what the logs say",
            )
        _keep(output, recipe_file(chosen, told))
    name = run.name if run is not None else ", ".join(path.name for path in curves.sources)
    common.answer(
        lambda: common.here(advice(told, proposals, name, common.style)),
        lambda: advice_json(told, proposals, None if run is None else str(run.root)),
    )


def _run(common: Common, *, bare: bool) -> Run | None:
    """The run, without which bare logs can be judged too."""
    try:
        run = common.open_run()
    except UsageError:
        if bare and common.run_dir is None:
            return None
        raise
    return run


def read(
    run: Run | None,
    folders: Sequence[Path],
    log: Path | None,
    tags: Mapping[str, str],
    branch: Sequence[str] = (),
    order: str | None = None,
) -> Curves:
    """The curves in what the options name, else in the run's own logs."""
    from ckptsurgeon.logs import curves, rows
    from ckptsurgeon.logs.tensorboard import event_file
    from ckptsurgeon.look.logged import own

    if log is not None:
        return rows.of_file(log, tags)
    if not folders:
        assert run is not None
        return own(run, tags, branch=branch, order=order)
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is not a directory", next="--tb DIR, with event files in it"
            )
        below = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
        found += [here for here in below if event_file.files(here)]
    if not found:
        raise UsageError(
            f"no event file in {', '.join(map(str, folders))}, nor below",
            next="--tb DIR, with *tfevents* files in it",
        )
    return curves.of_folders(found, tags, branch=branch, order=order)


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


def proposal(run: Run, remedy: Remedy) -> Proposal:
    """The first form of a remedy that `plan` accepts."""
    from ckptsurgeon import surgery
    from ckptsurgeon.recipe.file import from_data
    from ckptsurgeon.report.advice import Proposal

    refused = ""
    for data in (remedy.recipe, *remedy.others):
        try:
            surgery.plan(run, from_data(data))
        except SurgeryError as error:
            refused = refused or error.what
        else:
            return Proposal(remedy, data)
    return Proposal(remedy, None, refused)


def _keep(path: Path, text: str) -> None:
    try:
        disk.write_new(path.parent.resolve() / path.name, text.encode())
    except FileExistsError:
        raise UsageError(f"{path} already exists", next="choose another name") from None
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", next="choose a FILE in an existing folder"
        ) from None
