"""The weights of one step as safetensors files with an index, for evaluation elsewhere.

Bytes go from file to file inside the kernel; of no tensor more than its place is in memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

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
from ckptsurgeon.plans.sources import Source
from ckptsurgeon.progress import Progress, silent
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.fork import make_partial, refuse_place
from ckptsurgeon.transaction import job_list
from ckptsurgeon.transaction.computing import Place

SHARD_BYTES = 5_000_000_000
"""Of one file, unless a single tensor is larger."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
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
        written = _write(partial, files, workers, progress)
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


def _write(
    folder: Path,
    files: list[list[Weight]],
    workers: Executor | None,
    progress: Progress | None,
) -> list[str]:
    index: dict[str, str] = {}
    places: list[Place] = []
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for done, (name, weights) in enumerate(zip(names, files, strict=True), 1):
        path = folder / name
        header = safetensors_header.encode((w.name, w.dtype, w.shape, _size(w)) for w in weights)
        index |= dict.fromkeys((weight.name for weight in weights), name)
        with disk.created(path) as descriptor:
            disk.write_at(descriptor, path, 0, header)
            if workers is None:
                _copy(descriptor, path, len(header), weights)
            else:
                disk.truncate(descriptor, path, len(header) + sum(map(_size, weights)))
                places += _placed(path, len(header), weights)
            disk.fsync_file(descriptor, path)
        if progress is not None:
            progress("export", done, len(files))
    if workers is not None:
        _have_copied(folder, places, workers, progress or silent)
    total = sum(_size(weight) for weights in files for weight in weights)
    document = {"metadata": {"total_size": total}, "weight_map": index}
    disk.write_new(folder / INDEX, json.dumps(document, indent=2).encode())
    return [*names, INDEX]


def _copy(descriptor: int, path: Path, at: int, weights: Sequence[Weight]) -> None:
    for weight in weights:
        for source, start, end in weight.spans:
            disk.copy_at(descriptor, path, at, source, start, end)
            at += end - start


def _placed(path: Path, at: int, weights: Sequence[Weight]) -> Iterator[Place]:
    """What a worker copies to where."""
    for weight in weights:
        spans = tuple(Source(str(file.absolute()), a, b, "") for file, a, b in weight.spans)
        yield Place(path, at, Computed("copy", "", _size(weight), (spans,)))
        at += _size(weight)


def _have_copied(
    folder: Path, places: Sequence[Place], workers: Executor, progress: Progress
) -> None:
    """Have the workers fill these places, and read them back."""
    record = folder / "jobs"
    jobs = job_list.of(folder, record, places)
    job_list.begin(jobs)
    job_list.refuse_unlike(job_list.done(jobs, workers, progress), workers, progress)
    disk.remove_file(record)


def _size(weight: Weight) -> int:
    return sum(end - start for _, start, end in weight.spans)
