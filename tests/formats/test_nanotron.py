"""nanotron: the optimizer shards of every rank and the one scheduler change together.

It needs CUDA and flash-attn to import, so the files are made as `nanotron/serialize/optimizer.py`
does, with torch's own AdamW and LambdaLR, and are loaded in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.nanotron_files import PEAK, RANKS, built, decayed, make, scheduler, shard
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "run")


def resumed(root: Path, rank: int) -> torch.optim.AdamW:
    """As nanotron loads: the optimizer, the scheduler, and the scheduler's first step."""
    step = int((root / "latest.txt").read_text())
    adam, schedule = built(rank)
    state = torch.load(shard(root, step, rank))
    adam.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    schedule.load_state_dict(torch.load(scheduler(root, step)))
    schedule._initial_step()
    return adam


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


def test_a_missing_shard_and_what_the_config_decides_are_told(run: Path) -> None:
    shard(run, 4, 1).unlink()
    assert not Run.open(run).complete(4)
    told: list[Any] = []
    for recipe in ({"set": {"clip_grad": 0.5}}, {"set": {"warmup": 5}}, {"skip": ["7-8"]}):
        with pytest.raises(SurgeryError) as error:
            surgery.plan(Run.open(run), from_data(recipe))
        told += error.value.next
    assert "optimizer.clip_grad" in " ".join(told)
