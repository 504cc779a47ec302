"""The vital signs of one saved step, from its files alone. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.look.vitals import facts, observations
from ckptsurgeon.look.vitals.jobs import Source, strips_of
from ckptsurgeon.look.vitals.observations import Observation, Sign
from ckptsurgeon.progress import Progress
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing


@dataclass(frozen=True)
class Vitals:
    """What the tensors of `step` say: `facts` can't be true of a sound step, `observations` are
    unusual, the most unusual first. `signs` has the numbers of each parameter, `noise` is the
    update RMS of gradients without direction, and `not_compared` says what could not be checked."""

    step: int
    facts: tuple[str, ...]
    observations: tuple[Observation, ...]
    signs: tuple[Sign, ...]
    noise: float | None
    not_compared: tuple[str, ...]


@collector_paused()
def examine(
    run: Run, step: int | None = None, *, jobs: int = 8, progress: Progress | None = None
) -> Vitals:
    """The signs of `step`, by default the latest: every float of its shards is read once, by up to
    `jobs` threads. Raises SurgeryError for a step that is not there, incomplete or damaged."""
    checkpoint = run.checkpoint(run.latest() if step is None else step)
    values = facts.read(
        checkpoint,
        sources(checkpoint),
        standing(run.receipts()),
        threads=jobs,
        observe=True,
        progress=progress,
    )
    found = observations.signs(values.readings)
    betas = checkpoint.locate("betas")
    return Vitals(
        step=checkpoint.step,
        facts=tuple(facts.findings(values)),
        observations=tuple(observations.observations(found)),
        signs=tuple(found),
        noise=observations.noise_floor(betas[0].value if betas else None),
        not_compared=tuple(values.not_compared),
    )


def sources(checkpoint: Checkpoint) -> list[Source]:
    """Its archives, and those inside larger files."""
    strips_of(checkpoint)  # which may open further shards
    blobs = checkpoint.blobs()
    inside = [Source(Archive.open(b.file, b.start, b.length), b.kind) for b in blobs]
    return [*(Source(archive) for archive in checkpoint.archives.values()), *inside]
