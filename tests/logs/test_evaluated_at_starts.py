"""A loop that evaluates at each start logs the loaded step again: its training loss is not lost."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.logs import rows
from ckptsurgeon.logs.databases.trackio import Trackio
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.source import Cut, Subject
from ckptsurgeon.logs.wandb import offline_run, record
from ckptsurgeon.plans.edits import Aside
from tests.support import cut_rows, wandb_files
from tests.support.cut_rows import cut
from tests.support.tracker_databases import log_to_trackio, opened


def history(saves: list[tuple[int, int]], norm: bool) -> list[dict[str, float]]:
    """Starts, each of which goes on from a step that is `back` before the end, evaluates it, and
    makes `more` updates; the loss of an update is unique."""
    points: list[dict[str, float]] = []
    end, update = 0, 0
    for back, more in saves:
        start = max(end - back, 0)
        points.append({"step": start, "eval_loss": 3.0, **({"grad_norm": 1.0} if norm else {})})
        for step in range(start + 1, start + more + 1):
            update += 1
            points.append({"step": step, "loss": 2 + update / 1000})
        end = start + more
    return points


def kept(points: list[dict[str, float]], last: int) -> dict[int, float]:
    """The loss of each step on the way to `last`: what was said of it last."""
    there = [point for point in points if "loss" in point]
    return {int(point["step"]): point["loss"] for point in there if point["step"] <= last}


def text(points: list[dict[str, float]], table: bool) -> str:
    if not table:
        return "".join(f"{json.dumps(point)}\n" for point in points)
    out = io.StringIO()
    names = ["step", "loss", "eval_loss", "grad_norm"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    return out.getvalue()


@pytest.mark.parametrize("table", [False, True])
@given(
    saves=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=4),
    norm=st.booleans(),
    off=st.integers(0, 40),
)
def test_each_step_has_its_training_loss(
    tmp_path_factory: pytest.TempPathFactory,
    table: bool,
    saves: list[tuple[int, int]],
    norm: bool,
    off: int,
) -> None:
    points = history(saves, norm)
    log = tmp_path_factory.mktemp("log") / ("log.csv" if table else "log.jsonl")
    log.write_text(text(points, table))
    end = int(points[-1]["step"])
    loss = rows.of_file(log, {}).kept["loss"]
    assert dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True)) == kept(points, end)
    at = max(end - off, 1)
    left = cut(log, at).decode()
    log.write_text(left)
    loss = rows.of_file(log, {}).kept["loss"]
    assert dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True)) == kept(points, at)


COUNT = "train/global_step"
SAVES = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=4)
START = 1_700_000_000


def tracked(points: list[dict[str, float]]) -> list[list[dict[str, float]]]:
    """The points of each start, as a trainer gives them to a tracker."""
    starts: list[list[dict[str, float]]] = []
    for point in points:
        if "eval_loss" in point:
            starts.append([])
        starts[-1].append({COUNT if key == "step" else key: each for key, each in point.items()})
    return starts


def losses(points: list[dict[str, float]]) -> list[tuple[int, float]]:
    return [(int(point[COUNT]), point["loss"]) for point in points if "loss" in point]


@given(saves=SAVES, norm=st.booleans(), off=st.integers(0, 40))
def test_each_step_has_its_training_loss_in_wandb(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, int]], norm: bool, off: int
) -> None:
    root = tmp_path_factory.mktemp("wandb")
    points = history(saves, norm)
    for number, start in enumerate(tracked(points)):
        folder = root / "wandb" / f"offline-run-{START + 100 * number}-abc"
        folder.mkdir(parents=True)
        records = [wandb_files.bytes_field(21, b""), wandb_files.of_run("abc")]
        for i, point in enumerate(start):
            own = {"_timestamp": float(START + 100 * number + i), "_step": i}
            records.append(wandb_files.history({**point, **own}))
        (folder / "run-abc.wandb").write_bytes(wandb_files.framed(records))
    at = max(int(points[-1]["step"]) - off, 1)
    files = sorted(root.rglob("*.wandb"))
    (run,) = offline_run.found(files, root)
    changes, _ = run.cut(Cut(Marks(at), None))
    gone = {change.file for change in changes if isinstance(change, Aside)}
    new = cut_rows.made(root, [each for each in changes if not isinstance(each, Aside)])
    left: list[dict[str, float]] = []
    for path in files:
        name = str(path.relative_to(root))
        data = new.get(name, b"" if name in gone else path.read_bytes())
        said = map(record.said, wandb_files.unframed(data) if data else ())
        left += [each.values for each in said if each.kind == record.HISTORY]
    assert sorted(losses(left)) == sorted(kept(points, at).items())


@given(saves=SAVES, norm=st.booleans(), off=st.integers(0, 40))
def test_each_step_has_its_training_loss_in_trackio(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, int]], norm: bool, off: int
) -> None:
    path = tmp_path_factory.mktemp("trackio") / "p.db"
    points = history(saves, norm)
    flat = [point for start in tracked(points) for point in start]
    log_to_trackio(path, enumerate(flat))
    at = max(int(points[-1]["step"]) - off, 1)
    with opened(path) as database:
        (run,) = Trackio(path, path.parent).runs(database)
        read = Trackio(path, path.parent).points_of(database, run)
    what = Subject("p.db", "leave it")
    flags = Trackio(path, path.parent).leading_to(read, Marks(at), what)
    left = [point for point, stays in zip(flat, flags.tolist(), strict=True) if stays]
    assert sorted(losses(left)) == sorted(kept(points, at).items())
