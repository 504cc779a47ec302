"""nanotron since April 2024: each pipeline stage has param groups of its own, one for a parameter.

The files are made by torch's own AdamW and LambdaLR, with a function for each group."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import look, surgery
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.nanotron_files import PEAK, decayed, piped
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

GROUPS = st.tuples(st.sampled_from([0.25, 1.0, 1.5]), st.sampled_from([0.0, 0.1]))
STAGES = st.lists(st.lists(GROUPS, min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.fixture
def made() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def saved(root: Path, stage: int, of: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The param groups and the scheduler of a stage."""
    ranks = f"pp-{stage}-of-{of}_tp-0-of-1_exp-0-of-1.pt"
    adam = torch.load(root / "2/optimizer" / f"optimizer_{ranks}")
    return adam["param_groups"], torch.load(root / "2/lr_scheduler" / f"lr_scheduler_{ranks}")


@pytest.mark.long
@settings(max_examples=12)
@given(STAGES, st.booleans())
@example([[(1.0, 0.1)], [(0.25, 0.0), (1.5, 0.1)]], False)
@example([[(1.0, 0.1), (1.0, 0.0)], [(1.0, 0.1)]], True)
def test_every_stage_is_edited_by_one_factor(
    stages: list[list[tuple[float, float]]], cooled: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        named = [
            {f"p{i}.{j}": group for j, group in enumerate(groups)}
            for i, groups in enumerate(stages)
        ]
        root = piped(Path(folder) / "run", named)
        before = snapshot(root)
        top = max(share for groups in stages for share, _ in groups)
        state = look.inspect(Run.open(root))
        assert state.peak_lr == pytest.approx(PEAK * top)
        assert look.verify(Run.open(root), level=2).findings == ()
        decays = {wd for groups in stages for _, wd in groups}
        assert set(state.promise.weight_decay or ()) == decays
        if cooled:
            run = Run.open(root)
            recipe = from_data({"cooldown": {"steps": 2, "to": 0.0}})
            surgery.apply(run, surgery.plan(run, recipe))
        else:
            decay = {"weight_decay": 0.2} if any(decays) else {}
            operate(root, {"set": {"lr": PEAK, "beta2": 0.98, **decay}})
        for i, groups in enumerate(stages):
            adam, schedule = saved(root, i, len(stages))
            for j, (share, wd) in enumerate(groups):
                base = PEAK * share * (decayed(2) if cooled else 1 / top)
                now = base if cooled else base * decayed(2)
                assert adam[j]["initial_lr"] == schedule["base_lrs"][j] == pytest.approx(base)
                assert adam[j]["lr"] == schedule["_last_lr"][j] == pytest.approx(now)
                assert cooled or adam[j]["weight_decay"] == (0.2 if wd else 0.0)
                assert cooled or adam[j]["betas"] == (0.9, 0.98)
        take_back(root, before)


@pytest.mark.parametrize("inner", ["optimizer", "lr_scheduler"])
def test_a_stage_that_lacks_a_file_is_not_whole(made: Path, inner: str) -> None:
    root = piped(made / "run", [{"a": (1.0, 0.1)}, {"b": (1.0, 0.1)}])
    assert Run.open(root).complete(2)
    (gone,) = (root / "2" / inner).glob(f"{inner}_pp-1-*")
    gone.unlink()
    run = Run.open(root)
    assert run.format.missing(root, 2) == [f"{inner}/{gone.name}"]
