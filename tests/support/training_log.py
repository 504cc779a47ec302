"""TensorBoard logs of an invented training, with the truth about each event."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter

from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.plans.edits import AnyChange, Aside, Rewrite, Span

Point = tuple[str, int, float]
"""Tag, step, wall time: walls are unique per job and iteration, so a point is one event."""

START = 1_631_869_980.0


def samples(iteration: int) -> int:
    """Consumed samples with a batch size that ramps up."""
    ramp = min(iteration, 60)
    return 16 * iteration + 8 * ramp * (ramp - 1) + 16 * 60 * max(0, iteration - 60)


def tokens(iteration: int) -> int:
    return 2048 * samples(iteration)


def gigaflos(consumed: int) -> float:
    """After so many samples."""
    return consumed * 1742.375


def scalar(tag: str, value: float, new_style: bool) -> Summary.Value:
    if not new_style:
        return Summary.Value(tag=tag, simple_value=value)
    plugin = SummaryMetadata.PluginData(plugin_name="scalars")
    tensor = TensorProto(dtype="DT_FLOAT", float_val=[value], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin))


def text(tag: str, value: str) -> Summary.Value:
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype="DT_STRING", string_val=[value.encode()])
    return Summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin))


Logged = Iterator[tuple[str, int, float]]


def megatron(job: Job, iteration: int) -> Logged:
    """What Megatron-DeepSpeed logs: (tag, x, value)."""
    if iteration % job.interval and iteration % job.evaluate:
        return
    at = job.consumed(iteration)
    x = {
        "": iteration,
        " vs samples": at,
        " vs tokens": 2048 * at,
        " vs gigaflos (without embeddings)": int(gigaflos(at)),
    }
    if iteration % job.interval == 0:
        yield "steps-vs-samples/y=steps,x=samples", at, iteration
        yield "steps-vs-samples/y=samples,x=steps", iteration, at
        for tag in ("learning-rate/learning-rate", "grad-norm/grad-norm"):
            for axis in ("", " vs samples", " vs tokens"):
                yield tag + axis, x[axis], iteration
        if not job.blip:
            job.blip = True
            yield "iteration-time/world_size", iteration, 64
            yield "iteration-time/world_size", iteration + 1, 0
        for axis in x:
            yield "lm-loss-training/lm loss" + axis, x[axis], 1 / iteration
        yield "iteration-time/iteration-time", iteration, 4.2
    if iteration % job.evaluate == 0:
        for tag in ("lm loss validation", "lm loss validation ppl"):
            for axis in x:
                yield f"lm-loss-validation/{tag}{axis}", x[axis], 1 / iteration


def deepspeed_monitor(job: Job, iteration: int) -> Logged:
    """What DeepSpeed's monitor logs: nothing is over iterations."""
    for name in ("train_loss", "lr", "loss_scale"):
        yield f"Train/Samples/{name}", samples(iteration), 1 / iteration


def tf1(job: Job, iteration: int) -> Logged:
    for name in ("loss", "accuracy", "gradient"):
        yield name, iteration, 1 / iteration


@dataclass
class Job:
    """One launch: iterations `first` to `last`, from `began` on the server's clock."""

    first: int
    last: int
    began: float
    pace: float = 20.0
    skew: float = 0.0
    interval: int = 1
    evaluate: int = 50
    torn: int = 0
    new_style: bool = True
    together: bool = False
    logged: Callable[[Job, int], Logged] = megatron
    consumed: Callable[[int], int] = samples
    skipped: Sequence[int] = ()
    blip: bool = False
    points: list[tuple[Point, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"events.out.tfevents.{int(self.began + self.skew)}.node{self.first}.4242.0"

    def wall(self, iteration: int) -> float:
        """When an iteration was logged, on the server's clock."""
        return self.began + 30 + self.pace * (iteration - self.first)


def write(directory: Path, job: Job) -> Path:
    """The event file of a job; `job.points` then are its points with their iterations."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / job.name
    with path.open("wb") as file:
        writer = RecordWriter(file)

        def event(wall: float, step: int, values: list[Summary.Value]) -> None:
            message = Event(wall_time=wall, step=step, summary=Summary(value=values))
            writer.write(message.SerializeToString())

        version = Event(wall_time=job.began + job.skew, file_version="brain.Event:2")
        writer.write(version.SerializeToString())
        wall = job.began + job.skew + 1
        if job.logged is megatron:
            event(wall, job.first - 1, [text("lr/text_summary", "6e-5")])
            job.points.append((("lr/text_summary", job.first - 1, wall), job.first))
        for iteration in range(job.first, job.last + 1):
            if iteration in job.skipped:
                continue
            wall = job.wall(iteration) + job.skew
            here = list(job.logged(job, iteration))
            job.points += [((tag, x, wall), iteration) for tag, x, _ in here]
            if job.together and here:
                event(wall, iteration, [scalar(t, y, job.new_style) for t, _, y in here])
            else:
                for tag, x, y in here:
                    event(wall, x, [scalar(tag, y, job.new_style)])
    if job.torn:
        whole = path.read_bytes()
        path.write_bytes(whole + whole[: job.torn])  # a record that was not finished
    mtime = wall - job.skew + 1.5
    os.utime(path, (mtime, mtime))
    return path


def truth(*parts: tuple[Job, int]) -> list[Point]:
    """The points of a history: each job up to an iteration."""
    return sorted(point for job, last in parts for point, it in job.points if it <= last)


def points(path: Path) -> list[Point]:
    """What TensorBoard's own loader reads in a file."""
    found = []
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            found.append((value.tag, event.step, event.wall_time))
    return found


def all_points(directory: Path) -> list[Point]:
    return sorted(
        point for path in directory.iterdir() if "tfevents" in path.name for point in points(path)
    )


def marks(iteration: int, saved_at: float | None = None) -> Marks:
    """What a checkpoint of the invented training says."""
    at = samples(iteration)
    return Marks(iteration, at, tokens(iteration), gigaflos(at), saved_at)


def apply(changes: Sequence[AnyChange], root: Path) -> None:
    """Do what the changes ask for, plainly."""
    ready = []
    for change in changes:
        if isinstance(change, Rewrite):
            assert (root / change.file).exists() != change.new_file
            parts = []
            for piece in change.content.pieces:
                if isinstance(piece, Span):
                    parts.append((root / piece.file).read_bytes()[piece.start : piece.end])
                else:
                    parts.append(piece)
            ready.append((change, b"".join(parts)))
    for change in changes:
        if isinstance(change, Aside):
            (root / change.file).unlink()
    for change, data in ready:
        path = root / change.file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        if change.content.mtime_ns is not None:
            os.utime(path, ns=(change.content.mtime_ns, change.content.mtime_ns))
