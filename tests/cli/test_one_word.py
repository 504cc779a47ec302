"""A law: what is known of a run has one word. No two commands contradict each other about whether
its loss diverged, is healthy, or is not known."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon.look.logged import own
from ckptsurgeon.look.timeline import timeline_of
from ckptsurgeon.report.picture.footer import headline
from ckptsurgeon.run.run import Run
from tests.cli.conftest import invoke
from tests.support.event_logs import spiked, write_log
from tests.support.tiny_run import make_run

HOLDS = {"diverged", "recovered", "healthy", "too early", "unknown"}


@dataclass(frozen=True)
class Loss:
    """A loss that leaves its course `at` a point for some, with some values that are no number."""

    points: int
    at: int = 0
    height: float = 0.0
    lasts: int = 1
    lost: int = 0
    value: float = math.nan
    at_end: bool = False

    def values(self) -> list[float]:
        values = spiked(self.points, self.points + 1)
        for i in range(self.at, min(self.points, self.at + self.lasts)):
            values[i] += self.height
        first = max(0, self.points - self.lost) if self.at_end else min(self.at, self.points)
        lost = min(self.lost, self.points - first)
        values[first : first + lost] = [self.value] * lost
        return values


def words(root: Path) -> dict[str, str]:
    """What each command says of the loss: a word of advise, or the nearest that it can say."""
    told = json.loads(invoke("advise", "--json", "-C", root).stdout)["verdict"]
    assert told in HOLDS
    said = {"advise": told, "advise in words": _first(invoke("advise", "-C", root).stdout)}

    done = invoke("doctor", "--json", "-C", root)
    document = json.loads(done.stdout)
    found = any(item["what"].startswith("the loss diverged") for item in document["findings"])
    said["doctor"] = document["loss"]["verdict"]
    assert found == (said["doctor"] == "diverged") == (done.exit_code == 4)
    text = invoke("doctor", "-C", root).stdout
    assert text.startswith("healthy:") == (told in ("healthy", "recovered")), text
    assert ("the loss diverged" in text) == (told == "diverged")
    if told in ("too early", "unknown"):
        assert {"too early": "too early to tell", "unknown": "unknown"}[told] in text

    done = invoke("watch", "--once", "--dry-run", "-C", root)
    quiet = done.stdout == "nothing new is wrong\n"
    said["watch"] = "healthy" if quiet else _first(done.stdout)
    assert done.exit_code == 3 * (told == "diverged")

    run = Run.open(root)
    said["report"] = _first(headline(timeline_of(own(run, {}), run)))
    return said


def _first(text: str) -> str:
    """The verdict that a text begins with, after the run's name."""
    return min((text.find(word), word) for word in HOLDS if word in text)[1]


def glance(root: Path) -> str:
    """What `status` says at a glance: it decides less, and never something else."""
    problem = json.loads(invoke("status", "--json", "-C", root).stdout)["loss"]["problem"] or ""
    text = invoke("status", "-C", root).stdout
    assert problem.split("\n")[0][:60] in " ".join(text.split())
    if problem.startswith("the loss diverged"):
        return "diverged"
    return "calm" if "at its best level" in text and not problem else "open"


def holds(loss: Loss, root: Path) -> None:
    make_run(root, (2, 4))
    write_log(root / "runs", loss.values(), tag="train/loss")
    said = words(root)
    assert len(set(said.values())) == 1, said
    seen, told = glance(root), said["advise"]
    assert seen != "diverged" or told == "diverged", (seen, told)
    assert seen != "calm" or told in ("healthy", "recovered", "unknown"), (seen, told)


losses = st.builds(
    Loss,
    points=st.integers(1, 420),
    at=st.integers(0, 400),
    height=st.sampled_from([0.0, 0.15, 1.0, 5.0]),
    lasts=st.sampled_from([1, 10, 60, 500]),
    lost=st.sampled_from([0, 0, 1, 2, 3, 30]),
    value=st.sampled_from([math.nan, math.inf]),
    at_end=st.booleans(),
)


@pytest.mark.long
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(losses)
@example(Loss(265, 250, 3.0, 500))  # too early to tell
@example(Loss(20))  # too few points
@example(Loss(302, lost=2, at_end=True))
@example(Loss(305, lost=5, value=math.inf, at_end=True))
@example(Loss(400, 250, 3.0, 60))  # recovered
def test_no_two_commands_contradict_each_other(
    tmp_path_factory: pytest.TempPathFactory, loss: Loss
) -> None:
    holds(loss, tmp_path_factory.mktemp("curve") / "run")


def test_of_what_is_not_known_nothing_is_called_healthy(tmp_path: Path) -> None:
    holds(Loss(265, 250, 3.0, 500), tmp_path / "early")
    make_run(tmp_path / "bare", (2, 4))
    told = invoke("doctor", "-C", tmp_path / "bare").stdout
    assert told.startswith("sound: bare, 2 steps\n  the loss   unknown: no logs were found")


def test_a_loss_that_is_no_number_is_not_called_risen(tmp_path: Path) -> None:
    make_run(tmp_path, (2, 4))
    write_log(tmp_path / "runs", [*spiked(300, 301), math.nan, math.nan], tag="train/loss")
    told = " ".join(invoke("advise", "-C", tmp_path).stdout.split())
    assert "too early to tell: the loss is NaN at 301, and the log ends 1 step later" in told
