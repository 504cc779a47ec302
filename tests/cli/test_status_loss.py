"""What `status` says of the loss: the verdict of `advise`, at a glance."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ckptsurgeon.logs.tensorboard import scalars
from ckptsurgeon.look import loss_verdict
from ckptsurgeon.look.loss_tail import loss_tail
from ckptsurgeon.report.sparkline import headline
from ckptsurgeon.run.run import Run
from tests.cli.conftest import Surgeon, on_terminal
from tests.support.event_logs import spiked, write_log
from tests.support.tiny_run import make_run


def test_status_shows_the_loss_and_what_is_wrong_with_it(surgeon: Surgeon, diverged: Path) -> None:
    shown = surgeon("status", "-C", diverged).stdout
    assert "█" in shown and "steps 361 to 400: 9 to 9" in shown
    head = shown.splitlines()[2:4]  # below the name of the run
    assert head[0] == "  the loss diverged at step 201: 1.97 → 9"
    assert head[1].startswith(f"      next: ckptsurgeon -C {diverged} advise")


def test_status_says_it_in_json(surgeon: Surgeon, diverged: Path, tmp_path: Path) -> None:
    """By event files, and by a table as Lightning writes it; null where no loss was logged."""
    by_events = json.loads(surgeon("status", "--json", "-C", diverged).stdout)["loss"]
    assert by_events["step"] == 400 and by_events["value"] == pytest.approx(9, abs=0.5)
    assert by_events["problem"] == "the loss diverged at step 201: 1.97 → 9"
    root = make_run(tmp_path / "table")
    assert json.loads(surgeon("status", "--json", "-C", root).stdout)["loss"] is None
    losses = [2.0] * 90 + [math.nan] * 10
    lines = [f"0,{step},{loss}\n" for step, loss in enumerate(losses)]
    (root / "metrics.csv").write_text("".join(["epoch,step,train_loss\n", *lines]))
    assert json.loads(surgeon("status", "--json", "-C", root).stdout)["loss"] == {
        "step": 99,
        "value": "nan",
        "problem": "the loss diverged: NaN from step 90 on",
        "next": f"ckptsurgeon -C {root} advise --json",
        "comment": "where to go back to, and what others did",
    }


def test_status_loads_no_numpy_to_say_so(
    surgeon: Surgeon, diverged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what verify needs: the modules are most of what reading the loss's tail costs."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    code, shown = on_terminal("", "-C", diverged, "status")
    loaded = {line.rpartition("|")[2].strip() for line in shown.splitlines() if "|" in line}
    assert code == 0 and "ckptsurgeon.look.loss_verdict" in loaded
    assert not {"numpy", "ckptsurgeon.look.vitals", "ckptsurgeon.logs.curves"} & loaded


def test_a_glance_reads_few_events_field_by_field(
    diverged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly: list[bytes] = []
    read = scalars._values
    monkeypatch.setattr(scalars, "_values", lambda event: (slowly.append(event), read(event))[1])
    run = Run.open(diverged)
    seen = loss_tail(run)
    assert seen is not None and seen.whole and len(seen.values) == 400
    assert len(slowly) == 1  # the others have its bytes but for time, step and value
    write_log(diverged / "tensorboard", spiked(20), first=290)  # training went back
    seen = loss_tail(run)
    assert seen is not None and not seen.whole and loss_verdict.diverged(seen) is None


def test_a_nan_that_the_trainer_logs_as_0_is_one_at_a_glance(tmp_path: Path) -> None:
    """As it is for advise: 0 beside a gradient norm that is no number."""
    losses = [2.0] * 90 + [0.0] * 10
    make_run(tmp_path, (2, 4))
    write_log(tmp_path / "runs", losses, tag="train/loss")
    seen = loss_tail(Run.open(tmp_path))
    assert seen is not None and list(seen.values) == losses
    norms = {"train/grad_norm": [1.0] * 90 + [math.nan] * 10}
    write_log(tmp_path / "runs", losses, tag="train/loss", more=norms)
    seen = loss_tail(Run.open(tmp_path))
    assert seen is not None and loss_verdict.broken(seen) == 91


@pytest.mark.parametrize("losses", [spiked(), spiked(at=1000), [2.0] * 190 + [math.nan] * 10])
def test_without_event_files_the_history_of_the_trainer_says_the_same(
    tmp_path: Path, losses: list[float]
) -> None:
    """Its newest step has all that it logged; NaN is 0 there, beside a norm that is none."""
    root = make_run(tmp_path / "run", (2, len(losses)))
    state = root / f"checkpoint-{len(losses)}" / "trainer_state.json"
    history = [
        {"step": step, "loss": 0.0, "grad_norm": math.nan}
        if math.isnan(value)
        else {"step": step, "loss": value, "grad_norm": 1.0}
        for step, value in enumerate(losses, 1)
    ]
    run_time = {"step": len(losses), "train_loss": 3.0, "train_runtime": 1.0}
    document = {**json.loads(state.read_text()), "log_history": [*history, run_time]}
    state.write_text(json.dumps(document))
    said = loss_tail(Run.open(root))
    write_log(root / "runs", losses, tag="train/loss")
    logged = loss_tail(Run.open(root))
    assert said is not None and logged is not None and said.whole and logged.whole
    assert said.steps == list(logged.steps)
    assert said.values == pytest.approx(logged.values, rel=1e-6, nan_ok=True)
    assert headline(said) == headline(logged)
