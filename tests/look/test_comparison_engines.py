"""The trainer's comparison with real DeepSpeed engines: what they print after a surgery."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.logs.printed.comparison import Comparison
from ckptsurgeon.look.listen import listen
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import PEAK, Options, build, make, schedulers, train
from tests.support.deepspeed_schedulers import SECTIONS, as_planned, options
from tests.support.in_process import one_rank

UNKNOWN = ("LambdaLR", "SequentialLR", "CosineAnnealingWarmRestarts")
"""Their next rates are in code, or in a counter that a surgery does not move."""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def operate(root: Path, **recipe: Any) -> Any:
    run = Run.open(root)
    made = plan(run, from_data(recipe))
    surgery.apply(run, made)
    return made


def printed(root: Path, relaunch: Options, steps: int = 3, **load: Any) -> Path:
    """A file with what DeepSpeed's logger says from the birth of a new engine on."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, keep = logging.getLogger("DeepSpeed"), Keep(logging.INFO)
    logger.addHandler(keep)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        engine = build(replace(relaunch, config={**relaunch.config, "steps_per_print": 1}))
        engine.load_checkpoint(str(root), **load)
        train(engine, steps)
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)
    out = root.parent / "trainer.out"
    out.write_text("\n".join(lines) + "\n")
    assert any("] step=" in line for line in lines), lines
    return out


def compared(root: Path, log: Path) -> Comparison:
    return listen(Run.open(root), log=log)


# --- DeepSpeed's own schedulers ------------------------------------------------------------------


@pytest.mark.parametrize("name", SECTIONS)
def test_a_relaunch_with_the_printed_config_keeps_its_word(tmp_path: Path, name: str) -> None:
    root, before = tmp_path / "run", options(name)
    make(root, before)
    made = operate(root, set={"lr": 4e-4, "beta1": 0.8})
    comparison = compared(root, printed(root, as_planned(made, before)))
    assert comparison.differs == []
    assert "step 7" in comparison.agrees and "betas 0.8, 0.999" in comparison.agrees
    assert any(item.startswith("lr of update 8: ") for item in comparison.agrees)
    assert {"eps", "weight decay", "step of Adam", "lr of update 7"} <= set(comparison.not_said)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_relaunch_with_the_old_config_is_caught(tmp_path: Path, name: str) -> None:
    """The first update uses the edited rate and the second one goes back, as the plan warns."""
    root, before = tmp_path / "run", options(name)
    make(root, before)
    operate(root, set={"lr": 4e-4})
    log = printed(root, before)
    difference = compared(root, log).differs[0]
    assert difference.startswith("lr of update 8: promised ")
    (line,) = [line for line in log.read_text().splitlines() if "] step=7," in line]
    assert difference.endswith(f", in its line: {line}")
    assert "relaunch with " in " ".join(compared(root, log).expected.remedy)


# --- torch's schedulers --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(schedulers()))
@pytest.mark.long
def test_the_rates_of_torchs_schedulers_are_followed(tmp_path: Path, name: str) -> None:
    root, before = tmp_path / "run", Options(scheduler=name)
    make(root, before)
    operate(root, set={"lr": "0.5x", "beta1": 0.8})
    comparison = compared(root, printed(root, before))
    assert comparison.differs == []
    said = [item for item in comparison.agrees if item.startswith("lr of update 8: ")]
    assert len(said) == (0 if name in UNKNOWN else 1)
    cycled = name.startswith("OneCycleLR")  # it sets beta1 anew after each step
    assert bool(comparison.not_compared) == (name in UNKNOWN or cycled)
    assert ("betas 0.8, 0.95" in comparison.agrees) != cycled


@pytest.mark.parametrize(
    ("load", "field"),
    [
        ({"load_optimizer_states": False}, "betas"),
        ({"load_lr_scheduler_states": False}, "lr of update 8"),
    ],
)
def test_a_load_that_leaves_the_surgery_out_is_caught(
    tmp_path: Path, load: dict[str, bool], field: str
) -> None:
    root, before = tmp_path / "run", Options(scheduler="CosineAnnealingLR")
    make(root, before)
    operate(root, set={"lr": PEAK / 4, "beta2": 0.9})
    differs = compared(root, printed(root, before, **load)).differs
    assert [item.partition(":")[0] for item in differs if item.startswith(field)] == [field]


def test_an_engine_that_begins_anew_is_caught(tmp_path: Path) -> None:
    root, before = tmp_path / "run", Options(scheduler="StepLR")
    make(root, before)
    operate(root, set={"lr": PEAK / 4})
    first = printed(root, before).read_text()
    anew = printed(tmp_path / "elsewhere", before)
    log = root.parent / "both.out"
    log.write_text(first + anew.read_text())
    (difference, *_) = compared(root, log).differs
    assert difference.startswith("step: promised 7, says 1, in its line: [Rank 0] step=1, ")
