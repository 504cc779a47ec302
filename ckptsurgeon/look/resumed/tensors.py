"""Whether the tensors of a step are what training can have made of those of an earlier one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import count
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.formats import MOMENTS, Checkpoint
from ckptsurgeon.formats.capabilities import blobs
from ckptsurgeon.formats.fields.values import NUMBER
from ckptsurgeon.formats.optimizers import adam
from ckptsurgeon.look.resumed.aligned import Aligned, aligned
from ckptsurgeon.look.resumed.counters import TOUCHED, updates
from ckptsurgeon.look.resumed.equal_saves import identical
from ckptsurgeon.look.resumed.laws import EXACT, Moments, Movement
from ckptsurgeon.look.resumed.verdict import AGREES, DIFFERS, NOT_COMPARED, Verdict, edited
from ckptsurgeon.look.vitals.bound import FLOOR
from ckptsurgeon.look.vitals.facts import named
from ckptsurgeon.look.vitals.jobs import Planner, Range, Source, strips_of
from ckptsurgeon.look.vitals.reader import BLOCK, Reader
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.progress import Progress, counted
from ckptsurgeon.workers import Workers, at_work

MOVED = ("weights of", "master of", "beta")
"""How further fields of changes begin after which tensors can't be compared."""
V = "exp_avg_sq"
WEIGHTS = ("master", "weights")
"""What an update moves, the first that both steps keep in full."""


@frozen
class Job:
    """The elements of one strip in both steps, by kind, and what is to hold of them."""

    parameter: str
    numel: int
    now: dict[str, Range]
    before: dict[str, Range]
    moments: Moments | None
    movement: Movement | None
    updated: bool
    """Whether Adam counted an update of these elements in between."""

    @property
    def file(self) -> Path:
        """The file that what is found is counted to."""
        return next(iter(self.now.values())).archive.path


@dataclass
class Reading:
    """What was read of one job: elements of v that fell too far, pairs (m, v) that no gradients
    lead to, weights that moved too far, the largest move as a share of what can be; whether v and
    the weights are bit for bit as before, of elements that are not all 0."""

    job: Job
    fallen: int = 0
    apart: int = 0
    far: int = 0
    share: float = 0.0
    still: bool = False


def compared(
    now: Checkpoint,
    before: Checkpoint,
    receipts: Sequence[Receipt],
    rate: float | None,
    *,
    workers: Workers = 8,
    progress: Progress | None = None,
) -> list[Verdict]:
    """All verdicts on tensors. `rate` is the highest of the updates in between, if known. Raises
    SurgeryError for a file that can't be read."""
    mine, its = _sources(now), _sources(before)
    moved, _ = updates(now, before)
    out: list[Verdict] = []
    if moved != 0 and identical(now, before, mine, its):
        text = (
            f"every tensor of step {now.step} is bit for bit that of step {before.step}: what was "
        )
        out.append(Verdict("tensors", DIFFERS, text + "trained in between is not in it"))
    if edited(receipts, now, before, (*TOUCHED, *MOVED)):
        text = f"a surgery between {before.step} and {now.step}"
        return [*out, Verdict(V, NOT_COMPARED, text), Verdict("weights", NOT_COMPARED, text)]
    pairs, lost = aligned(now, before)
    out += _parameters(now, before, pairs, lost)
    jobs = list(_jobs(now, before, pairs, (Planner(mine), Planner(its)), rate))
    readings = _read(jobs, workers, progress)
    return [*out, *_of_moments(readings, before), *_of_weights(readings, before, rate)]


def _sources(checkpoint: Checkpoint) -> list[Source]:
    strips_of(checkpoint)  # may open further shards
    inside = [Archive.open(b.file, b.start, b.length) for b in blobs(checkpoint)]
    return [Source(archive) for archive in (*checkpoint.archives.values(), *inside)]


# --- what is read --------------------------------------------------------------------------------


