"""DeepSpeed's schedulers: the promised rate is theirs, if the relaunch has the printed config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.look.listen import listen
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, build, live, make, process_group, resume
from tests.support.deepspeed_schedulers import SECTIONS, as_planned, options


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def theirs(new: Options, positions: range) -> list[list[float]]:
    """What the real scheduler of that config gives at each position."""
    engine = build(new)
    rates = []
    for position in positions:
        engine.lr_scheduler.step(position)
        rates.append([group["lr"] for group in live(engine).param_groups])
    return rates


@pytest.mark.thinned(3)
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
    after = resume(tmp_path, as_planned(made, before), 6)
    assert made.promise is not None and after["lr"] == pytest.approx([made.promise.lr], rel=1e-12)
    expected = theirs(as_planned(made, before), range(5, 11))
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


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_inside_of_a_trainer_they_step_before_it_asks_for_the_rate(
    tmp_path: Path, name: str
) -> None:
    """As the Trainer of transformers 5.24 printed under DeepSpeed 0.19.8: `engine.step()` steps the
    schedule, and the line of an update has the rate of the next one."""
    root = tmp_path / "run"
    make(root / "checkpoint-6", options(name))
    state = {"global_step": 6, "max_steps": 20, "epoch": 0.6}
    (root / "checkpoint-6" / "trainer_state.json").write_text(json.dumps(state))
    _, following, later = resume(root / "checkpoint-6", options(name))["rates"]
    for rates, agree in (((following[0], later[0]), True), ((later[0], later[0] / 2), False)):
        lines = [
            f"{{'loss': '5.8', 'learning_rate': '{rate:.4g}', 'epoch': '{0.7 + i / 10:.4g}'}}\n"
            for i, rate in enumerate(rates)
        ]
        (tmp_path / "out").write_text("".join(lines))
        word = listen(Run.open(root), log=tmp_path / "out")
        assert (word.differs == []) is agree, word
        if agree:
            assert word.agrees == [
                "step 7", f"lr of update 8: {rates[0]:.4g}", f"lr of update 9: {rates[1]:.4g}",
            ]  # fmt: skip
            assert "lr of update 7" in word.not_said
