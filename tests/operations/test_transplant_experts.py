"""Experts over other ranks: each rank counts its own from 0, and the files count all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, launched, make, process_group
from tests.support.snapshot import snapshot

STEP = 6
ONE, TWO = Options(model="moe"), Options(model="moe-on-two-ranks")
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts"


def transplanted(run: Path, source: Path) -> None:
    before = snapshot(run)
    made = plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))
    assert made.warnings == ()
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()


def tensors(root: Path) -> dict[tuple[Any, ...], torch.Tensor]:
    """Every tensor of the step, by file and key path."""
    out: dict[tuple[Any, ...], torch.Tensor] = {}

    def walk(tree: Any, path: tuple[Any, ...]) -> None:
        if isinstance(tree, torch.Tensor):
            out[path] = tree
        items = tree.items() if isinstance(tree, dict) else ()
        for key, value in enumerate(tree) if isinstance(tree, (list, tuple)) else items:
            walk(value, (*path, key))

    for file in sorted((root / f"global_step{STEP}").glob("*.pt")):
        walk(torch.load(file, weights_only=False), (file.name,))
    return out


def state(root: Path, rank: int) -> dict[str, list[torch.Tensor]]:
    """Master and moments of each parameter in one data rank's shard, by the names it has there."""
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    tree = torch.load(root / f"global_step{STEP}" / name, weights_only=False)
    outer = tree["optimizer_state_dict"]
    moments = outer["base_optimizer_state"]["state"]
    out = {}
    for i, mapping in enumerate(outer["param_slice_mappings"]):
        flats = (
            outer["single_partition_of_fp32_groups"][i],
            *(moments[i][key] for key in ("exp_avg", "exp_avg_sq")),
        )
        for name, at in mapping.items():
            out[name] = [flat[at.start : at.start + at.numel] for flat in flats]
    return out


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("stage", "target"), [
    (1, 1), pytest.param(2, 1, marks=SLOW), pytest.param(1, 2, marks=SLOW),
])  # fmt: skip
def test_each_rank_gets_its_expert_and_gives_it_back(
    tmp_path: Path, stage: int, target: int
) -> None:
    roots = {name: tmp_path / name for name in ("source", "two", "back")}
    with process_group():
        make(roots["source"], replace(ONE, stage=stage), STEP)
        make(roots["back"], replace(ONE, stage=stage), 1)
    launched("make", roots["two"], replace(TWO, stage=target), 2, 1)
    transplanted(roots["two"], roots["source"])
    whole = state(roots["source"], 0)
    for rank in (0, 1):  # rank 1 calls expert 1 its expert 0
        for kind in ("weight", "bias"):
            mine = state(roots["two"], rank)[f"{EXPERT}.0.{kind}"]
            wanted = whole[f"{EXPERT}.{rank}.{kind}"]
            assert all(torch.equal(one, two) for one, two in zip(mine, wanted, strict=True))
    transplanted(roots["back"], roots["two"])
    known, found = tensors(roots["source"]), tensors(roots["back"])
    assert known.keys() == found.keys()
    assert [path for path in known if not torch.equal(known[path], found[path])] == []
    held = launched("resume", roots["two"], replace(TWO, stage=target))
    assert [each["step"] for each in held] == [STEP, STEP]
