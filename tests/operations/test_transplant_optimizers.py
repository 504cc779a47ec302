"""From the Adam of one library to that of another: what the live optimizer of an engine holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, make, process_group, resume

STEP = 6
PAIRS = [
    ("adamw", "apex"), ("apex", "adamw"), ("adamw", "fused"), ("fused", "apex"),
    pytest.param("adamw", "cpu_adam", marks=pytest.mark.slow),
    pytest.param("cpu_adam", "apex", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_moments_count_and_settings_are_those_of_the_source(
    tmp_path: Path, source: str, target: str
) -> None:
    """apex counts its updates in the param groups, and torch in each state."""
    of_source = Options(stage=1, optimizer=source)
    of_target = replace(of_source, stage=2, optimizer=target, lr=5e-4)
    with process_group():
        make(tmp_path / "source", of_source, STEP)
        make(tmp_path / "run", of_target, 1)
        run = Run.open(tmp_path / "run")
        made = plan(run, from_data({"transplant": {"source": str(tmp_path / "source")}}))
        surgery.apply(run, made)
        assert look.verify(Run.open(run.root), level=4).findings == ()
        wanted = resume(tmp_path / "source", of_source, 1)
        found = resume(run.root, of_target, 1)
    assert made.promise is not None and made.promise.adam_step == STEP
    for key in ("step", "lr", "betas", "eps", "weight_decay", "moments", "rates"):
        assert found[key] == wanted[key], key
    counted = {*found["steps"], *(each for each in found["group_step"] if each is not None)}
    assert counted == {STEP}
