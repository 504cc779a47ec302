"""Models that were logged with a run, in MLflow's file store: `<experiment>/models/<model>/`.

MLflow writes each metric of a model into the run and into the model, there with the run's id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import count
from ckptsurgeon.logs.mlruns.metric_file import MetricFile
from ckptsurgeon.logs.mlruns.parting import Parted
from ckptsurgeon.logs.mlruns.run_folder import META, MOST, RunFolder
from ckptsurgeon.plans.edits import AnyChange, Aside, Content, Piece, Rewrite, Span
from ckptsurgeon.plans.log_fields import LOGS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def metrics(
    experiments: Iterable[Path], runs: Collection[str] | None
) -> list[dict[str, MetricFile]]:
    """The files of metrics of each model in these folders, by name; with `runs` their lines
    count."""
    return [
        {key: MetricFile(path, runs) for key, path in model.files("metrics").items()}
        for experiment in sorted(experiments)
        for model in _models(experiment)
    ]


def parted(
    parted: Parted, files: Sequence[MetricFile], stays: NDArray[np.bool_]
) -> Iterator[AnyChange]:
    """What a cut of a run does to its models: their points are those of the branch, or go, where
    they do in the run; and a model that became its output after the step is the branch's."""
    if not stays.any():  # the run itself is the branch, or deleted
        return
    lost = _lost(parted, files, stays)
    for model in _models(parted.folder.path.parent):
        for key, path in model.files("metrics").items():
            yield from _metric(parted, path, lost.get(key, set()))
    yield from _outputs(parted)


def _models(experiment: Path) -> list[RunFolder]:
    found = disk.matching(experiment, "models/m-*", past_closed=True)
    return [RunFolder(path) for path in found if disk.is_folder(path) and not disk.is_link(path)]


def _lost(
    parted: Parted, files: Sequence[MetricFile], stays: NDArray[np.bool_]
) -> dict[str, set[tuple[int, float]]]:
    """Step and time of the points of each metric that do not stay."""
    lost: dict[str, set[tuple[int, float]]] = {}
    at = 0
    for file in files:
        gone = ~stays[at : at + len(file)]
        at += len(file)
        key = file.path.relative_to(parted.folder.path / "metrics").as_posix()
        lost[key] = set(zip(file.steps[gone].tolist(), file.walls[gone].tolist(), strict=True))
    return lost


def _metric(parted: Parted, path: Path, lost: set[tuple[int, float]]) -> Iterator[AnyChange]:
    """The same of one metric of a model, if a line of it goes."""
    import numpy as np

    file, name = MetricFile(path, [parted.run.id]), parted.file(path)
    points = zip(file.steps.tolist(), file.walls.tolist(), strict=True)
    gone = file.own & np.array([point in lost for point in points], bool)
    if not gone.any():
        return
    note = f"{parted.run.name} loses {count(int(gone.sum()), 'point')} of a model"
    if not parted.keep and gone.all():
        yield Aside(name, LOGS)
        return
    pieces: list[Piece] = []
    if parted.keep:
        note = f"the run {parted.name} gets {count(int(gone.sum()), 'point')} of a model"
        old, new = parted.run.id.encode(), parted.id.encode()
        with path.open("rb") as lines:
            for line, ours in zip(lines, gone.tolist(), strict=True):
                pieces.append(line.replace(old, new) if ours else line)
    else:
        pieces += file.spans(name, ~gone)
    content = Content(_joined(pieces), path.stat().st_mtime_ns)
    yield Rewrite(name, LOGS, content, note)


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Lines that are bytes as one piece: the metrics of a model are few."""
    if not all(isinstance(piece, bytes) for piece in pieces):
        return tuple(pieces)
    return (b"".join(piece for piece in pieces if isinstance(piece, bytes)),)


def _outputs(parted: Parted) -> Iterator[AnyChange]:
    """The models that the run has as its outputs after the step."""
    import yaml

    for path in disk.matching(parted.folder.path, f"outputs/m-*/{META}"):
        try:
            found = yaml.safe_load(whole_file.read(path, MOST))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue
        step = found.get("step") if isinstance(found, dict) else None
        if not isinstance(step, int) or step <= parted.cut.marks.iteration:
            continue
        yield Aside(
            parted.file(path.parent), LOGS
        )  # MLflow reads no run with an empty folder there
        if parted.keep:
            new = parted.new / path.relative_to(parted.folder.path)
            whole = Content((Span(parted.file(path), 0, path.stat().st_size),))
            yield Rewrite(parted.file(new), LOGS, whole, "the cut branch", new_file=True)
