"""MLflow's file store as MLflow 3.17 writes it, without it: what `tests/formats/` has of it, as far
as a training logs it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.tracker_databases import START

EXPERIMENT = "130141250159993947"
_META = """artifact_uri: file:///mlruns/{experiment}/{run}/artifacts
end_time: null
entry_point_name: ''
experiment_id: '{experiment}'
lifecycle_stage: active
run_id: {run}
run_name: {name}
source_name: ''
source_type: 4
source_version: ''
start_time: {begun}
status: 1
tags: []
user_id: me
"""


def log_to_mlruns(
    path: Path,
    points: Iterable[tuple[int, Mapping[str, float]]],
    *,
    run: str = "a" * 32,
    name: str = "train",
    time: float = START,
) -> None:
    """Each point of a run, a second apart, as `mlflow.log_metrics` logs it."""
    folder = path / EXPERIMENT / run
    if not folder.exists():
        for inner in ("metrics", "params", "artifacts", "tags"):
            (folder / inner).mkdir(parents=True)
        meta = _META.format(experiment=EXPERIMENT, run=run, name=name, begun=int(time * 1000))
        (folder / "meta.yaml").write_text(meta)
        (folder / "params/lr").write_text("0.1")
        (folder / "tags/mlflow.runName").write_text(name)
    for i, (step, values) in enumerate(points):
        for key, value in values.items():
            file = folder / "metrics" / key
            file.parent.mkdir(exist_ok=True)
            with file.open("a") as lines:
                lines.write(f"{int((time + i) * 1000)} {value} {step}\n")


def mlruns_curves(path: Path, key: str = "loss") -> dict[str, list[tuple[int, float]]]:
    """Name of each run that MLflow lists → steps and values of one metric, in the order of the
    lines."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for meta in path.glob("*/*/meta.yaml"):
        file = meta.parent / "metrics" / key
        if file.exists():
            name = re.findall("(?m)^run_name: (.+)$", meta.read_text())[0]
            rows = (line.split() for line in file.read_text().splitlines())
            curves[name] = [(int(step), float(value)) for _, value, step in rows]
    return curves
