"""Another optimizer for a run that goes on: Adam's state becomes SGD's, or the other way round.

OPT-175B did it at restart 12.41, after faking it for six restarts with values that never ran.
"""

from __future__ import annotations

import re
from typing import Any

from ckptsurgeon.edits import ABSENT, AnyChange, Change, Content, Renamed, Rewrite
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint, Place
from ckptsurgeon.formats.sane import is_number
from ckptsurgeon.recipe.recipe import OPTIMIZERS, Recipe, SwapOptimizer
from ckptsurgeon.run.run import CONFIG, Run


def swap_optimizer(
    run: Run, recipe: Recipe, checkpoint: Checkpoint
) -> tuple[list[AnyChange], list[str]]:
    """Changes for `swap_optimizer`: the trainer's arguments and config, the param groups, and the
    state of every parameter. The groups keep Adam's betas and eps, which a swap back needs.

    To SGDW: exp_avg_sq goes, and exp_avg becomes the momentum or goes too. To AdamW: the momentum
    goes and Adam starts at step 0. Refused for a trainer whose checkpoints do not name their
    optimizer: its loader would take one's state for the other's, or assert the class.

    A rollback to a step from before an earlier swap brings the config back with it."""
    wanted = recipe.swap_optimizer
    named = checkpoint.locate("optimizer")
    if wanted is None:
        back = named and (recipe.rollback is not None or recipe.repair_latest is not None)
        return (_config(run, *_saved(checkpoint)) if back else []), []
    if not named:
        raise SurgeryError(
            f"{checkpoint.path.name} does not say which optimizer its state is of, so its trainer "
            "would load one's state into the other",
            next=run.format.advise("optimizer", wanted.to),
        )
    if all(place.value == wanted.to for place in named):
        return _config(run, *_saved(checkpoint)), []
    if any(place.value not in OPTIMIZERS for place in named):
        raise SurgeryError(
            f"the run's optimizer is {named[0].value}, and only adamw and sgdw can be swapped",
            next="swap_optimizer is for adamw and sgdw",
        )
    changes = [_set(run, "optimizer", place, wanted.to) for place in named]
    if wanted.to == "sgdw":
        changes += _to_sgdw(run, checkpoint, wanted)
        said = "exp_avg, which is (1 - β1) times SGD's sum" if wanted.keep else "nothing"
        warnings = [f"the momentum starts from {said}; set the lr for SGD with it"]
    else:
        changes += _to_adamw(run, checkpoint)
        warnings = ["Adam starts at step 0: the first update is 1.0 × lr in every weight"]
    momentum = wanted.momentum if wanted.to == "sgdw" else None
    return [*changes, *_config(run, wanted.to, momentum)], warnings


def _saved(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The optimizer that the checkpoint names, and its momentum, which only SGDW has."""
    momentum = [place.value for place in checkpoint.locate("sgd_momentum")]
    return checkpoint.locate("optimizer")[0].value, momentum[0] if momentum else None


def _set(run: Run, field: str, place: Place, value: object) -> AnyChange:
    return Change(run.relative(place.file), field, place.value, value, place.path)  # type: ignore[arg-type]


def _to_sgdw(run: Run, checkpoint: Checkpoint, wanted: SwapOptimizer) -> list[AnyChange]:
    changes: list[AnyChange] = [
        _set(run, "momentum", place, wanted.momentum) for place in checkpoint.locate("sgd_momentum")
    ]
    for group in checkpoint.locate("weight_decay"):
        path = (*group.path[:-1], "momentum")
        old = checkpoint.value(group.file, path)
        file = run.relative(group.file)
        if old is None:
            changes.append(Change(file, "momentum", ABSENT, wanted.momentum, path))
        else:
            changes.append(Change(file, "momentum", old, wanted.momentum, path))
    for place in checkpoint.locate("exp_avg"):
        new = Renamed("momentum_buffer") if wanted.keep else ABSENT
        changes.append(Change(run.relative(place.file), "exp_avg", "values", new, place.path))
    for place in checkpoint.locate("exp_avg_sq"):
        changes.append(Change(run.relative(place.file), "exp_avg_sq", "values", ABSENT, place.path))
    return changes


def _to_adamw(run: Run, checkpoint: Checkpoint) -> list[AnyChange]:
    if not checkpoint.locate("betas") or not checkpoint.locate("eps"):
        raise UsageError(
            "the param groups keep no betas and eps: this run was never Adam's",
            next="start the trainer with optimizer=adamw and new state",
        )
    changes: list[AnyChange] = [
        _set(run, "momentum", place, None) for place in checkpoint.locate("sgd_momentum")
    ]
    for name in ("momentum_buffer", "adam_step", "momentum"):
        for place in checkpoint.locate(name):
            old = "values" if name == "momentum_buffer" else place.value
            field = name.replace("_", " ")
            changes.append(Change(run.relative(place.file), field, old, ABSENT, place.path))
    return changes


def _config(run: Run, optimizer: str, momentum: float | None) -> list[AnyChange]:
    """The bundled trainer's config in the run, so that a relaunch builds this optimizer."""
    path = run.root / CONFIG
    if optimizer not in OPTIMIZERS or not path.is_file():
        return []
    text = path.read_text("utf-8", "surrogateescape")
    if re.search(rf"^optimizer: *{optimizer} *$", text, re.MULTILINE):
        return []
    text += "" if text.endswith("\n") else "\n"
    values = {"optimizer": optimizer}
    if is_number(momentum):
        values["sgd_momentum"] = repr(momentum)
    for key, value in values.items():
        line = f"{key}: {value}"
        text, count = re.subn(rf"^{key}:.*$", line, text, flags=re.MULTILINE)
        text += "" if count else f"{line}\n"
    content = Content((text.encode(errors="surrogateescape"),))
    return [Rewrite(CONFIG, "config", content, f"optimizer {optimizer}")]
