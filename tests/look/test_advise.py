"""What `advise` says of runs that really diverged, and of healthy ones that look as if."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptsurgeon.logs.curves import Branch, Curve, Curves, of_rows
from ckptsurgeon.logs.rows import of_file
from ckptsurgeon.look.advise import judge
from ckptsurgeon.look.advise.rises import cusum, onset
from ckptsurgeon.look.advise.rules import falls, sigma, zclip
from tests.look.advised_runs import CASES, ITERATIONS, SEEDS, curves, kept, make
from tests.look.stability_monitor import CURVES, METRICS, VERDICTS, column
from tests.support.launch import launch, run_module

SICK = [name for name, case in CASES.items() if case.event is not None]
SOUND = [name for name, case in CASES.items() if case.event is None]
NEAR = max(10, ITERATIONS // 100)


def read(name: str, seed: int, folder: Path) -> Curves:
    file = folder / f"{name}.csv"
    file.write_bytes(gzip.decompress(kept(name, seed).read_bytes()))
    return of_file(file, {})


# --- runs of the real trainer --------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SICK)
def test_the_onset_is_where_the_cause_had_its_first_effect(
    name: str, seed: int, tmp_path: Path
) -> None:
    told = judge(read(name, seed, tmp_path))
    bad = [spike for spike in told.spikes if spike.malignant]
    assert len(bad) == 1
    event = CASES[name].event
    assert event is not None and abs(bad[0].first - event) <= NEAR
    assert told.verdict == ("diverged" if bad[0].last is None else "recovered")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_made_of_a_healthy_run(name: str, seed: int, tmp_path: Path) -> None:
    told = judge(read(name, seed, tmp_path))
    assert told.verdict == "healthy"
    assert not any(spike.malignant for spike in told.spikes)


def test_other_data_is_named_as_such(tmp_path: Path) -> None:
    told = judge(read("data-switch", 1, tmp_path))
    assert [spike.first for spike in told.spikes if spike.shift] == [301]


def test_the_loss_scale_is_among_the_signs(tmp_path: Path) -> None:
    told = judge(read("scale-collapse", 2, tmp_path))
    assert told.spike is not None
    assert {sign.signal for sign in told.spike.signs} == {"loss", "grad-norm", "loss-scale"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_the_curves_are_those_of_the_real_trainer(name: str, seed: int, tmp_path: Path) -> None:
    """Made anew they lead to the same verdict; another CPU may round otherwise."""
    file = tmp_path / "anew.csv"
    file.write_text(curves(make(tmp_path, name, seed)))
    anew, event = judge(of_file(file, {})), CASES[name].event
    bad = [spike for spike in anew.spikes if spike.malignant]
    assert bool(bad) == (event is not None)
    assert all(event is not None and abs(spike.first - event) <= NEAR for spike in bad)


# --- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("path", sorted(CURVES.glob("*.csv.gz")), ids=lambda path: path.name[:-7])
def test_six_sigma_is_what_olmo_core_counts(path: Path, name: str) -> None:
    steps, values = column(path, name)
    told = json.loads(VERDICTS.read_text())["spikes"][path.name][name]
    assert np.array(steps)[sigma(np.array(values), 128, 6.0)].tolist() == told


@pytest.mark.slow
def test_the_verdicts_are_those_of_olmo_core(tmp_path: Path) -> None:
    version = json.loads(VERDICTS.read_text())["ai2-olmo-core"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "olmo")]
    subprocess.run([*pip, "--no-deps", f"ai2-olmo-core=={version}"], check=True)
    needed = ("cached_path", "bettermap", "dataclass-extensions")
    subprocess.run([*pip, *needed], check=True)
    paths = os.pathsep.join([str(tmp_path / "olmo"), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = [sys.executable, "-m", "tests.look.stability_monitor", str(tmp_path / "told.json")]
    subprocess.run(script, check=True, env={**os.environ, "PYTHONPATH": paths})
    assert json.loads((tmp_path / "told.json").read_text()) == json.loads(VERDICTS.read_text())


def test_seven_sigma_needs_a_thousand_points() -> None:
    values = np.random.default_rng(0).normal(2.0, 0.1, 1500)
    values[[900, 1200]] += 1.0
    assert np.flatnonzero(sigma(values, 1000, 7.0)).tolist() == [1200]


def test_a_constant_is_never_a_spike() -> None:
    values = np.full(400, 2.0)
    assert not sigma(values, 128, 6.0).any() and cusum(values) is None


def test_zclip_takes_an_outlier_in_only_as_far_as_it_would_be_clipped() -> None:
    values = np.random.default_rng(1).normal(1.0, 0.05, 300)
    values[200:203] = 50.0
    assert zclip(values)[200:203].all()


def test_three_halvings_within_fifty_steps() -> None:
    steps = np.arange(0, 200, 10)
    slow = 2.0 ** (16 - np.arange(20) // 6)
    fast = np.where(steps < 100, 65536.0, 65536.0 / 2.0 ** np.minimum((steps - 90) // 10, 5))
    assert not falls(steps, slow)
    ((first, last),) = falls(steps, fast)
    assert (steps[first], steps[last]) == (100, 140)


def test_a_slow_rise_is_found_where_it_began() -> None:
    noise = np.random.default_rng(2).normal(0, 0.1, 600)
    rise = np.where(np.arange(600) < 300, 2.0, 2.0 + 0.005 * (np.arange(600) - 300))
    found = cusum(rise + noise)
    assert found is not None and found.begin < found.seen < 420
    assert abs(onset(rise + noise, found, 3.5) - 300) <= 20


# --- what can't be told --------------------------------------------------------------------------


def curve(values: Any, signal: str = "loss", every: int = 1) -> Branch:
    values = np.asarray(values, float)
    steps = np.arange(1, len(values) + 1) * every
    return {signal: Curve(steps, values, np.full(len(values), math.nan))}


@pytest.mark.parametrize("points", [1, 2, 20])
def test_too_few_points_tell_nothing(points: int) -> None:
    told = judge(Curves(curve(np.linspace(3.0, 9.0, points), every=1000)))
    assert told.verdict == "unknown" and told.reason.endswith(f"the log has {points}")
    assert not told.spikes and told.spike is None


@pytest.mark.parametrize("points", [50, 100])
def test_a_short_log_that_only_rises_has_diverged(points: int) -> None:
    told = judge(Curves(curve(np.linspace(3.0, 9.0, points), every=1000)))
    assert told.verdict == "diverged" and told.spike is not None


def test_nan_is_answereven_of_few_points() -> None:
    told = judge(Curves(curve([3.0, 2.9, 2.8, math.nan, math.nan, math.nan])))
    assert told.verdict == "diverged" and told.spike is not None and told.spike.first == 4


def test_a_run_of_nan_from_its_first_step() -> None:
    told = judge(Curves(curve([math.nan] * 20)))
    assert told.verdict == "diverged" and told.spike is not None
    assert told.spike.first == 1 and told.spike.level is None


def test_one_nan_that_was_passed_over_is_no_divergence() -> None:
    values = np.random.default_rng(3).normal(2.0, 0.1, 300)
    values[200] = math.nan
    told = judge(Curves(curve(values)))
    assert told.verdict == "healthy"


def test_the_end_of_the_log_may_be_too_early() -> None:
    values = np.random.default_rng(4).normal(2.0, 0.1, 300)
    values[280:] += 3.0
    told = judge(Curves(curve(values)))
    assert told.verdict == "too early" and told.spike is not None and told.spike.first == 281


def test_no_loss_is_no_verdict() -> None:
    told = judge(Curves(curve([1.0, 2.0], signal="grad-norm")))
    assert told.verdict == "unknown" and "loss" in told.reason


# --- going back in a log -------------------------------------------------------------------------


def test_rows_that_were_trained_again_are_left() -> None:
    rows = [(step, {"loss": 1.0}, math.nan) for step in (1, 2, 3, 4)]
    rows += [(step, {"loss": 2.0}, math.nan) for step in (3, 4, 5)]
    read = of_rows(rows, Path("log"))
    assert read.kept["loss"].values.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert [branch["loss"].steps.tolist() for branch in read.left] == [[3, 4]]


def test_what_the_bundled_trainer_prints_is_read_below_its_promise(
    tmp_path: Path, corpus: Path
) -> None:
    """Its first line is an object, and no row of a table."""
    made = [f"save={tmp_path / 'run'}", f"data={corpus}"]
    done = launch("--config=train/configs/tiny.yaml", "--from-scratch", *made)
    (tmp_path / "run.log").write_text(done.stdout)
    assert of_file(tmp_path / "run.log", {}).kept["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6]


# --- the demo ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_following_the_advice_recovers_and_the_control_does_not(
    tmp_path: Path, corpus: Path
) -> None:
    """The demo's run: it diverges, and diverges again when it is only rolled back."""
    root = tmp_path / "run"
    launch("--config=train/configs/demo.yaml", "--from-scratch", f"save={root}", f"data={corpus}")
    recipe = tmp_path / "recipe.yaml"
    run_module("ckptsurgeon", "advise", "-C", root, "-o", recipe, status=3)
    tails = {}
    for name in ("control", "advised"):
        copy = shutil.copytree(root, tmp_path / name, symlinks=True)
        if name == "advised":
            run_module("ckptsurgeon", "apply", recipe, "-C", copy, "--yes")
        else:
            answer = run_module("ckptsurgeon", "advise", "-C", copy, "--json", status=3)
            back = json.loads(answer.stdout)["back_to"]
            run_module("ckptsurgeon", "rollback", "--to", back, "-C", copy, "--yes")
        launch(f"--config={copy / 'train.yaml'}")
        file = tmp_path / f"{name}.csv"
        file.write_text(curves(copy))
        told = judge(of_file(file, {}))
        tails[name] = told.curves.kept["loss"].values[-20:].mean(), told.verdict
    assert tails["control"][1] == "diverged" and tails["advised"][1] == "healthy"
    assert tails["advised"][0] < tails["control"][0] - 0.4
