"""NeMo RL with DTensor, by its second worker and by its first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run
from tests.support.nemo_rl import make, resumed
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


@pytest.mark.parametrize("native", [False, True])
def test_both_updates_use_what_was_promised(tmp_path: Path, native: bool) -> None:
    run = make(tmp_path / "run", native=native)
    before, plain = snapshot(run), resumed(run, native=native)
    assert Run.open(run).format.name == ("nemo-rl-native" if native else "nemo-rl")
    wanted: dict[str, Any] = {"lr": 5e-4, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(run, {"rollback": {"to": 4}, "set": wanted, "reset": ["moments"]})
    used = resumed(run, native=native)
    assert plan.promise is not None and used["lr"] == plan.promise.lr
    assert (plan.promise.step, plan.promise.adam_step) == (5, 0)
    assert [used["lr"], used["then"]] == pytest.approx([plain["lr"] / 2, plain["then"] / 2])
    assert (used["betas"], used["eps"], used["weight_decay"]) == ((0.9, 0.97), 1e-6, 0.3)
    assert (used["adam_step"], used["moments"]) == ({0.0}, False)
    take_back(run, before)