def _jobs(
    now: Checkpoint,
    before: Checkpoint,
    pairs: Sequence[Aligned],
    planners: tuple[Planner, Planner],
    rate: float | None,
) -> Iterator[Job]:
    total, _ = updates(now, before)
    steps = now.state().step - before.state().step
    decay = max((float(p.value or 0) for p in now.locate("weight_decay")), default=0.0)
    plain = adam.moves_by_its_rate(now.state_dicts(), now.known)
    steady = "betas" not in {*now.state().promise.one_step, *before.state().promise.one_step}
    for pair in pairs:
        ranges: list[dict[str, Range]] = [{}, {}]
        for side, strip, checkpoint, planner in zip(
            ranges, pair, (now, before), planners, strict=True
        ):
            for kind in strip.tensors:
                found = planner.range(checkpoint, strip, kind)
                if found is not None:
                    side[kind] = found
        kinds = ranges[0].keys() & ranges[1].keys()
        mine, its = ({k: v for k, v in side.items() if k in kinds} for side in ranges)
        if not mine:
            continue
        one, other = pair.now.adam, pair.before.adam
        law: Moments | None = None
        movement: Movement | None = None
        made = total
        if one is not None and other is not None:
            if one.step is not None and other.step is not None and total is not None:
                made = one.step - other.step
            count = made if made is not None and made >= 0 else steps
            betas = one.betas
            if betas is not None and len(betas) == 2 and betas == other.betas and one.lawful:
                exact = made is not None and made >= 0 and steady
                if V in mine and count >= 0:
                    dtypes = {r.dtype for side in (mine, its) for k, r in side.items()
                              if k in MOMENTS}  # fmt: skip
                    law = Moments.of((betas[0], betas[1]), count, dtypes, exact)
                weighed = any(_exact(mine, its, kind) for kind in WEIGHTS)
                weighed = weighed and all(_exact(mine, its, kind) for kind in MOMENTS)
                if plain and rate is not None and count >= 0 and weighed:
                    movement = Movement.of((betas[0], betas[1]), one.step, count, rate, decay)
        yield Job(pair.now.parameter, pair.now.numel, mine, its, law, movement, made != 0)


def _read(jobs: Sequence[Job], workers: Workers, progress: Progress | None) -> list[Reading]:
    files: dict[Path, list[Job]] = {}
    for job in jobs:
        files.setdefault(job.file, []).append(job)
    out: list[Reading] = []
    with at_work(workers, len(files)) as mapped:
        found = mapped(_file, [*files.values()])
        for readings in counted(found, "compare", [1] * len(files), progress):
            out += readings
    return out


def _file(jobs: Sequence[Job]) -> list[Reading]:
    with contextlib.ExitStack() as stack:
        reader = Reader(stack)
        return [_job(job, reader) for job in jobs]


def _job(job: Job, reader: Reader) -> Reading:
    out = Reading(job)
    weights = next((kind for kind in WEIGHTS if _exact(job.now, job.before, kind)), None)
    read = [kind for kind in (*MOMENTS, weights) if kind in job.now]
    law, movement = job.moments, job.movement
    same, blank = bool(read), True
    for at in range(0, job.numel, BLOCK):
        size = min(BLOCK, job.numel - at)
        before, now = (
            {kind: _block(reader, side[kind], at, size) for kind in read}
            for side in (job.before, job.now)
        )
        if law is not None:
            out.fallen += law.fallen(before[V], now[V])
            if len({*MOMENTS} & now.keys()) == 2:
                m, v = ((side["exp_avg"], side[V]) for side in (before, now))
                out.apart += law.apart(m, v)
        if movement is not None and weights is not None:
            moments = before["exp_avg"], before[V]
            far, share = movement.share(before[weights], now[weights], moments)
            out.far += far
            out.share = max(out.share, share)
        if same:
            same = all((before[kind] == now[kind]).all() for kind in read)
        if blank and V in now:  # what no gradient reaches stays among the smallest numbers for good
            blank = not (now[V] > FLOOR["float32"]).any()
    out.still = same and not blank and _exact(job.now, job.before, V)
    return out


def _exact(now: Mapping[str, Range], before: Mapping[str, Range], kind: str) -> bool:
    """Whether both steps keep it in a dtype that an update does not round away."""
    ranges = [side.get(kind) for side in (now, before)]
    return all(item is not None and item.dtype in EXACT for item in ranges)


def _block(reader: Reader, item: Range, at: int, size: int) -> Any:
    values, _ = reader.block(item, at, size, 0)
    return values.astype("f8")


# --- what it says --------------------------------------------------------------------------------


