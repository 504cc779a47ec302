"""One-line commands: each is the recipe of one section that its flags stand for, no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptsurgeon.cli.options import LogOneLiner, OneLiner, saved_steps
from ckptsurgeon.cli.recipes import one_section
from ckptsurgeon.errors import UsageError

KeepTB = Annotated[
    str | None,
    typer.Option("--keep-tb", metavar="NAME", help="Name of the run that keeps the cut branch."),
]
Held = Annotated[
    int | None,
    typer.Option(
        "--rewarm", metavar="K", help="First K iterations that fill the moments, weights held."
    ),
]
Ramped = Annotated[
    int | None,
    typer.Option("--rewarm-ramp", metavar="K", help="Raise the rate from 0 over K iterations."),
]
NoKeepTB = Annotated[
    bool, typer.Option("--no-keep-tb", help="Do not keep the cut branch as a run of its own.")
]


def rollback(
    to: Annotated[
        int,
        typer.Option("--to", metavar="STEP", help="A saved step.", autocompletion=saved_steps),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As `ckptsurgeon set`; repeatable."),
    ] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option("--reset", metavar="STATE", help="moments or loss-scale; repeatable."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="A-B", help="Iterations to pass over; repeatable."),
    ] = None,
    hold: Held = None,
    ramp: Ramped = None,
    keep_tb: KeepTB = None,
    no_keep_tb: NoKeepTB = False,
    no_truncate: Annotated[
        bool, typer.Option("--no-truncate", help="Leave the event files alone.")
    ] = False,
    *,
    common: OneLiner,
) -> None:
    """Back to a saved step.

    Newer checkpoints go to the attic, the pointers name the step, event files are cut there."""
    data: dict[str, Any] = {"rollback": {"to": to}}
    if reset:
        data["reset"] = _states(reset)
    data.update(_rewarm(hold, ramp))
    if skip:
        data["skip"] = skip
    tensorboard = _kept(keep_tb, no_keep_tb)
    if no_truncate:
        tensorboard["truncate"] = False
    if tensorboard:
        data["tensorboard"] = tensorboard
    one_section(common, data, _settings(settings or ()))


def set_lr(
    lr: Annotated[
        str | None, typer.Argument(metavar="LR", help="The peak of the schedule, or 0.5x of it.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option("--scale", metavar="FACTOR", help="Multiply the peak instead.")
    ] = None,
    min_lr: Annotated[
        str | None, typer.Option("--min-lr", metavar="LR", help="Where the decay ends.")
    ] = None,
    warmup: Annotated[
        str | None, typer.Option("--warmup", metavar="SAMPLES", help="Length of the warm-up.")
    ] = None,
    decay: Annotated[
        str | None, typer.Option("--decay", metavar="SAMPLES", help="Length of the decay.")
    ] = None,
    decay_style: Annotated[
        str | None,
        typer.Option("--decay-style", metavar="STYLE", help="constant, linear or cosine."),
    ] = None,
    *,
    common: OneLiner,
) -> None:
    """Change the learning-rate schedule."""
    if lr is not None and scale is not None:
        raise UsageError("both LR and --scale were given", next="ckptsurgeon set-lr --scale 0.5")
    wanted = {
        "lr": f"{scale}x" if scale is not None else lr,
        "min_lr": min_lr,
        "warmup": warmup,
        "decay": decay,
        "decay_style": decay_style,
    }
    given = [f"set.{key}={value}" for key, value in wanted.items() if value is not None]
    if not given:
        raise UsageError("no learning rate was given", next="ckptsurgeon set-lr 3e-5")
    one_section(common, {}, given)


def set_values(
    settings: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE", help="For example: beta2=0.95 eps=1e-8"),
    ],
    *,
    common: OneLiner,
) -> None:
    """Change hyperparameters in every place that keeps them.

    KEY is lr min_lr warmup decay decay_style beta1 beta2 eps weight_decay clip_grad seed
    loss_scale, or a counter: consumed_samples tokens iteration position. A VALUE such as 0.5x
    scales the present one."""
    one_section(common, {}, _settings(settings))


def reset(
    states: Annotated[
        list[str], typer.Argument(metavar="moments|loss-scale", help="What starts anew.")
    ],
    only: Annotated[
        str | None, typer.Option("--only", metavar="exp_avg", help="This moment alone.")
    ] = None,
    params: Annotated[
        str | None,
        typer.Option("--params", metavar="REGEX", help="Of parameters whose names match alone."),
    ] = None,
    hold: Held = None,
    ramp: Ramped = None,
    *,
    common: OneLiner,
) -> None:
    """Start the Adam moments or the loss scale anew.

    Moments are exp_avg, exp_avg_sq and step together; fp32 masters and the schedule stay. With
    --only or --params the step stays, which the plan says the price of."""
    data: dict[str, Any] = {"reset": _states(states)}
    part = {key: value for key, value in (("only", only), ("params", params)) if value is not None}
    data.update(_rewarm(hold, ramp))
    one_section(common, {**data, "moments": part} if part else data)


def skip(
    ranges: Annotated[
        list[str] | None,
        typer.Argument(metavar="A-B", help="Iterations, from 1, both ends included."),
    ] = None,
    by_counters: Annotated[
        bool,
        typer.Option("--by-counters", help="Advance the consumed samples past them instead."),
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Forget the ranges that are set.")] = False,
    *,
    common: OneLiner,
) -> None:
    """Pass over the data of some iterations.

    They count, and so do their samples, but nothing is trained and the schedule waits. With
    --by-counters, for trainers whose own flag does not do that, the data position moves on by what
    they would have consumed, and the numbers of the iterations do not."""
    if not ranges and not clear:
        raise UsageError("no range was given", next="ckptsurgeon skip 6900-7010")
    data: dict[str, Any] = {"skip": ranges} if ranges else {}
    if by_counters:
        data["skip_by_counters"] = True
    one_section(common, {**data, "clear_skip": True} if clear else data)


def swap_optimizer(
    to: Annotated[str, typer.Argument(metavar="adamw|sgdw", help="The optimizer to go on with.")],
    momentum: Annotated[
        str | None, typer.Option("--momentum", metavar="M", help="Of SGDW [0.9].")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="SGDW's buffer begins as Adam's exp_avg.")
    ] = False,
    *,
    common: OneLiner,
) -> None:
    """Go on with another optimizer.

    Groups, state, and the run's train.yaml are rewritten. To SGDW the moments go (or exp_avg
    becomes the momentum); to AdamW the momentum goes, and Adam starts at step 0."""
    data: dict[str, Any] = {"swap_optimizer": {"to": to, **({"keep": True} if keep else {})}}
    given = [] if momentum is None else [f"swap_optimizer.momentum={momentum}"]
    one_section(common, data, given)


def sync_replicas(
    params: Annotated[
        str | None,
        typer.Option("--params", metavar="REGEX", help="Of parameters whose names match alone."),
    ] = None,
    *,
    common: OneLiner,
) -> None:
    """Average what tensor-parallel ranks keep each.

    Layer norms and other parameters that are whole on every rank: weights, fp32 masters and
    moments, where they drifted apart."""
    one_section(common, {"sync_replicas": {} if params is None else {"params": params}})


def repair_latest(
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            metavar="STEP",
            help="A saved step [the newest complete one].",
            autocompletion=saved_steps,
        ),
    ] = None,
    *,
    common: OneLiner,
) -> None:
    """Point the pointers at a checkpoint that loads."""
    one_section(common, {"repair_latest": {} if to is None else {"to": to}})


def truncate_tb_events(
    after: Annotated[
        int, typer.Option("--after", metavar="STEP", help="The last iteration that stays.")
    ],
    keep_tb: KeepTB = None,
    no_keep_tb: NoKeepTB = False,
    branch: Annotated[
        list[str] | None,
        typer.Option("--branch", metavar="FILE", help="An event file of the branch that is meant."),
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option("--axis", metavar="TAG=AXIS", help="iteration, samples, tokens or gigaflos."),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", metavar="BY", help="Order files by wall, mtime or name."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", help="Samples consumed at STEP, if nothing says."),
    ] = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Drop damaged records instead of refusing.")
    ] = False,
    *,
    common: LogOneLiner,
) -> None:
    """Cut TensorBoard events after an iteration.

    Tags on other axes (samples, tokens, gigaflos) are cut at the same moment of training. Works on
    a bare log directory too: --tb DIR."""
    section: dict[str, Any] = {"after": after, **_kept(keep_tb, no_keep_tb)}
    if branch:
        section["branch"] = branch
    if axis:
        section["axes"] = dict(_pair(text) for text in axis)
    if order is not None:
        section["order"] = order
    if samples is not None:
        section["samples"] = samples
    if salvage:
        section["salvage"] = True
    one_section(common, {"tensorboard": section})


def rename_tb_events(
    tags: Annotated[
        list[str] | None,
        typer.Argument(metavar="OLD NEW …", help="Pairs of a tag and its new name."),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="YAML: old tag: new tag, or a recipe with them.",
        ),
    ] = None,
    regex: Annotated[bool, typer.Option("--regex", help="OLD is a regular expression.")] = False,
    allow_merge: Annotated[
        bool, typer.Option("--allow-merge", help="NEW may be a tag that exists.")
    ] = False,
    *,
    common: LogOneLiner,
) -> None:
    """Rename TensorBoard tags.

    All pairs take one pass over each file. Works on a bare log directory too: --tb DIR."""
    from ckptsurgeon.recipe import file

    if mapping is not None and not tags:
        section = file.settings(mapping)
        if "tensorboard" in section:
            section = file.load(mapping).tensorboard.rename
        pairs = dict(section)
    elif mapping is None and tags and len(tags) % 2 == 0:
        pairs = dict(zip(tags[::2], tags[1::2], strict=True))
    else:
        raise UsageError(
            "the tags to rename are OLD NEW or --map FILE, one of the two",
            next="ckptsurgeon rename-tb-events 'lm loss' 'lm-loss-training/lm loss'",
        )
    section = {"rename": pairs, "regex": regex, "allow_merge": allow_merge}
    one_section(common, {"tensorboard": section})


def _settings(pairs: Sequence[str]) -> list[str]:
    return [pair if pair.startswith("set.") else f"set.{pair}" for pair in pairs]


def _pair(text: str) -> tuple[str, str]:
    tag, equals, axis = text.rpartition("=")
    if not equals:
        raise UsageError(f"--axis {text!r} is not TAG=AXIS", next="--axis 'my loss=samples'")
    return tag, axis


def _states(names: Sequence[str]) -> list[str]:
    return [name.replace("-", "_") for name in names]


def _rewarm(hold: int | None, ramp: int | None) -> dict[str, Any]:
    if hold is not None and ramp is not None:
        raise UsageError("--rewarm and --rewarm-ramp exclude each other", next="give one of them")
    if ramp is not None:
        return {"rewarm": {"iterations": ramp, "kind": "ramp"}}
    return {} if hold is None else {"rewarm": {"iterations": hold}}


def _kept(name: str | None, nothing: bool) -> dict[str, Any]:
    if name is not None and nothing:
        raise UsageError("--keep-tb and --no-keep-tb exclude each other", next="give one of them")
    if nothing:
        return {"keep": False}
    return {} if name is None else {"keep_as": name}
