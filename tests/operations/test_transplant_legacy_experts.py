"""Experts in Megatron-LM's legacy files go on over other expert ranks, each of which counts its own
from 0: over generated numbers of experts and ranks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support import megatron_legacy
from tests.support.legacy_experts import (
    DENSE,
    EXPERT,
    GROUPED,
    State,
    held,
    numbers,
    saved,
    spread,
)

STEP = 20
STACKED = "decoder.layers.0.mlp.experts.weight1"


def filled(run: Path, source: Path) -> Path:
    made = plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))
    assert not any("left" in text for text in made.warnings), made.warnings
    surgery.apply(Run.open(run), made)
    return run


RANKS = st.sampled_from([1, 2, 3, 4, 6, 12])


@given(RANKS, RANKS, st.sampled_from([12, 24]), st.sampled_from([EXPERT, GROUPED]))
@example(2, 2, 4, EXPERT)
@example(1, 2, 4, GROUPED)
@settings(max_examples=6)
@pytest.mark.long
def test_each_expert_is_the_one_of_its_number(
    one: int, two: int, experts: int, called: str
) -> None:
    with TemporaryDirectory() as place:
        source = saved(Path(place) / "old", STEP, spread(STEP, experts, one, called))
        run = saved(Path(place) / "new", 1, spread(1, experts, two, called))
        found = held(filled(run, source), STEP, two)
    wanted = spread(STEP, experts, two, called)
    for mine, known in zip(found, wanted, strict=True):
        assert mine.keys() == known.keys()
        for name, kinds in known.items():
            assert all(torch.equal(mine[name][kind], kinds[kind]) for kind in kinds), name


def test_a_tensor_of_all_experts_of_a_rank_goes_to_that_rank_alone(tmp_path: Path) -> None:
    """Which axis its experts are along is not said: over other ranks it is refused."""

    def of(step: int, ranks: int) -> list[dict[str, State]]:
        dense = {name: numbers(name, step) for name in DENSE}
        return [dense | {STACKED: numbers(f"{STACKED} of {rank}", step)} for rank in range(ranks)]

    source = saved(tmp_path / "old", STEP, of(STEP, 2))
    run = filled(saved(tmp_path / "new", 1, of(1, 2)), source)
    for mine, known in zip(held(run, STEP, 2), of(STEP, 2), strict=True):
        for name, kinds in known.items():
            assert all(torch.equal(mine[name][kind], kinds[kind]) for kind in kinds), name
    for ranks in (1, 4):
        run = saved(tmp_path / f"on {ranks}", 1, of(1, ranks))
        with pytest.raises(SurgeryError, match="which block of it each rank has is not known"):
            plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))


def test_numbers_of_several_ranks_are_refused(tmp_path: Path) -> None:
    """Where shapes do not say whose they are, number 2 of either rank would be one parameter."""
    roots = [tmp_path / name for name in ("old", "new")]
    for root, step in zip(roots, (STEP, 1), strict=True):
        each = spread(step, 4, 2, EXPERT)
        for own in each:
            own["norm.weight"] = own["norm.weight"] | numbers("router.weight", step)
        saved(root, step, each)
    order = tmp_path / "order.txt"
    names = [*DENSE, *(EXPERT.format(i) for i in range(4))]
    order.write_text("\n".join(names))
    source, run = roots
    section = {"source": str(source), "order": str(order)}
    with pytest.raises(SurgeryError, match="each of 2 optimizers begins at 0"):
        plan(Run.open(run), from_data({"transplant": section}))


def test_files_are_those_of_the_ranks_that_cut_experts_otherwise(tmp_path: Path) -> None:
    """Two tensor ranks whose experts are whole have an expert rank each, and a file."""
    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    megatron_legacy.save(tmp_path, (STEP,), tensor=2, pipeline=1, **sizes)
    folder = tmp_path / f"iter_{STEP:07d}"
    for rank in range(2):
        (folder / f"mp_rank_{rank:02d}").rename(folder / f"mp_rank_{rank:02d}_{rank:03d}")
    assert Run.open(tmp_path).complete(STEP)
    (folder / "mp_rank_01_001" / "distrib_optim.pt").unlink()
    (finding,) = look.verify(Run.open(tmp_path)).findings
    assert "missing: mp_rank_01_001/distrib_optim.pt" in finding and "…" not in finding
