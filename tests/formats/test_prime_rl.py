"""prime-rl: with its optimizer's state on the CPU a resume puts back no setting of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.prime_rl import make, resumed
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
ON_GPU = "format: prime-rl-on-gpu\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "run")


@pytest.mark.parametrize("offload", [True, False])
def test_a_rollback_and_a_reset_are_what_it_loads(run: Path, offload: bool) -> None:
    before = snapshot(run)
    assert Run.open(run).format.name == "prime-rl"
    plan = operate(run, {"rollback": {"to": 4}, "reset": ["moments"]})
    assert plan.promise is not None and (plan.promise.step, plan.promise.adam_step) == (5, 0)
    assert plan.promise.lr is plan.promise.betas is plan.promise.weight_decay is None
    used = resumed(run, offload=offload)
    assert (used["step"], used["adam_step"], used["moments"]) == (5, {0.0}, False)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
    assert look.verify(Run.open(run), level=4).findings == ()
    take_back(run, before)


@pytest.mark.parametrize("key", ["lr", "beta1", "beta2", "eps", "weight_decay"])
@pytest.mark.parametrize("warmup", [True, False])
def test_what_offload_takes_anew_is_refused_with_both_ways(
    tmp_path: Path, key: str, warmup: bool
) -> None:
    """Also a rate, though a scheduler is saved: those of torch go on from the group's rate."""
    run = make(tmp_path / "run", warmup=warmup)
    before = snapshot(run)
    with pytest.raises(SurgeryError, match=f"does not decide {key}") as refused:
        surgery.plan(Run.open(run), from_data({"set": {key: 0.125}}))
    assert "where that is off, edit with --format prime-rl-on-gpu" in refused.value.next[0]
    assert snapshot(run) == before


@pytest.mark.parametrize("warmup", [True, False])
def test_a_new_base_rate_would_change_no_rate_under_offload(tmp_path: Path, warmup: bool) -> None:
    run = make(tmp_path / "run", warmup=warmup)
    plain = resumed(run, offload=True, warmup=warmup)
    (run / "ckptsurgeon.yaml").write_text(ON_GPU)
    operate(run, {"set": {"lr": 5e-4}})
    assert resumed(run, offload=True, warmup=warmup) == plain


@pytest.mark.parametrize("warmup", [True, False])
def test_without_offload_the_checkpoint_has_it_all(tmp_path: Path, warmup: bool) -> None:
    run = make(tmp_path / "run", warmup=warmup)
    (run / "ckptsurgeon.yaml").write_text(ON_GPU)
    before, plain = snapshot(run), resumed(run, offload=False, warmup=warmup)
    wanted: dict[str, Any] = {"lr": 5e-4, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(run, {"set": wanted})
    used = resumed(run, offload=False, warmup=warmup)
    assert plan.promise is not None and used["lr"] == plan.promise.lr
    assert [used["lr"], used["then"]] == pytest.approx([plain["lr"] / 2, plain["then"] / 2])
    assert (used["betas"], used["eps"], used["weight_decay"]) == ((0.9, 0.97), 1e-6, 0.3)
    take_back(run, before)
