"""Saved steps from before a spike: which are sound, and how much going back to each throws away."""

from __future__ import annotations

from dataclasses import dataclass

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs.curves import Branch
from ckptsurgeon.logs.signals import LOSS, SAMPLES, TOKENS
from ckptsurgeon.look import soundness
from ckptsurgeon.look.advise.spikes import PATIENCE, Spike
from ckptsurgeon.run.run import Run

MOST = 8
"""Steps that are looked at: those before them are further back than anybody needs."""
MARGIN = 10
"""Steps by which the first sign may be late: what was saved so shortly before it is not trusted."""
SHARE = 0.01
"""The same as a share of the steps so far; the larger of both counts."""


@dataclass(frozen=True)
class Distance:
    """What is trained again from a step on: up to the newest logged one. None: the log does not
    say it."""

    steps: int
    samples: int | None
    tokens: int | None
    hours: float | None


@dataclass(frozen=True)
class Candidate:
    """A saved step before the first sign, and whether it is `sound` up to a level of `verify`;
    `findings` are what is wrong with it. `too_near`: so close to the first sign that it may carry
    it."""

    step: int
    sound: bool
    too_near: bool
    distance: Distance
    findings: tuple[str, ...]


def candidates(
    run: Run, spike: Spike, branch: Branch, level: int, jobs: int = 8
) -> list[Candidate]:
    """The MOST newest saved steps before the first sign of `spike`, newest first. A slow rise
    begins long before it can be seen."""
    margin = PATIENCE if spike.slow else max(MARGIN, round(spike.first * SHARE))
    steps = [step for step in run.steps() if step < spike.first][-MOST:]
    return [
        Candidate(step, not findings, step > spike.first - margin, distance(branch, step), findings)
        for step in reversed(steps)
        for findings in [_findings(run, step, level, jobs)]
    ]


def back_to(found: list[Candidate]) -> int | None:
    """The newest sound one that is not too near, else None."""
    return next((item.step for item in found if item.sound and not item.too_near), None)


def distance(branch: Branch, step: int) -> Distance:
    """From the newest point of the loss back to `step`."""
    newest = int(branch[LOSS].steps[-1])
    begun, ended = branch[LOSS].time(step), branch[LOSS].time(newest)
    hours = None if begun is None or ended is None or ended < begun else (ended - begun) / 3600
    return Distance(
        newest - step, _between(branch, SAMPLES, step), _between(branch, TOKENS, step), hours
    )


def _between(branch: Branch, signal: str, step: int) -> int | None:
    curve = branch.get(signal)
    if curve is None:
        return None
    begun, ended = curve.at(step), curve.at(int(branch[LOSS].steps[-1]))
    return None if begun is None or ended is None else round(ended - begun)


def _findings(run: Run, step: int, level: int, jobs: int) -> tuple[str, ...]:
    if not run.complete(step):
        return ("incomplete",)
    try:
        return tuple(soundness.check(run.format, run.root, step, level, jobs=jobs).findings)
    except (SurgeryError, OSError) as error:
        return (getattr(error, "what", None) or str(error),)
