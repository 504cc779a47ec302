"""DeepSpeed's own schedulers: they save their position alone; the rest is in the relaunch's config.

Source of the rules: `deepspeed/runtime/lr_schedules.py`, 0.9 to 0.19. The model files repeat the
config of the run that saved them (`ds_config`), from which the rate at the position is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import refuse_rates
from ckptsurgeon.formats.fields.values import Decay, Setting
from ckptsurgeon.formats.schedules.check import kept_rates, refuse_early_decay
from ckptsurgeon.hints import command
from ckptsurgeon.plans.promise import Caveat

KEY = "last_batch_iteration"
WARMUPS = ("WarmupLR", "WarmupDecayLR")
COSINE = "WarmupCosineLR"
PARAMS = {
    "lr": "warmup_max_lr", "warmup": "warmup_num_steps", "decay": "total_num_steps",
}  # fmt: skip
"""Recipe key → name in `scheduler.params` of the config. WarmupCosineLR takes lr from
`optimizer.params`."""


def is_deepspeed(schedule: Any) -> bool:
    """Whether a saved state is the position of a scheduler of DeepSpeed, and nothing else."""
    return isinstance(schedule, Mapping) and set(schedule) == {KEY}


def words(schedule: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The schedule as a person would say it."""
    name = _section(config, "scheduler").get("type", "a scheduler of DeepSpeed")
    return f"{name} at step {schedule[KEY]}; its rates come from the launch config"


def peak(config: Mapping[str, Any]) -> float | None:
    """The rate after warm-up by the saved config, or None where that does not tell."""
    params = _params(config, _section(config, "scheduler").get("type"))
    return params.get("lr")


def notes(schedule: Any, config: Mapping[str, Any]) -> list[str]:
    """What a reader of a promise must know: OneCycle writes both betas after each step."""
    section = _section(config, "scheduler")
    cycles = _section(section, "params").get("cycle_momentum", True)
    if not is_deepspeed(schedule) or section.get("type") != "OneCycle" or not cycles:
        return []
    return [
        Caveat(
            "OneCycle cycles the betas: the scheduler writes both anew after each step, unless the "
            'relaunch has "cycle_momentum": false in "scheduler": {"params": …} of its DeepSpeed '
            "config",
            "betas",
        )
    ]


