"""nanotron: the optimizer shards of every rank and the one scheduler change together.

The files are made as `nanotron/serialize/optimizer.py` does since November 2024, with torch's own
AdamW and LambdaLR, and are loaded in its order. What its release of PyPI does, its own trainer says
(`test_nanotron_real.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.expected import expected
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.nanotron_files import (
    BATCH,
    FALLING,
    LENGTH,
    PEAK,
    RANKS,
    built,
    decayed,
    falling,
    make,
    scheduled,
    scheduler,
    shard,
)
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "run")


def loaded(
    root: Path, rank: int, rate: Callable[..., float] = decayed
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """As nanotron loads: the optimizer, the scheduler, and the scheduler's first step."""
    step = int((root / "latest.txt").read_text())
    adam, _ = built(rank)
    state = torch.load(shard(root, step, rank))
    adam.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    schedule = scheduled(adam, rate)
    schedule.load_state_dict(torch.load(scheduler(root, step)))
    schedule._initial_step()
    return adam, schedule


def resumed(root: Path, rank: int) -> torch.optim.AdamW:
    return loaded(root, rank)[0]


def rates(root: Path, rate: Callable[..., float], updates: int) -> list[float]:
    """What its next updates use."""
    adam, schedule = loaded(root, 0, rate)
    used = []
    for _ in range(updates):
        used.append(float(adam.param_groups[0]["lr"]))
        adam.step()
        schedule.step()
    return used


def test_status_and_verify(run: Path) -> None:
    opened = Run.open(run)
    assert (opened.format.name, opened.steps(), opened.latest()) == ("nanotron", [2, 4, 6], 6)
    assert look.verify(opened, level=4).findings == ()
    state = look.inspect(opened)
    assert (state.promise.adam_step, state.peak_lr) == (6, PEAK)
    assert any("steps its schedule once" in note for note in state.notes)


def test_a_resume_uses_what_was_set_on_every_rank(run: Path) -> None:
    before = snapshot(run)
    unedited = resumed(run, 0).param_groups[0]["lr"]
    operate(run, {"set": {"lr": PEAK / 4, "beta1": 0.8, "eps": 1e-6, "weight_decay": 0.05}})
    for rank in range(RANKS):
        matrix, bias = resumed(run, rank).param_groups
        assert matrix["lr"] == bias["lr"] == pytest.approx(unedited / 4)
        assert (matrix["betas"], matrix["eps"]) == ((0.8, 0.95), 1e-6)
        assert (matrix["weight_decay"], bias["weight_decay"]) == (0.05, 0.0)
    take_back(run, before)


@pytest.mark.parametrize("top", [PEAK, 6e-4])
@pytest.mark.parametrize("lr", [None, 3e-4])
def test_the_rates_are_those_of_the_saved_config(
    tmp_path: Path, lr: float | None, top: float
) -> None:
    """Which a load makes anew, of the rate that the groups have by then, also of a run that was
    resumed before: its saved rate is of the `top` that the groups had then."""

    def resumed_once(step: int, initial: float) -> float:
        return falling(step, top)

    root = make(tmp_path / "run", rate=resumed_once, config=FALLING)
    if lr is not None:
        operate(root, {"set": {"lr": lr}})
    word = expected(Run.open(root), 6)
    assert word.by_config and not word.decides_lr and word.promise.lr == word.rate(1, None)
    wanted = [pytest.approx(rate, rel=1e-12) for rate in rates(root, falling, 9)]
    assert [word.rate(k, None) for k in range(1, 10)] == wanted
    notes = look.inspect(Run.open(root)).notes
    assert any("by its config.yaml" in note for note in notes)


