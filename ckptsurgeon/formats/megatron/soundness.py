"""What contradicts itself in a Megatron-LM checkpoint: ranks among each other, counters, rates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import Impossible, NotUnderstood, SurgeryError
from ckptsurgeon.formats.fields.understood import is_count, is_number, said_in, understood
from ckptsurgeon.formats.fields.values import Place
from ckptsurgeon.formats.megatron.shards import MegatronShards
from ckptsurgeon.plans.edits import Key

SCHEDULE = ("max_lr", "min_lr", "warmup", "decay", "decay_style", "position")
"""What the rate of a step is computed from."""


def contradictions(checkpoint: MegatronShards) -> list[str]:
    """One sentence for each field in which shards differ, and each number that can't be."""
    out: list[str] = []
    for look in (_values, _steps, _rates):
        with said_in(out), understood(checkpoint.path):
            out += look(checkpoint)
    return list(dict.fromkeys(out))


def _values(checkpoint: MegatronShards) -> Iterator[str]:
    for name in (
        "betas",
        "eps",
        "weight_decay",
        "max_lr",
        "min_lr",
        "warmup",
        "decay",
        "position",
        "decay_style",
        "lr",
        "consumed_samples",
        "loss_scale",
        "iteration",
    ):
        try:
            by_path: dict[tuple[Key, ...], list[Place]] = {}
            for place in checkpoint.locate(name):
                by_path.setdefault(place.path, []).append(place)
        except NotUnderstood as error:
            yield from [error.what] if isinstance(error, Impossible) else []
            continue
        except SurgeryError as error:
            yield error.what
            continue
        for path, places in by_path.items():
            for place in places[1:]:
                if place.value != places[0].value:
                    yield (
                        f"shards disagree on {name} ({'.'.join(map(str, path[-3:]))}): "
                        f"{places[0].value!r} in {_short(places[0].file)}, {place.value!r} in "
                        f"{_short(place.file)}"
                    )


def _steps(checkpoint: MegatronShards) -> Iterator[str]:
    steps = {place.value for place in checkpoint.locate("adam_step")}
    if len(steps) > 1:
        yield f"the param groups count different Adam steps, and the loader asserts one: {steps}"
    for place in checkpoint.in_roots("iteration"):
        # `set iteration` leaves Adam's step; a shard of another step has its own.
        if (
            is_count(place.value)
            and place.value != checkpoint.step
            and (not steps or place.value in steps)
        ):
            yield f"{_short(place.file)}: holds iteration {place.value}, not {checkpoint.step}"


def _rates(checkpoint: MegatronShards) -> Iterator[str]:
    """The saved lr and the schedule: what differs was edited by hand, or is of another step."""
    if checkpoint.schedule() is None:
        return
    for name in SCHEDULE:
        checkpoint.locate(name)  # what is not understood there is computed with nowhere
    for item in checkpoint.optimizers():
        for i, group in enumerate(checkpoint.groups(item)):
            saved: Any = group.get("lr")
            rate = checkpoint.rate(group)
            if is_number(saved) and abs(saved - rate) > 1e-6 * abs(rate):
                yield (
                    f"{_short(item.file)}: param group {i} has lr {saved!r}, which the loader "
                    f"replaces by {rate!r} from its max_lr and min_lr"
                )


def _short(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"