def reschedule(
    checkpoint: Checkpoint, config: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """The groups' lr for the first step, as the changed config gives it at the saved position, and
    a warning with that config: without it, the schedule goes back at the second step.

    Raises SurgeryError where the saved config does not name the schedule."""
    name = _section(config, "scheduler").get("type")
    params = _params(config, name)
    if name not in (*WARMUPS, COSINE) or params.get("lr") is None:
        raise SurgeryError(
            f"the scheduler saves only its position, and {name or 'its class'} is not one that "
            "the saved config explains: no rate can be promised",
            next='set its rates in the relaunch\'s DeepSpeed config ("scheduler": {"params": …})',
        )
    names = {"lr", "warmup", "position", *(["decay"] if name != "WarmupLR" else [])}
    lacking = sorted(values.keys() - names)
    if lacking:
        raise SurgeryError(
            f"{name} has no {', '.join(lacking)} that a checkpoint or a recipe could set",
            next='see "scheduler": {"params": …} in the relaunch\'s DeepSpeed config',
        )
    places = kept_rates(checkpoint)
    if name == COSINE and len({place.value for place in places}) > 1:
        raise SurgeryError(
            "param groups have different learning rates, and the config has one",
            next='set "optimizer": {"params": {"lr": …}} in the relaunch\'s DeepSpeed config',
        )
    if values.get("warmup", 1) < 1:
        raise UsageError(
            f"{name} has a warm-up of at least 1 step: DeepSpeed refuses to start with "
            f"warmup_num_steps {values['warmup']}",
            next=command("set", "warmup=1", why="no warm-up, to it"),
        )
    params |= values
    positions = checkpoint.locate("position")
    now = values.get("position", positions[0].value)
    if "decay" in params:
        refuse_early_decay(params["decay"], params["warmup"], "steps")
    rate = _rate(name, params, now)
    refuse_rates([rate])
    settings = [Setting("lr", place, rate) for place in places]
    settings += [Setting("lr", place, params["lr"]) for place in checkpoint.locate("initial_lr")]
    settings += [Setting("position", place, now) for place in positions]
    return settings, [_advice(name, values)] if values.keys() - {"position"} else []


def cooldown(
    checkpoint: Checkpoint, decay: Decay, end: int | None = None
) -> tuple[list[Setting], list[str]]:
    """Refused with the config that is this cooldown: these schedulers save their position alone.
    With `end`, the last step of a Trainer, also with its arguments, which the config must repeat.

    WarmupDecayLR decays linearly from the step at which its warm-up is over; WarmupCosineLR has
    made the first of its `total - warmup` steps at the last one of its warm-up."""
    rates = {place.value for place in checkpoint.locate("lr")}
    positions = checkpoint.locate("position")
    (now,) = {int(place.value) for place in positions}
    (rate, *others) = rates or {None}
    known = {"linear": 2, "cosine": 1}
    if rate is None or others or decay.shape not in known or now < known[decay.shape]:
        raise SurgeryError(
            f"no scheduler of DeepSpeed decays {decay.shape} from step {now} for these param "
            "groups",
            next="make the scheduler in the script and give it to deepspeed.initialize: LambdaLR",
        )
    warmup = now if decay.shape == "linear" else now + 1
    total = warmup + decay.steps if end is None else end
    if decay.shape == "linear":
        sections = [
            '"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": '
            f'{decay.to!r}, "warmup_max_lr": {rate!r}, "warmup_num_steps": {warmup}, '
            f'"total_num_steps": {total}}}}}'
        ]
    else:
        sections = [
            '"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 1.0, '
            f'"cos_min_ratio": {decay.to / rate!r}, "warmup_num_steps": {warmup}, '
            f'"total_num_steps": {total}}}}}',
            f'"optimizer": {{"params": {{"lr": {rate!r}}}}}',
        ]
    config = f"this in the DeepSpeed config: {', '.join(sections)}"
    if end is not None:
        arguments = f"--learning_rate {rate!r} --warmup_steps {warmup} --max_steps {total}"
        config = f"{arguments} and {config}"
    raise SurgeryError(
        "the scheduler saves only its position: what it decays to comes from the launch config",
        next=f"relaunch with {config}",
    )


def _advice(name: str, values: Mapping[str, Any]) -> Caveat:
    parts = []
    if name == COSINE and "lr" in values:
        parts.append(f'"optimizer": {{"params": {{"lr": {values["lr"]!r}}}}}')
    keys = {k: PARAMS[k] for k in values if k in PARAMS and (name != COSINE or k != "lr")}
    if keys:
        inner = ", ".join(f'"{param}": {values[key]!r}' for key, param in keys.items())
        parts.append(f'"scheduler": {{"params": {{{inner}}}}}')
    return Caveat(
        f"{name} saves only its position: relaunch with {' and '.join(parts)} in the DeepSpeed "
        "config, or the second step goes back to the old schedule",
        "lr",
    )


def _section(config: Any, name: str) -> Mapping[str, Any]:
    section = config.get(name) if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _params(config: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """Recipe keys and the other parameters with the defaults of the class."""
    params = _section(_section(config, "scheduler"), "params")
    values: dict[str, Any] = {
        "warmup": max(2, params.get("warmup_num_steps", 1000)),
        "type": params.get("warmup_type", "log"),
    }
    optimizer = _section(_section(config, "optimizer"), "params").get("lr")
    if name == COSINE:
        values["lr"] = optimizer
        values["start"] = params.get("warmup_min_ratio", 0.0)
        values["end"] = params.get("cos_min_ratio", 0.0001)
    elif name in WARMUPS:
        default = optimizer if name == "WarmupLR" else 0.001
        values["lr"] = params.get("warmup_max_lr", default)
        values["start"] = params.get("warmup_min_lr", 0.0)
    if name in (COSINE, "WarmupDecayLR") and "total_num_steps" in params:
        values["decay"] = params["total_num_steps"]
    if any(isinstance(value, (list, tuple)) for value in values.values()):
        values["lr"] = None  # a rate for each group
    return values


def _rate(name: str, params: Mapping[str, Any], now: int) -> float:
    top, warmup, start = params["lr"], max(2, params["warmup"]), params["start"]
    if now < 0:
        return 0.0 if name == COSINE else float(start)
    if now < warmup:
        linear = params["type"] == "linear"
        gamma = now / warmup if linear else math.log(now + 1) / math.log(warmup)
    elif name == "WarmupLR":
        gamma = 1.0
    elif name == "WarmupDecayLR":
        gamma = max(0.0, (params["decay"] - now) / max(1.0, params["decay"] - warmup))
    else:
        done = min(1.0, (now - warmup + 1) / max(1, params["decay"] - warmup))
        share = (1 + math.cos(math.pi * done)) / 2
        return float(top * max(0.0, params["end"] + (1.0 - params["end"]) * share))
    if name == COSINE:
        return float(top * (start + gamma * (1.0 - start)))
    return float(start + (top - start) * gamma)
