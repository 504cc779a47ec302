"""The weights of one step as safetensors files with an index, for evaluation elsewhere.

Bytes go from file to file inside the kernel; of no tensor more than its place is in memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import safetensors_header
from ckptsurgeon.files.dtypes import SAFETENSORS
from ckptsurgeon.formats import Checkpoint, Weight
from ckptsurgeon.formats.capabilities import HasWeights
from ckptsurgeon.formats.tensors.second_copies import TRAINED
from ckptsurgeon.hints import command
from ckptsurgeon.operations.computed_changes import named_copies
from ckptsurgeon.plans.edits import Computed
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.sources import Source
from ckptsurgeon.progress import Progress, silent
from ckptsurgeon.remote import reads
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.fork import make_partial, refuse_place
from ckptsurgeon.transaction import job_list
from ckptsurgeon.transaction.computing import Place
from ckptsurgeon.transaction.home import PARTIAL
from ckptsurgeon.transaction.job_list import Job
from ckptsurgeon.transaction.ranks import Ranks

SHARD_BYTES = 5_000_000_000
"""Of one file, unless a single tensor is larger."""
INDEX = "model.safetensors.index.json"


@frozen
class Export:
    """What was written: `files` by name, how many tensors and bytes of tensors are in them, and in
    `notes` which other weights the step has. Without `files` nothing was, yet."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    size: int
    notes: tuple[str, ...] = ()


def export(
    run: Run,
    step: int,
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    workers: Executor | None = None,
    progress: Progress | None = None,
) -> Export:
    """Write the weights of `step` to the new directory `folder`, which exists only once they are
    all there and durable. The run is only read. `workers`, which may be on other hosts, copy the
    bytes, if there are some.

    Raises UsageError if the directory exists or would lie in a run, SurgeryError if the weights
    can't be consolidated."""
    folder = folder.parent.resolve() / folder.name
    refuse_place(run, folder)
    checkpoint = run.checkpoint(step)
    weights = list(HasWeights.of(checkpoint).weights())
    files = _distributed(weights, shard_bytes)
    partial = make_partial(folder, "export")
    try:
        written = _write(partial, _shards(partial, files), workers, progress)
        disk.fsync_directory(partial)
        disk.rename(partial, folder)
    except BaseException:
        with contextlib.suppress(OSError):
            for path in partial.iterdir():
                disk.remove_file(path)
            disk.remove_directory(partial)
        raise
    disk.fsync_directory(folder.parent)
    size = sum(map(_size, weights))
    return Export(folder, tuple(written), len(weights), size, _left_out(run, checkpoint))


def help_with(
    run: Run, step: int, folder: Path, ranks: Ranks, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Do this rank's share of an export by the last rank, unless it is over. Raises as that one
    does, and SurgeryError where that one is not heard of, or has planned something else."""
    folder = folder.parent.resolve() / folder.name
    try:
        refuse_place(run, folder)
        weights = list(HasWeights.of(run.checkpoint(step)).weights())
        partial = folder.with_name(f"{folder.name}{PARTIAL}")
        jobs = _jobs(partial, _shards(partial, _distributed(weights, shard_bytes)))
        if not disk.exists(folder):
            ranks.help(jobs)
    except (SurgeryError, OSError):
        # It comes whole; where it was there before, the last rank says so.
        if not disk.exists(folder):
            raise


def preview(run: Run, step: int, folder: Path) -> Export:
    """What `export` would write, as far as that is known without it."""
    refuse_place(run, folder)
    checkpoint = run.checkpoint(step)
    sizes = [_size(weight) for weight in HasWeights.of(checkpoint).weights()]
    return Export(folder, (), len(sizes), sum(sizes), _left_out(run, checkpoint))


def _left_out(run: Run, checkpoint: Checkpoint) -> tuple[str, ...]:
    """A sentence for each second copy of the weights, as an average is; none is known where the
    format does not say whose the stretches of its tensors are."""
    try:
        copies = list(named_copies(run, checkpoint, checkpoint.parts()))
    except SurgeryError:
        return ()
    return tuple(
        f"these weights are the average that WeightAveraging saved; {where} is what it trains"
        if path and path[-1] == TRAINED
        else f"{where} has the weights once more, as an average of them has, and is left out"
        for where, path in copies
    )


def _distributed(weights: Sequence[Weight], shard_bytes: int) -> list[list[Weight]]:
    files: list[list[Weight]] = [[]]
    room = shard_bytes
    for weight in weights:
        if weight.dtype not in SAFETENSORS:
            raise SurgeryError(
                f"{weight.name}: safetensors has no {weight.dtype}",
                next="convert it with the trainer",
            )
        size = _size(weight)
        if files[-1] and size > room:
            files.append([])
            room = shard_bytes
        files[-1].append(weight)
        room -= size
    if not files[0]:
        raise SurgeryError("the checkpoint holds no weights", next=command("verify"))
    return files


class _Shard(NamedTuple):
    """A file that is to be written."""

    path: Path
    header: bytes
    weights: Sequence[Weight]


def _shards(folder: Path, files: Sequence[Sequence[Weight]]) -> list[_Shard]:
    return [
        _Shard(
            folder / f"model-{number:05d}-of-{len(files):05d}.safetensors",
            safetensors_header.encode((w.name, w.dtype, w.shape, _size(w)) for w in weights),
            weights,
        )
        for number, weights in enumerate(files, 1)
    ]


def _write(
    folder: Path,
    shards: Sequence[_Shard],
    workers: Executor | None,
    progress: Progress | None,
) -> list[str]:
    tell = progress or silent
    tell("export", 0, len(shards))
    for done, (path, header, weights) in enumerate(shards, 1):
        with disk.created(path) as descriptor:
            disk.write_at(descriptor, path, 0, header)
            if workers is None:
                _copy(descriptor, path, len(header), weights)
            else:
                disk.truncate(descriptor, path, len(header) + sum(map(_size, weights)))
            disk.fsync_file(descriptor, path)
        tell("export", done, len(shards))
    if workers is not None:
        _have_copied(_jobs(folder, shards), workers, tell)
    index = {weight.name: shard.path.name for shard in shards for weight in shard.weights}
    total = sum(_size(weight) for shard in shards for weight in shard.weights)
    document = {"metadata": {"total_size": total}, "weight_map": index}
    disk.write_new(folder / INDEX, json.dumps(document, indent=2).encode())
    return [*(shard.path.name for shard in shards), INDEX]


def _copy(descriptor: int, path: Path, at: int, weights: Sequence[Weight]) -> None:
    for weight in weights:
        for source, start, end in weight.spans:
            with reads.holding(source, [(start, end)]):
                disk.copy_at(descriptor, path, at, source, start, end)
            at += end - start


def _jobs(folder: Path, shards: Sequence[_Shard]) -> list[Job]:
    """What workers copy to where."""
    places = []
    for path, header, weights in shards:
        at = len(header)
        for weight in weights:
            spans = tuple(Source(str(file.absolute()), a, b, "") for file, a, b in weight.spans)
            places.append(Place(path, at, Computed("copy", "", _size(weight), (spans,))))
            at += _size(weight)
    return job_list.of(folder, folder / "jobs", places)


def _have_copied(jobs: Sequence[Job], workers: Executor, progress: Progress) -> None:
    """Have the workers do these jobs, and read back what they wrote."""
    job_list.begin(jobs)
    job_list.refuse_unlike(job_list.done(jobs, workers, progress), workers, progress)
    disk.remove_file(jobs[0].record)


def _size(weight: Weight) -> int:
    return sum(end - start for _, start, end in weight.spans)
