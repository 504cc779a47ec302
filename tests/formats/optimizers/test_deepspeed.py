"""Optimizers other than Adam inside the real DeepSpeed engine: ZeRO's partitions, and none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, build, make, process_group, train
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.filterwarnings("ignore:A .* optimizer was:UserWarning"),
]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def after_three(engine: Any) -> list[torch.Tensor]:
    engine.global_steps = 6  # which the batches are drawn by
    train(engine, 3)
    return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *product(("NAdam", "SGD", "RMSprop", "Adamax", "RAdam"), (0, 1)),
        ("Adagrad", 0),  # which does not run in DeepSpeed's ZeRO
    ],
)
def test_the_engine_steps_on_as_with_a_new_optimizer(tmp_path: Path, name: str, stage: int) -> None:
    options = Options(stage=stage, optimizer=f"torch.{name}", lr=1e-2)
    make(tmp_path, options)
    before = snapshot(tmp_path)
    found = operate(tmp_path, {"reset": ["moments"]}).promise
    assert found is not None and name in str(found.optimizer)
    edited = build(options)
    edited.load_checkpoint(str(tmp_path))
    fresh = build(options)
    fresh.load_checkpoint(str(tmp_path), load_module_only=True)
    pairs = zip(after_three(edited), after_three(fresh), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    take_back(tmp_path, before)


@pytest.mark.parametrize(("name", "why"), [("Rprop", "step_size"), ("ASGD", "eta")])
def test_what_a_partition_can_not_begin_anew_is_refused(
    tmp_path: Path, name: str, why: str
) -> None:
    make(tmp_path, Options(optimizer=f"torch.{name}", lr=1e-2))
    before = snapshot(tmp_path)
    with pytest.raises(SurgeryError, match=rf"{name} makes {why} \(.*\) itself when it begins"):
        surgery.plan(Run.open(tmp_path), from_data({"reset": ["moments"]}))
    assert snapshot(tmp_path) == before
