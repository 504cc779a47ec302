"""One run of MLflow's file store: `<experiment>/<run>/` with `meta.yaml`, metrics, params and tags.

The layout is that of `mlflow/store/tracking/file_store.py`, 1.30 to 3.17.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptsurgeon import disk, whole_file
from ckptsurgeon.logs import metrics, signals
from ckptsurgeon.logs.metrics import SYSTEM
from ckptsurgeon.logs.mlruns.metric_file import MetricFile, at_the_end, at_the_start
from ckptsurgeon.logs.points import Points
from ckptsurgeon.logs.tracked import TrackedRun

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

META = "meta.yaml"
NAME = "mlflow.runName"
CUT = "ckptsurgeon.cut_from"
"""The tag of a run that a surgery made; its value is the run that it was cut from."""
MOST = 1 << 20
"""Bytes of a text that is no metric."""


class RunFolder:
    """It reads, and never writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name

    @cached_property
    def meta(self) -> dict[str, Any]:
        """What `meta.yaml` says; nothing where it can't be read, as MLflow lists no such run."""
        import yaml

        try:
            found = yaml.safe_load(whole_file.read(self.path / META, MOST))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        """As MLflow shows it."""
        return str(self.meta.get("run_name") or self._tag(NAME) or self.id)

    def counts(self) -> bool:
        """Whether it is a run that a trainer logged and nobody deleted: MLflow has it."""
        named = self.meta.get("run_id", self.meta.get("run_uuid")) == self.id
        active = self.meta.get("lifecycle_stage", "active") == "active"
        return named and active and not disk.exists(self.path / "tags" / CUT)

    def _tag(self, key: str) -> str:
        try:
            return whole_file.read(self.path / "tags" / key, MOST).decode("utf-8", "replace")
        except OSError:
            return ""

    def traces(self) -> int:
        """How many traces of the experiment say that this run made them."""
        folder = self.path.parent / "traces"
        named = disk.matching(folder, "*/request_metadata/mlflow.sourceRun", past_closed=True)
        return sum(whole_file.read(path, MOST) == self.id.encode() for path in named)

    def files(self, kind: str) -> dict[str, Path]:
        """Name → file of what it has of `metrics`, `params` or `tags`; a link is left alone."""
        folder = self.path / kind
        found = {}
        for here, inner, files in disk.walk(folder):
            inner.sort()
            for path in (Path(here, name) for name in sorted(files)):
                if disk.is_file(path) and not disk.is_link(path):
                    found[path.relative_to(folder).as_posix()] = path
        return found

    def texts(self) -> Iterator[Path]:
        """All files of it but artifacts."""
        for kind in ("metrics", "params", "tags"):
            yield from self.files(kind).values()
        if disk.is_file(self.path / META):
            yield self.path / META

    # --- points ----------------------------------------------------------------------------------

    def as_run(self, *, whole: bool) -> TrackedRun | None:
        """It as a run of the store, or None where nothing was logged. Its highest step is looked
        for in all its points, or at the ends of its files alone."""
        highest, ended = -1, 0.0
        for name, path in self.files("metrics").items():
            points = at_the_end(path)
            ended = max([ended, *(time for _, time, _ in points)])
            if not name.startswith(SYSTEM):
                more = MetricFile(path).steps.tolist() if whole else []
                highest = max([highest, *(step for step, _, _ in points), *more])
        if not ended:
            return None
        begun = self.meta.get("start_time")
        seconds = begun / 1000 if isinstance(begun, int) else 0.0
        return TrackedRun(self.id, self.name, highest, seconds, ended)

    def steps_at_the(self, end: str) -> list[int]:
        """The steps of the first or the last points of what tells its time."""
        files = self.files("metrics")
        sizes = {
            name: path.stat().st_size for name, path in files.items() if not name.startswith(SYSTEM)
        }
        losses = signals.commonest(sizes, {}).get(signals.LOSS, [])
        name = losses[0] if losses else max(sizes, key=lambda name: sizes[name], default=None)
        if name is None:
            return []
        points = at_the_start(files[name]) if end == "first" else at_the_end(files[name])
        return [step for step, _, _ in points]

    def points(self) -> tuple[list[MetricFile], Points]:
        """All of them, in the order in which they were logged as far as times tell, what tells the
        time first; `rows` counts the lines of the files, one file after the other."""
        import numpy as np

        found = {name: MetricFile(path) for name, path in self.files("metrics").items()}
        found = {name: file for name, file in found.items() if len(file)}
        files = list(found.values())
        if not files:
            empty = Points.read([])
            return [], empty
        steps = np.concatenate([file.steps for file in files])
        of = np.repeat(np.arange(len(files), dtype=np.int32), [len(file) for file in files])
        walls = np.concatenate([file.walls for file in files])
        # A file is in order, whatever a clock said.
        order = np.concatenate([np.fmax.accumulate(np.nan_to_num(f.walls)) for f in files])
        points = Points(np.arange(len(steps)), steps, walls, of, list(found))
        by_time = np.lexsort((~metrics.clock(points), order))
        return files, Points(by_time, steps[by_time], walls[by_time], of[by_time], points.names)

    def values(self) -> Iterator[dict[str, float]]:
        """The numbers of each point by name."""
        import numpy as np

        files, points = self.points()
        if not files:
            return
        numbers = np.concatenate([file.values for file in files])[points.rows]
        point: dict[str, float] = {}
        for of, step, wall, value in zip(
            points.of.tolist(),
            points.steps.tolist(),
            points.walls.tolist(),
            numbers.tolist(),
            strict=True,
        ):
            name = points.names[of]
            if name.startswith(SYSTEM):
                continue
            if point and (point["step"] != step or name in point):
                yield point
                point = {}
            point |= {"step": step, "timestamp": wall, name: value}
        if point:
            yield point


def by_line(points: Points, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Flags of points as those of the lines of the files, one file after the other."""
    import numpy as np

    out = np.empty(len(flags), bool)
    out[points.rows] = flags
    return out
