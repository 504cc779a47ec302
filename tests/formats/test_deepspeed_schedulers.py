"""DeepSpeed's schedulers: the promised rate is theirs, if the relaunch has the printed config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, build, live, make, process_group, resume

WARM: dict[str, Any] = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}
SECTIONS: dict[str, dict[str, Any]] = {
    "WarmupLR": WARM,
    "WarmupLR-linear": {**WARM, "warmup_type": "linear", "warmup_num_steps": 9},
    "WarmupLR-log": {**WARM, "warmup_num_steps": 9},
    "WarmupDecayLR": {**WARM, "total_num_steps": 20},
    "WarmupDecayLR-warming": {**WARM, "total_num_steps": 20, "warmup_num_steps": 9},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 4, "warmup_min_ratio": 0.1},
    "WarmupCosineLR-warming": {"total_num_steps": 20, "warmup_num_steps": 9},
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def options(name: str, stage: int = 1) -> Options:
    section = {"type": name.partition("-")[0], "params": SECTIONS[name]}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    return Options(stage=stage, scheduler_config=section, config=config, optimizer="config")


def told(made: Plan, before: Options) -> Options:
    """The options with the parts of the config that the plan says the relaunch must carry."""
    (warning,) = made.warnings
    config, section = dict(before.config), dict(before.scheduler_config or {})
    for part in re.findall(r'"(?:optimizer|scheduler)": \{"params": \{.*?\}\}', warning):
        ((name, inner),) = json.loads("{" + part + "}").items()
        if name == "scheduler":
            section["params"] = {**section["params"], **inner["params"]}
        else:
            old = dict(config["optimizer"])
            config["optimizer"] = {**old, "params": {**old["params"], **inner["params"]}}
    return replace(before, config=config, scheduler_config=section)


def theirs(new: Options, positions: range) -> list[list[float]]:
    """What the real scheduler of that config gives at each position."""
    engine = build(new)
    rates = []
    for position in positions:
        engine.lr_scheduler.step(position)
        rates.append([group["lr"] for group in live(engine).param_groups])
    return rates


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", SECTIONS)
def test_every_rate_to_come_is_of_the_new_schedule(tmp_path: Path, name: str, stage: int) -> None:
    before = options(name, stage)
    make(tmp_path, before)
    wanted = {
        "lr": 4e-4,
        "warmup": 5,
        **({"decay": 30} if "total_num_steps" in SECTIONS[name] else {}),
    }
    made = plan(Run.open(tmp_path), from_data({"set": wanted}))
    surgery.apply(Run.open(tmp_path), made)
    assert look.verify(Run.open(tmp_path)).findings == ()
    assert plan(Run.open(tmp_path), from_data({"set": wanted})).empty
    after = resume(tmp_path, told(made, before), 6)
    assert made.promise is not None and after["lr"] == pytest.approx([made.promise.lr], rel=1e-12)
    expected = theirs(told(made, before), range(5, 11))
    assert after["rates"] == [pytest.approx(rates, rel=1e-12) for rates in expected]


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_the_position_is_what_they_keep(tmp_path: Path, name: str) -> None:
    make(tmp_path, options(name))
    made = plan(Run.open(tmp_path), from_data({"set": {"position": 2}}))
    assert made.warnings == ()
    surgery.apply(Run.open(tmp_path), made)
    after = resume(tmp_path, options(name), 6)["rates"]
    assert after == [pytest.approx(rates) for rates in theirs(options(name), range(2, 8))]


def test_a_share_is_of_the_peak_in_the_saved_config(tmp_path: Path) -> None:
    make(tmp_path, options("WarmupDecayLR"))
    made = plan(Run.open(tmp_path), from_data({"set": {"lr": "0.5x"}}))
    assert '"warmup_max_lr": 0.0005' in made.warnings[0]


def test_what_these_schedules_do_not_have_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "warm", options("WarmupLR"))
    for wanted in ({"decay": 30}, {"min_lr": 1e-5}, {"decay_style": "linear"}):
        with pytest.raises(SurgeryError, match="WarmupLR has no"):
            plan(Run.open(tmp_path / "warm"), from_data({"set": wanted}))
    make(tmp_path / "decay", options("WarmupDecayLR"))
    with pytest.raises(UsageError, match="not beyond warmup"):
        plan(Run.open(tmp_path / "decay"), from_data({"set": {"decay": 3}}))


def test_a_schedule_that_the_saved_config_does_not_name_is_refused(tmp_path: Path) -> None:
    """A scheduler that the trainer made itself: only its position is saved."""
    make(tmp_path, Options(scheduler="WarmupLR"))
    with pytest.raises(SurgeryError, match="saves only its position") as refused:
        plan(Run.open(tmp_path), from_data({"set": {"lr": 1e-4}}))
    assert "DeepSpeed config" in refused.value.next[0]
