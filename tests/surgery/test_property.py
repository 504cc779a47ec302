"""For any recipe: what it promises is on disk, it changes nothing twice, and undo is exact."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.conftest import STEPS, Trained
from tests.support.snapshot import snapshot

MEMORY = Path("/dev/shm")
"""Where there is one, a file system on which fsync costs nothing."""
rates = st.floats(1e-4, 1.0, allow_subnormal=False)
betas = st.floats(0.0, 0.9999)
values = st.fixed_dictionaries(
    {},
    optional={
        "lr": rates | st.sampled_from(["0.5x", "2x"]),
        "min_lr": st.floats(0, 1e-4),
        "warmup": st.integers(0, 200),
        "decay": st.integers(201, 10_000),
        "decay_style": st.sampled_from(["constant", "linear", "cosine"]),
        "beta1": betas,
        "beta2": betas,
        "eps": st.floats(1e-12, 100.0),
        "weight_decay": st.floats(0, 1),
        "clip_grad": st.floats(0, 10),
        "seed": st.integers(0, 2**32 - 1),
    },
)
ranges = st.tuples(st.integers(1, 500), st.integers(0, 500)).map(lambda r: f"{r[0]}-{r[0] + r[1]}")
recipes = st.fixed_dictionaries(
    {},
    optional={
        "rollback": st.sampled_from(STEPS).map(lambda step: {"to": step}),
        "set": values,
        "reset": st.just(["moments"]),
        "rewarm": st.fixed_dictionaries(
            {"iterations": st.integers(0, 1000)},
            optional={"kind": st.sampled_from(["hold", "ramp"])},
        ),
        "skip": st.lists(ranges, max_size=3),
        "clear_skip": st.booleans(),
        "tensorboard": st.fixed_dictionaries({"keep": st.booleans()}),
    },
)


@pytest.mark.parametrize(("ranks", "zero"), [(1, 1), (2, 1), (1, 0)])
def test_any_recipe_is_kept_idempotent_and_undone(trained: Trained, ranks: int, zero: int) -> None:
    original = trained(ranks=ranks, zero=zero)
    start = snapshot(original)

    @settings(
        max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(recipes)
    def operate(data: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            root = Path(folder) / "run"
            shutil.copytree(original, root)
            run = Run.open(root)
            try:
                made = plan(run, from_data(data))
            except SurgeryError:
                assert snapshot(root) == start
                return
            if made.empty:
                return
            surgery.apply(run, made)
            assert made.promise == look.inspect(run).promise
            assert look.verify(run).findings == ()
            if "x" not in str(data.get("set", {}).get("lr", "")):
                assert plan(run, from_data(data)).changes == ()
            surgery.apply(run, surgery.plan_undo(run))
            assert snapshot(root) == start

    operate()
