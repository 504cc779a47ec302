"""The vital signs of one saved step, from its files alone. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckptsurgeon.errors import UsageError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import blobs
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.look.vitals import attention, facts, growth, observations
from ckptsurgeon.look.vitals.attention import Attention
from ckptsurgeon.look.vitals.growth import Growth
from ckptsurgeon.look.vitals.jobs import Source, strips_of
from ckptsurgeon.look.vitals.observations import Observation, Sign
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.progress import Progress
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing
from ckptsurgeon.workers import Workers


@frozen
class Vitals:
    """What the tensors of `step` say: `facts` can't be true of a sound step, `observations` are
    unusual, the most unusual first. `signs` has the numbers of each parameter, `noise` is the
    update RMS of gradients without direction, and `not_compared` says what could not be checked.
    `attention` has the largest head of each layer, `growth` the norms since step `against`, most
    grown first, and `next` what to do about each kind of observation that was made."""

    step: int
    facts: tuple[str, ...]
    observations: tuple[Observation, ...]
    signs: tuple[Sign, ...]
    noise: float | None
    not_compared: tuple[str, ...]
    against: int | None = None
    growth: tuple[Growth, ...] = ()
    attention: tuple[Attention, ...] = ()
    next: Mapping[str, Hint] = field(default_factory=dict)


@collector_paused()
def examine(
    run: Run,
    step: int | None = None,
    *,
    against: int | None = None,
    jobs: Workers = 8,
    progress: Progress | None = None,
) -> Vitals:
    """The signs of `step`, by default the latest: every float of its shards is read once, by up to
    `jobs` workers, and of the earlier step `against` the weights. Raises SurgeryError for a step
    that is not there, incomplete or damaged, UsageError for a later one to compare with."""
    checkpoint = run.checkpoint(run.latest() if step is None else step)
    before = None if against is None else run.checkpoint(against)
    if before is not None and before.step >= checkpoint.step:
        raise UsageError(
            f"step {against} is not before step {checkpoint.step}",
            next=command("doctor", "--vitals", "--against", "STEP", why="an earlier one"),
        )
    values = facts.read(
        checkpoint,
        sources(checkpoint),
        standing(run.receipts()),
        workers=jobs,
        observe=True,
        progress=progress,
    )
    found = observations.signs(values.readings)
    unusual, not_compared = observations.observations(found), list(values.not_compared)
    grown: list[Growth] = []
    if before is not None:
        grown, apart = growth.since(
            values.readings, before, sources(before), workers=jobs, progress=progress
        )
        unusual += growth.observations(grown, before.step)
        not_compared += apart
    heads, apart = attention.attention(checkpoint, before)
    unusual += attention.observations(heads)
    unusual.sort(key=lambda item: -item.weight)
    not_compared += apart
    betas = checkpoint.locate("betas")
    older = run.complete_among(other for other in run.steps() if other < checkpoint.step)
    return Vitals(
        step=checkpoint.step,
        facts=tuple(facts.findings(values)),
        observations=tuple(unusual),
        signs=tuple(found),
        noise=observations.noise_floor(betas[0].value if betas else None),
        not_compared=tuple(not_compared),
        against=against,
        growth=tuple(grown),
        attention=tuple(heads),
        next={
            kind: observations.advice(kind, checkpoint.step, against, max(older, default=None))
            for kind in dict.fromkeys(item.kind for item in unusual)
        },
    )


def sources(checkpoint: Checkpoint) -> list[Source]:
    """Its archives, and those inside larger files."""
    strips_of(checkpoint)  # which may open further shards
    found = blobs(checkpoint)
    inside = [Source(Archive.open(b.file, b.start, b.length), b.kind) for b in found]
    return [*(Source(archive) for archive in checkpoint.archives.values()), *inside]