def _parameters(
    now: Checkpoint, before: Checkpoint, pairs: Sequence[Aligned], lost: Sequence[str]
) -> Iterator[Verdict]:
    """Whether both steps have the same moments of the same parameters."""
    mine, its = (
        {s.parameter for s in strips_of(each) if V in s.tensors or V in s.codes}
        for each in (now, before)
    )
    # A file that repeats others may have them by number; in another layout names may be missing.
    numbers = {name for name in mine | its if name.startswith(NUMBER)}
    if numbers < mine | its:
        mine, its = mine - numbers, its - numbers
    if not mine and not its:
        return
    if mine == its:
        yield Verdict("parameters", AGREES, f"{len(mine)} with moments")
    if gone := sorted(its - mine):
        text = f"step {now.step} has no moments of {named(gone)}, and step {before.step} has"
        yield Verdict("parameters", DIFFERS, text)
    if new := sorted(mine - its):  # Adam makes the moments of a parameter at its first gradient
        text = f"{named(new)}: step {before.step} has no moments of it, they began in between"
        yield Verdict("parameters", NOT_COMPARED, text)
    if lost := [name for name in lost if name in mine & its]:
        why = f"{named(lost)}: both steps cut them in ways that can't be held against each other"
        yield Verdict("tensors", NOT_COMPARED, why)


def _of_moments(readings: Sequence[Reading], before: Checkpoint) -> Iterator[Verdict]:
    held = [reading for reading in readings if reading.job.moments is not None]
    if not held:
        yield Verdict(V, NOT_COMPARED, "no moments of Adam that both steps have alike")
        return
    wrong = False
    words = {
        "fallen": "exp_avg_sq fell faster than beta2 allows in {} since step {}: {}",
        "apart": "exp_avg is not what {} can make of that of step {}: {}",
    }
    for name, text in words.items():
        files: dict[Path, list[Reading]] = {}
        for reading in held:
            if getattr(reading, name):
                files.setdefault(reading.job.file, []).append(reading)
        for file, found in files.items():
            wrong = True
            wrongs = sum(getattr(reading, name) for reading in found)
            where = f"{count(wrongs, 'element')}, in {named([r.job.parameter for r in found])}"
            law = found[0].job.moments
            assert law is not None
            made = text.format(_updates(law.updates), before.step, where)
            yield Verdict("moments", DIFFERS, f"{file}: {made}")
    if not wrong:
        yield _agreed(held)
    for updated in (True, False):
        still = [r.job.parameter for r in readings if r.still and r.job.updated is updated]
        if not still or len(still) == len(readings):
            continue
        if updated:
            text = (
                f"{named(still)}: bit for bit as in step {before.step}, while others were updated"
            )
            yield Verdict("parameters", DIFFERS, text)
        else:
            text = f"{named(still)}: Adam counted no update of them since step {before.step}"
            yield Verdict("parameters", NOT_COMPARED, text)


def _agreed(held: Sequence[Reading]) -> Verdict:
    elements = sum(reading.job.numel for reading in held)
    laws = [reading.job.moments for reading in held if reading.job.moments is not None]
    least = max(laws, key=lambda law: law.updates)
    if not all(law.telling for law in laws):
        left = least.betas[1] ** least.updates
        return Verdict(
            "moments",
            NOT_COMPARED,
            f"of exp_avg_sq {left:.2g} is left after {_updates(least.updates)}, too little to tell "
            "whether it began anew: compare with a step that is nearer",
        )
    return Verdict(
        "moments", AGREES, f"{count(elements, 'element', spec=',')}, {_updates(least.updates)}"
    )


def _of_weights(
    readings: Sequence[Reading], before: Checkpoint, rate: float | None
) -> Iterator[Verdict]:
    held = [r for r in readings if r.job.movement is not None]
    if not held:
        why = "no rate is known"
        if rate is not None:
            why = "none of 32 bits beside moments of 32 bits of a plain Adam"
        yield Verdict("weights", NOT_COMPARED, why)
        return
    far: dict[Path, list[Reading]] = {}
    for reading in held:
        if reading.far:
            far.setdefault(reading.job.file, []).append(reading)
    for file, found in far.items():
        movement = found[0].job.movement
        assert movement is not None
        made = f"{_updates(movement.updates)} with a rate of {movement.rate:.3g} can move it"
        where = f"{count(sum(r.far for r in found), 'element')}, "
        where += f"up to {max(r.share for r in found):.3g} times as far, "
        where += f"in {named([r.job.parameter for r in found])}"
        text = f"{file}: a weight moved further than {made} since step {before.step}: {where}"
        yield Verdict("weights", DIFFERS, text)
    if not far:
        most = max(reading.share for reading in held)
        yield Verdict("weights", AGREES, f"no element moved further than {most:.2g} of what it can")


def _updates(number: float) -> str:
    return count(number, "update", spec="g")
