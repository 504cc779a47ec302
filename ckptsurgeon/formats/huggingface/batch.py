"""The batch size of Hugging Face's Trainer, which counts everything in steps of it.

Source: `transformers/trainer.py` 5.23, `_init_training_state`: a resume passes over `global_step`
batches of the new size. Until huggingface/transformers#43718 a load also took `train_batch_size`
of the file for the argument; since then it does so only with `auto_find_batch_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats.fields.values import Place, Setting
from ckptsurgeon.formats.places.json_beside import JsonBeside
from ckptsurgeon.formats.schedules import plateau, torch_classes
from ckptsurgeon.hints import command

STEPS = ("warmup_steps", "save_steps", "eval_steps", "logging_steps")


def places(checkpoint: JsonBeside) -> list[Place]:
    """`train_batch_size` in `trainer_state.json`: of one process."""
    found = [p for file in checkpoint.texts for p in checkpoint.at(file, ("train_batch_size",))]
    return [place._replace(wins=False) for place in found if place.value]


def rebatch(
    checkpoint: JsonBeside, size: int | None, ramp: Sequence[int] | None
) -> tuple[list[Setting], list[str]]:
    """The size, and the steps by which the Trainer finds its data and its rate, as if all of them
    had been of that size. Raises SurgeryError for a scheduler with counts of its own, UsageError
    where a count is not a whole number then."""
    kept = checkpoint.locate("batch_size")
    if ramp is not None:
        raise SurgeryError(
            "Hugging Face's Trainer has no ramp-up of the batch size",
            next=command("set", "batch_size=SIZE", why="at each stage of it"),
        )
    if not kept or size is None:
        return [], []
    old = int(kept[0].value)
    settings = [Setting("batch_size", place, size) for place in kept]
    if old == size:
        return settings, []
    for place in checkpoint.locate("scheduler"):
        name = torch_classes.kind(place.value)
        if name not in ("LambdaLR", *plateau.NAMES):
            raise SurgeryError(
                f"{name or 'a scheduler of no known class'} keeps counts of steps that another "
                "batch size would shift",
                next="set them where the script makes its scheduler, or train with one of the "
                "Trainer's own (--lr_scheduler_type)",
            )
    done = checkpoint.locate("iteration")
    counts = [(field, p) for field in ("iteration", "position") for p in checkpoint.locate(field)]
    for field, place in counts:
        now = int(place.value)
        if now * old % size:
            raise UsageError(
                f"{field} {now} × {old} / {size} is not a whole number of steps",
                next=command(
                    "status",
                    why=f"go back to a step that is a multiple of {size // gcd(old, size)}",
                ),
            )
        new = now * old // size
        settings.append(Setting(field, place, new))
        if field == "position":
            beside = (*place.path[:-1], "_step_count")
            for other in checkpoint.at(place.file, beside):
                settings.append(Setting(field, other, other.value - now + new))
    now = int(done[0].value) if done else 0
    total = checkpoint.value(done[0].file, ("max_steps",)) if done else None
    longer = f"--max_steps {-(-total * old // size)} ({total} × {old} / {size})" if total else ""
    return settings, [
        f"the data goes on where it is: {count(now, 'step')} × {old} / {size} = "
        f"{now * old // size}, at the same accumulation and ranks",
        f"relaunch with --per_device_train_batch_size {size}: some releases take it from the "
        "checkpoint, others from there",
        f"on the command line, what is counted in steps changes with it: {longer or '--max_steps'}"
        f", {', '.join(f'--{name}' for name in STEPS)} × {old} / {size}",
    ]