def test_a_cooldown_is_of_the_rate_that_it_has(tmp_path: Path) -> None:
    """It becomes the base rate, which no saved config gives any more."""
    root = make(tmp_path / "run", rate=falling, config=FALLING)
    before = snapshot(root)
    now = Run.open(root).checkpoint(6).rates()[0]
    plan = surgery.plan(Run.open(root), from_data({"cooldown": {"steps": 4, "to": 1e-5}}))
    surgery.apply(Run.open(root), plan)
    assert plan.promise is not None and plan.promise.lr == now and "lr" in plan.promise.not_known
    line = plan.warnings[-1].removesuffix(": the decay is in no checkpoint")
    assert line.endswith("lr_decay_starting_step: 7, lr_decay_steps: 4, min_decay_lr: 1.0e-05")

    def cooled(step: int, initial: float) -> float:
        return (1e-5 + (initial - 1e-5) * (1 - min(4, max(0, step - 7)) / 4)) / initial

    wanted = [1e-5 + (now - 1e-5) * (1 - k / 4) for k in range(5)]
    assert rates(root, cooled, 5) == pytest.approx(wanted, rel=1e-12)
    assert not expected(Run.open(root), 6).by_config
    take_back(root, before)


def test_a_rollback_moves_the_pointer_and_the_later_steps(run: Path) -> None:
    before = snapshot(run)
    operate(run, {"rollback": {"to": 2}, "reset": ["moments"], "set": {"lr": 2e-3}})
    assert sorted(path.name for path in run.iterdir() if path.name[0] != ".") == ["2", "latest.txt"]
    assert (run / "latest.txt").read_text() == "2"
    for rank in range(RANKS):
        adam = resumed(run, rank)
        assert adam.param_groups[0]["lr"] == pytest.approx(2e-3 * decayed(3))
        for state in adam.state.values():
            assert state["step"] == 0 and not state["exp_avg"].any()
    take_back(run, before)


def test_moments_of_one_parameter_are_reset_by_its_name(run: Path) -> None:
    before = snapshot(run)
    operate(run, {"reset": ["moments"], "moments": {"params": "bias$"}})
    for rank in range(RANKS):
        matrix, bias = (resumed(run, rank).state_dict()["state"][i] for i in range(2))
        assert matrix["exp_avg"].all() and not bias["exp_avg"].any()
    take_back(run, before)


def consistent(metadata: Path) -> dict[str, Any]:
    """The metadata of a load, which asserts that its sums agree."""
    metas = json.loads(metadata.read_text())["metas"]
    stages = metas["data_stages"]
    samples = [stage["consumed_train_samples"] for stage in stages]
    assert metas["consumed_train_samples"] == sum(samples) and min(samples) >= 0
    for stage in stages:
        tokens = sum(stage["consumed_tokens_per_dataset_folder"].values())
        assert tokens == stage["consumed_train_samples"] * stage["sequence_length"]
    assert metas["consumed_tokens_total"] == sum(samples) * LENGTH
    return dict(metas)


def test_where_the_data_goes_on_is_in_its_metadata(run: Path) -> None:
    before, metadata = snapshot(run), run / "6" / "checkpoint_metadata.json"
    text = metadata.read_text()
    plan = operate(run, {"skip": ["7-9"], "skip_by_counters": True})
    assert plan.promise is not None and plan.promise.consumed_samples == 9 * BATCH
    metas = consistent(metadata)
    assert [s["consumed_train_samples"] for s in metas["data_stages"]] == [3 * BATCH, 6 * BATCH]
    assert metas["last_train_step"] == 6
    assert len(set(metadata.read_text().split()) - set(text.split())) <= 6  # nothing else moved
    take_back(run, before)
    operate(run, {"set": {"consumed_samples": 4 * BATCH, "iteration": 4}})
    assert consistent(metadata)["last_train_step"] == 4
    with pytest.raises(SurgeryError, match="earlier stage"):
        surgery.plan(Run.open(run), from_data({"set": {"consumed_samples": 2 * BATCH}}))


