"""The verdict of `status`, without NumPy, is never another than that of `advise`."""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ckptsurgeon.logs.curves import Branch, Curve, Curves, of_rows
from ckptsurgeon.logs.rows import of_file
from ckptsurgeon.look import loss_verdict
from ckptsurgeon.look.advise import judge, spikes
from ckptsurgeon.look.loss_tail import LossTail
from tests.look.advised_runs import CASES, SEEDS, kept

STRIDE = 45


def ends(kept: Branch) -> Iterator[tuple[LossTail, Curves]]:
    """The log as it was at several times: what its tail holds, and the curves."""
    loss = kept["loss"]
    steps, values = loss.steps.tolist(), loss.values.tolist()
    for n in [*range(110, len(steps), STRIDE), len(steps)]:
        until = {
            name: Curve(c.steps[sel], c.values[sel], c.walls[sel])
            for name, c in kept.items()
            for sel in [c.steps <= steps[n - 1]]
        }
        yield LossTail(steps[:n], values[:n], whole=True), Curves(until)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_no_verdict_is_another_than_that_of_advise(name: str, seed: int, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.csv"
    file.write_bytes(gzip.decompress(kept(name, seed).read_bytes()))
    for seen, curves in ends(of_file(file, {}).kept):
        told, level = judge(curves), loss_verdict.level(seen)
        if (step := loss_verdict.diverged(seen)) is not None:
            assert told.verdict == "diverged" and told.spike is not None
            assert step in [sign.step for sign in told.spike.signs if sign.signal == "loss"]
        elif loss_verdict.broken(seen) is not None:
            assert told.verdict == "diverged"
        elif level is not None and level.calm:
            assert told.verdict in ("healthy", "unknown")
    if told.verdict == "diverged":  # at its end every one of them is clear
        assert loss_verdict.broken(seen) or loss_verdict.diverged(seen)


def jump(points: int, at: int, height: float, seed: int) -> list[float]:
    dice = random.Random(seed)
    base = [2 + 2 / math.sqrt(k) + dice.gauss(0, 0.05) for k in range(1, points + 1)]
    return [value + (height if k >= at else 0.0) for k, value in enumerate(base)]


def looked(values: Sequence[float], whole: bool = True) -> int | None:
    return loss_verdict.diverged(LossTail(range(1, len(values) + 1), values, whole))


@pytest.mark.parametrize("height", (0.1, 0.3, 0.5, 1.0, 5.0))
def test_jumps_of_every_height_agree(height: float) -> None:
    for seed in range(4):
        for at in (140, 250, 320):
            values = jump(400, at, height, seed)
            told = judge(
                of_rows([(k, {"loss": v}, math.nan) for k, v in enumerate(values, 1)], Path())
            )
            step = looked(values)
            if step is not None:
                assert told.verdict == "diverged" and told.spike is not None
                assert told.spike.first == step


@pytest.mark.parametrize("height", (0.3, 1.0, 7.0))
def test_neither_waits_for_less_than_the_other(height: float) -> None:
    """Around the end of its patience: advise counts from where its rule has seen the rise."""
    said = []
    for n in range(250 + loss_verdict.PATIENCE - 4, 250 + loss_verdict.PATIENCE + 24, 2):
        values = jump(n, 250, height, 1)
        rows = [(k, {"loss": value}, math.nan) for k, value in enumerate(values, 1)]
        step = looked(values)
        said.append(step)
        assert step is None or judge(of_rows(rows, Path())).verdict == "diverged", n
    assert said[0] is None and (height < 7 or said[-1] is not None)


def test_what_is_open_is_left_to_advise() -> None:
    jumped = jump(400, 250, 5.0, 1)
    assert looked(jumped) == 251
    assert looked(jumped, whole=False) is None  # what came before may be another level
    assert looked(jumped[:300]) is None  # it may come back
    assert looked(jumped + [2.0] * 60) is None  # it came back
    assert looked(jump(1001, 250, 5.0, 1)) is None  # OLMo 2's rule judges, over 1,000 points
    assert (
        looked([value - 4.9 if k >= 250 else value + 5 for k, value in enumerate(jumped)]) is None
    )
    assert loss_verdict.broken(LossTail(range(4), [1.0, math.nan, math.inf, math.nan])) == 1
    assert loss_verdict.broken(LossTail(range(4), [1.0, 1.0, math.inf, math.nan])) is None


def test_its_numbers_are_those_of_advise() -> None:
    assert loss_verdict.SETTLED == spikes.SETTLED and loss_verdict.PATIENCE == spikes.PATIENCE
    assert spikes.needed("olmo-core") == loss_verdict.WINDOW + 1
    assert spikes.WINDOW["olmo2"] == loss_verdict.MOST
