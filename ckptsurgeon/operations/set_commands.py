"""`set` and `set-lr`: the hyperparameters of all parameters, of some, or of a new schedule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated

import typer

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.plain_yaml import lay, scalar
from ckptsurgeon.hints import TYPED, Hint, command, shell
from ckptsurgeon.operations import fields
from ckptsurgeon.operations.completion import run_of
from ckptsurgeon.operations.group_settings import GroupSettings
from ckptsurgeon.operations.hyperparameters import Hyperparameters
from ckptsurgeon.operations.rewarm_schedule import RewarmSchedule
from ckptsurgeon.operations.section import Recipe

JOINED = re.compile(r"\w+=[^,=]*(,\w+=[^,=]*)+")
"""Pairs that are joined by commas: no value of a key has an equals sign."""
NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
BETAS = re.compile(
    r"(?:set\.)?(?:adam_?)?betas\s*[=:]?\s*[\[({]?\s*"
    rf"{NUMBER}\s*[,;:/\s]\s*{NUMBER}\s*,?\s*[\])}}]?"
)
"""Two numbers under one name, as torch has them."""


def of_pairs(pairs: Sequence[str]) -> Hyperparameters:
    """The section that `lr=3e-5 beta2=0.95` stands for."""
    _refuse_betas(pairs)
    if len(pairs) == 2 and not any("=" in pair for pair in pairs):
        key, value = pairs[0].rstrip(":"), pairs[1]
        raise UsageError(
            f"{pairs[0]!r} is not KEY=VALUE", next=_instead(pairs, pairs, [f"{key}={value}"])
        )
    bare = next((pair for pair in pairs if not pair.partition("=")[0] or "=" not in pair), None)
    if bare is not None:
        raise UsageError(f"{bare!r} is not KEY=VALUE", next="for example: lr=3e-5")
    joined = next((pair for pair in pairs if JOINED.fullmatch(pair)), None)
    if joined is not None:
        apart = _instead(pairs, [joined], joined.split(","))
        raise UsageError(f"{joined!r} is several KEY=VALUE", next=apart)
    data = lay({}, [pair if pair.startswith("set.") else f"set.{pair}" for pair in pairs])
    return Hyperparameters.build(data.get("set", {}))


def _refuse_betas(pairs: Sequence[str]) -> None:
    """Raise UsageError for two numbers that are called `betas`, in one word or in several."""
    starts = [at for at, pair in enumerate(pairs) if "betas" in pair]
    for start, stop in ((at, end) for at in starts for end in range(len(pairs), at, -1)):
        words = pairs[start:stop]
        if match := BETAS.fullmatch(" ".join(words)):
            raise UsageError(
                f"unknown key `betas`: its two numbers are `beta1` and `beta2` ({' '.join(words)})",
                next=_instead(pairs, words, [f"beta1={match[1]}", f"beta2={match[2]}"]),
            )


def _instead(pairs: Sequence[str], words: Sequence[str], apart: Sequence[str]) -> Hint:
    """The command that was typed, with the pairs `apart` in place of these `words` of `pairs`."""
    typed = [*TYPED.get().words]
    for at in range(len(typed)):
        here = typed[at : at + len(words)]
        if here == [*words]:
            option = [word for word in typed[at - 1 : at] if word == "--set"]
            new = [part for pair in apart for part in (*option, pair)][len(option) :]
        elif here == [f"--set={words[0]}"]:
            new = [part for pair in apart for part in ("--set", pair)]
        else:
            continue
        return shell(["ckptsurgeon", *typed[:at], *new, *typed[at + len(words) :]])
    start = [*pairs].index(words[0])
    return command("set", *pairs[:start], *apart, *pairs[start + len(words) :])


def keys(ctx: typer.Context) -> list[str]:
    """KEY= of what `set` can change, and of what else the param groups of the latest step hold."""
    known = [key for key in fields.names(Hyperparameters) if key != Hyperparameters.rest[0]]
    run = run_of(ctx)
    try:
        own = () if run is None else run.state(run.latest()).promise.settings or ()
    except (SurgeryError, OSError):
        own = ()
    return [f"{key}=" for key in dict.fromkeys((*known, *(key for key, _ in own)))]


def set_lr(
    section: Hyperparameters,
    scale: Annotated[
        str | None, typer.Option("--scale", metavar="FACTOR", help="Multiply the peak instead.")
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Start the schedule again: --warmup and --decay then count iterations from here.",
        ),
    ] = False,
) -> Recipe:
    """Change the learning-rate schedule.

    Examples:
    ckptsurgeon set-lr 3e-5
    ckptsurgeon set-lr --scale 0.5 --min-lr 1e-6
    ckptsurgeon set-lr 3e-4 --restart --warmup 500 --decay 20000
    """
    if scale is not None:
        if section.lr is not None:
            hint = command("set-lr", "--scale", "0.5")
            raise UsageError("both LR and --scale were given", next=hint)
        factor = scale.strip().lower().removesuffix("x")
        if not isinstance(scalar(factor), (int, float)):
            hint = command("set-lr", "--scale", "0.5")
            raise UsageError(f"--scale {scale} is no factor", next=hint)
        section = dataclasses.replace(section, lr=f"{factor}x")
    if restart:
        return Recipe(_restarted(section))
    if not section.given():
        raise UsageError("no learning rate was given", next=command("set-lr", "3e-5"))
    return Recipe(section)


def _restarted(section: Hyperparameters) -> RewarmSchedule:
    if None in (section.lr, section.warmup, section.decay):
        raise UsageError(
            "a schedule that starts again needs its peak, warm-up and decay",
            next=command("set-lr", "3e-4", "--restart", "--warmup", "500", "--decay", "20000"),
        )
    section.check_values()
    names = {"lr": "to", "decay_style": "shape"}
    peak = fields.converted(float, section.lr, "lr")  # by the name that was typed
    fields.keys(RewarmSchedule)["to"].check("lr", peak)
    return RewarmSchedule.build({names.get(k, k): v for k, v in section.given().items()})


def set_values(
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE",
            help="For example: beta2=0.95 eps=1e-8",
            autocompletion=keys,
        ),
    ],
    params: Annotated[
        str | None,
        typer.Option("--params", metavar="REGEX", help="Only param groups of such parameters."),
    ] = None,
) -> Recipe:
    """Change hyperparameters in every place that keeps them.

    KEY is lr min_lr warmup decay decay_style beta1 beta2 eps weight_decay clip_grad seed
    loss_scale batch_size rampup, a counter (consumed_samples tokens iteration position data_epoch
    data_batches), or what the param groups of the run's optimizer hold (momentum alpha beta3). A
    VALUE such as 0.5x scales the present one.

    Examples:
    ckptsurgeon set beta2=0.95 eps=1e-8
    ckptsurgeon set weight_decay=0.5x --dry-run
    ckptsurgeon set batch_size=512
    """
    if params is None:
        return Recipe(of_pairs(settings))
    _refuse_betas(settings)
    data = lay({}, [pair.removeprefix("set.") for pair in settings])
    whole = data.keys() & set(fields.names(Hyperparameters)) - set(fields.names(GroupSettings))
    if whole:
        raise UsageError(
            f"{min(whole)} is one of the whole run, and --params names some parameters",
            next=command("set", *settings, why="without --params"),
        )
    return Recipe(GroupSettings.build({**data, "params": params}))


COMMANDS = {"set-lr": set_lr, "set": set_values}