def test_metadata_that_no_nanotron_saves_is_refused(run: Path) -> None:
    metadata = run / "6" / "checkpoint_metadata.json"
    text = metadata.read_text()
    metadata.write_text(text[:-9])
    with pytest.raises(SurgeryError, match="checkpoint_metadata"):
        look.inspect(Run.open(run), 6)
    for broken, found in (
        (text.replace(": 24,", ": -24,"), 0),
        (text.replace(": 24,", ": NaN,"), 1),
    ):
        assert broken != text
        metadata.write_text(broken)
        said = look.inspect(Run.open(run), 6).promise.not_understood["consumed_samples"]
        assert "checkpoint_metadata" in said
        assert len(look.verify(Run.open(run)).findings) == found
        with pytest.raises(SurgeryError, match="checkpoint_metadata"):
            surgery.plan(Run.open(run), from_data({"set": {"consumed_samples": 8}}))


def test_a_missing_shard_and_what_the_config_decides_are_told(run: Path) -> None:
    shard(run, 4, 1).unlink()
    assert not Run.open(run).complete(4)
    told: list[Any] = []
    for recipe in ({"set": {"clip_grad": 0.5}}, {"set": {"warmup": 5}}, {"skip": ["7-8"]}):
        with pytest.raises(SurgeryError) as error:
            surgery.plan(Run.open(run), from_data(recipe))
        told += error.value.next
    assert "optimizer.clip_grad" in " ".join(told)


def staged(root: Path, step: int, **values: Any) -> dict[str, Any]:
    """The metadata of a step, with `values` in its second stage."""
    file = root / str(step) / "checkpoint_metadata.json"
    document = json.loads(file.read_text())
    document["metas"]["data_stages"][1] |= values
    file.write_text(json.dumps(document))
    return dict(document["metas"])


def test_an_iteration_before_the_stage_of_the_data_is_refused(run: Path) -> None:
    """A launch makes no loader for it."""
    staged(run, 6, start_training_step=4)
    with pytest.raises(SurgeryError, match="iteration 2 is before the stage stable"):
        surgery.plan(Run.open(run), from_data({"set": {"iteration": 2}}))
    operate(run, {"set": {"iteration": 3}})


def test_tokens_follow_where_the_metadata_does_not_say_their_number(run: Path) -> None:
    """As from April to June 2025: the config has the length of a sample."""
    file = run / "6" / "checkpoint_metadata.json"
    document = json.loads(file.read_text())
    metas = document["metas"]
    for stage in metas["data_stages"]:
        del stage["sequence_length"]
    del metas["consumed_tokens_total"]
    file.write_text(json.dumps(document))
    operate(run, {"skip": ["7-9"], "skip_by_counters": True})
    stage = json.loads(file.read_text())["metas"]["data_stages"][1]
    samples = stage["consumed_train_samples"]
    assert stage["consumed_tokens_per_dataset_folder"] == {"data/a": samples * LENGTH}
    config = run / "6" / "config.yaml"
    config.write_text(config.read_text().replace("sequence_length: 16", "x: 16"))
    with pytest.raises(SurgeryError, match="how many tokens a sample has"):
        surgery.plan(Run.open(run), from_data({"set": {"consumed_samples": 40}}))


def test_going_back_before_a_stage_of_the_data_is_said(run: Path) -> None:
    """Its config still has the stage that the checkpoint has not begun."""
    for step in (2, 4):
        file = run / str(step) / "checkpoint_metadata.json"
        document = json.loads(file.read_text())
        metas = document["metas"]
        first = metas["data_stages"][0] | {
            "consumed_train_samples": BATCH * step,
            "consumed_tokens_per_dataset_folder": {"data/a": BATCH * step * LENGTH},
        }
        metas |= {"data_stages": [first], "last_stage_idx": 0}
        file.write_text(json.dumps(document))
    plan = surgery.plan(Run.open(run), from_data({"rollback": {"to": 4}}))
    assert any("stage stable began after step 4" in text for text in plan.warnings)
    assert any("start_training_step: 5" in text for text in plan.warnings)
    plan = surgery.plan(Run.open(run), from_data({"rollback": {"to": 6}, "set": {"eps": 1e-6}}))
    assert not any("began after" in text for text in plan.warnings)
