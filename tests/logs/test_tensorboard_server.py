"""A real TensorBoard on the result of a cut serves exactly the points that were kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptsurgeon.logs import cut, note
from tests.support.training_log import START, Job, Point, all_points, apply, marks, truth, write

PATIENCE = 600.0
"""Seconds until a server that does not answer is given up."""


@contextmanager
def served(logs: Path, load_fast: str) -> Iterator[str]:
    """The address of a TensorBoard on `logs`."""
    command = [
        *(sys.executable, "-m", "tensorboard.main", f"--logdir={logs}", "--port=0"),
        *(f"--load_fast={load_fast}", "--samples_per_plugin=scalars=100000", "--host=127.0.0.1"),
    ]
    output = logs.parent / f"server-{load_fast}"
    with output.open("wb") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "PYTHONWARNINGS": "ignore"}
        )
    try:
        end = time.monotonic() + PATIENCE
        found = None
        while found is None and time.monotonic() < end and server.poll() is None:
            time.sleep(0.2)
            found = re.search(r"http://[\w.]+:\d+/", output.read_text())
        assert found is not None, output.read_text()
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def ask(address: str, path: str, **query: str) -> object:
    with urllib.request.urlopen(f"{address}{path}?{urllib.parse.urlencode(query)}") as answer:
        return json.load(answer)


def served_points(address: str, wanted: dict[str, int]) -> dict[str, list[Point]]:
    """All scalar points by run, once the server has read as many as wanted."""
    end = time.monotonic() + PATIENCE
    while True:
        found: dict[str, list[Point]] = {}
        tags = ask(address, "data/plugin/scalars/tags")
        assert isinstance(tags, dict)
        for run, named in tags.items():
            for tag in named:
                try:
                    rows = ask(address, "data/plugin/scalars/scalars", run=run, tag=tag)
                except urllib.error.HTTPError:  # read between both questions
                    continue
                assert isinstance(rows, list)
                found.setdefault(run, []).extend((tag, row[1], row[0]) for row in rows)
        counts = {run: len(points) for run, points in found.items()}
        if counts == wanted or time.monotonic() > end:
            return {run: sorted(points) for run, points in found.items()}
        time.sleep(0.5)


def scalars(points: list[Point]) -> list[Point]:
    return sorted(point for point in points if not point[0].endswith("/text_summary"))


@pytest.mark.parametrize("skew", [0, -55 * 3600])
@pytest.mark.parametrize("load_fast", ["true", "false"])
@pytest.mark.long
def test_the_server_shows_what_was_kept(load_fast: str, skew: int, tmp_path: Path) -> None:
    """Also when a writer's clock was behind, so that its file's name sorts before the older one."""
    logs = tmp_path / "logs"
    a = Job(1, 20, START, evaluate=5)
    b = Job(16, 40, a.wall(20) + 600, evaluate=5, torn=13, skew=skew)
    c = Job(29, 35, b.wall(40) + 600, evaluate=5)
    for job in (a, b, c):
        write(logs, job)
    changes, _ = cut.truncate(logs, tmp_path, marks(28, b.wall(28) + 2), keep_as="glitch")
    apply(changes, tmp_path)
    timeline = "**rollback 40 → 28**: the loss went up"
    apply([note.note(logs, tmp_path, 28, timeline, c.wall(35) + 99)], tmp_path)
    expected = {
        ".": scalars(truth((a, 15), (b, 28))),
        "glitch": scalars(all_points(logs / "glitch")),
        "glitch-2": scalars(all_points(logs / "glitch-2")),
    }
    with served(logs, load_fast) as address:
        found = served_points(address, {run: len(points) for run, points in expected.items()})
        shown = ask(address, "data/plugin/text/text", run=".", tag=note.TAG)
    assert found == expected
    assert isinstance(shown, list)
    assert [row["step"] for row in shown] == [28]
    assert "<strong>rollback 40 → 28</strong>: the loss went up" in shown[0]["text"]
