"""What no update reaches comes too: frozen weights and buffers, by what an engine holds that loads
the filled step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, build, live, process_group
from tests.support.saved_engines import saved
from tests.support.snapshot import snapshot

STEP = 6
SOURCE, FRESH = Options(model="adapter"), Options(model="other adapter")
ORDER = ("adapter.weight", "adapter.bias", "norm.weight", "norm.bias")
"""The matrix, and then the vectors."""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def transplanted(run: Path, source: Path, **more: Any) -> Plan:
    before = snapshot(run)
    made = plan(Run.open(run), from_data({"transplant": {"source": str(source), **more}}))
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()
    return made


def held(root: Path, options: Options) -> dict[str, torch.Tensor]:
    """All weights and buffers of an engine after its load."""
    import deepspeed

    engine = build(options)
    assert engine.load_checkpoint(str(root))[0] is not None
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("stage", "ranks", "target", "target_ranks"), [
    (0, 1, 0, 1), (1, 1, 1, 1), (3, 1, 2, 1), (2, 1, 3, 1),
    pytest.param(2, 1, 0, 1, marks=SLOW), pytest.param(0, 1, 2, 1, marks=SLOW),
    pytest.param(3, 2, 1, 1, marks=SLOW), pytest.param(1, 1, 3, 2, marks=SLOW),
])  # fmt: skip
def test_what_is_frozen_and_what_is_counted_is_that_of_the_source(
    tmp_path: Path, stage: int, ranks: int, target: int, target_ranks: int
) -> None:
    source = saved(tmp_path / "source", replace(SOURCE, stage=stage), ranks)
    own = replace(FRESH, stage=target)
    run = saved(tmp_path / "run", own, target_ranks, 1)
    section = {}
    if 0 in (stage, target):
        order = tmp_path / "order.txt"
        order.write_text("\n".join(ORDER))
        section["order"] = str(order)
    made = transplanted(run, source, **section)
    assert not any("left" in text or "behind" in text for text in made.warnings), made.warnings
    again = run
    if target_ranks > 1:  # gathered by one more transplant into a step of one rank
        again = saved(tmp_path / "again", replace(FRESH, stage=1), 1, 1)
        transplanted(again, run)
        own = replace(FRESH, stage=1)
    if ranks > 1:
        wanted = saved(tmp_path / "whole", replace(FRESH, stage=2), 1, 1)
        transplanted(wanted, source)
        found, known = held(again, own), held(wanted, replace(FRESH, stage=2))
        file = source / f"global_step{STEP}" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
        piece = torch.load(file, weights_only=False)["frozen_param_fragments"]["base.weight"]
        assert torch.equal(found["base.weight"].flatten()[32:], piece.flatten()[:32])
    else:
        found, known = held(again, own), held(source, replace(SOURCE, stage=stage))
    assert found.keys() == known.keys()
    assert all(torch.equal(found[name], known[name]) for name in known)


def test_what_begins_to_be_trained_keeps_its_fresh_moments_and_is_named(tmp_path: Path) -> None:
    """And what is trained no longer leaves its moments behind."""
    source = saved(tmp_path / "source", replace(SOURCE, stage=2))
    own = Options(model="unfrozen", stage=1)
    run = saved(tmp_path / "run", own, steps=1)
    with pytest.raises(SurgeryError, match="not every parameter is in both runs"):
        transplanted(run, source, require_all=True)
    (said, *_) = transplanted(run, source).warnings
    assert said == (
        "not trained in the source: their moments stay as the new trainer made them: "
        "base.weight, base.bias"
    )
    known, found = held(source, replace(SOURCE, stage=2)), held(run, own)
    assert all(torch.equal(found[name], known[name]) for name in known)
    engine = build(own)
    engine.load_checkpoint(str(run))
    assert all(state["exp_avg"].abs().sum() > 0 for state in live(engine).state.values())
    back = saved(tmp_path / "back", replace(FRESH, stage=2), steps=1)
    (said, *_) = transplanted(back, run).warnings
    assert said == "not trained here: their moments are left behind: base.weight, base.bias"
    found = held(back, replace(FRESH, stage=2))
    assert all(torch.equal(found[name], known[name]) for name in known)
