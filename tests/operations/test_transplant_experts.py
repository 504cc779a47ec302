"""Experts over other ranks: each rank counts its own from 0, and the files count all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, launched, make, process_group, resume
from tests.support.saved_engines import saved
from tests.support.snapshot import snapshot

STEP = 6
ONE, TWO = Options(model="moe"), Options(model="moe-on-two-ranks")
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts"
ORDER = (
    "first.weight", "moe.deepspeed_moe.gate.wg.weight", "first.bias",
    f"{EXPERT}.0.weight", f"{EXPERT}.1.weight", f"{EXPERT}.0.bias", f"{EXPERT}.1.bias",
)  # fmt: skip
"""Of one rank with all experts. Each of two has those of one expert, which it calls 0."""
OF_TWO = tuple(name for name in ORDER if f"{EXPERT}.1" not in name)
KINDS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def transplanted(run: Path, source: Path, order: tuple[str, ...] = ()) -> None:
    section = {"source": str(source)}
    if order:
        section["order"] = str(run.with_name("order.txt"))
        run.with_name("order.txt").write_text("\n".join(order))
    before = snapshot(run)
    made = plan(Run.open(run), from_data({"transplant": section}))
    assert not any("left" in text for text in made.warnings), made.warnings
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


def moments(root: Path, rank: int, order: tuple[str, ...]) -> dict[str, list[torch.Tensor]]:
    """Those of each parameter in one rank's file, by the names it has there; without ZeRO these are
    in the order of the param groups."""
    folder, out = root / f"global_step{STEP}", {}
    if order:
        tree = torch.load(folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
        states = tree["optimizer"]["state"]
        return {name: [states[i][kind] for kind in KINDS] for i, name in enumerate(order)}
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    outer = torch.load(folder / name, weights_only=False)["optimizer_state_dict"]
    states = outer["base_optimizer_state"]["state"]
    for i, mapping in enumerate(outer["param_slice_mappings"]):
        for name, at in mapping.items():
            flats = (states[i][kind] for kind in KINDS)
            out[name] = [flat[at.start : at.start + at.numel] for flat in flats]
    return out


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("stage", "target"), [
    (0, 0), (1, 1), (0, 2), (1, 0), pytest.param(2, 1, marks=SLOW), pytest.param(1, 2, marks=SLOW),
])  # fmt: skip
@pytest.mark.long
def test_each_rank_gets_its_expert_and_gives_it_back(
    tmp_path: Path, stage: int, target: int
) -> None:
    roots = {name: tmp_path / name for name in ("source", "two", "back")}
    saved(roots["source"], replace(ONE, stage=stage))
    saved(roots["back"], replace(ONE, stage=stage), steps=1)
    saved(roots["two"], replace(TWO, stage=target), 2, 1)
    order = () if stage and target else ORDER
    transplanted(roots["two"], roots["source"], order)
    whole = moments(roots["source"], 0, () if stage else ORDER)
    for rank in (0, 1):  # rank 1 calls expert 1 its expert 0
        mine = moments(roots["two"], rank, () if target else OF_TWO)
        for kind in ("weight", "bias"):
            both = mine[f"{EXPERT}.0.{kind}"], whole[f"{EXPERT}.{rank}.{kind}"]
            assert all(torch.equal(*pair) for pair in zip(*map(flat, both), strict=True))
    transplanted(roots["back"], roots["two"], order)
    known, found = tensors(roots["source"]), tensors(roots["back"])
    assert known.keys() == found.keys()
    assert [path for path in known if not torch.equal(known[path], found[path])] == []


def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.flatten() for tensor in tensors]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "target"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (1, 2)])
def test_the_next_losses_are_those_of_the_source(tmp_path: Path, stage: int, target: int) -> None:
    """Of all experts on one rank, and of each on its own, which names it as the other one does."""
    for options, ranks, order in ((ONE, 1, ORDER), (TWO, 2, OF_TWO)):
        source, run = (tmp_path / f"{name}-{ranks}" for name in ("source", "run"))
        own, other = replace(options, stage=stage), replace(options, stage=target)
        saved(source, own, ranks)
        saved(run, other, ranks, 1)
        transplanted(run, source, () if stage and target else order)
        held = [
            [resume(root, used, 5)] if ranks == 1 else launched("resume", root, used, ranks, 5)
            for root, used in ((source, own), (run, other))
        ]
        for mine, its in zip(*held, strict=True):
            assert mine["step"] == its["step"] == STEP and len(its["losses"]) == 5
            assert mine["losses"] == pytest.approx(its["losses"], rel=1e-6)


def test_experts_of_groups_that_do_not_say_their_ranks_are_refused(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    for root, steps in ((source, STEP), (run, 1)):
        saved(root, replace(ONE, stage=0), steps=steps)
    for file in (*source.glob("*/expp_rank_*"), *source.glob("*/mp_rank_*")):
        tree = torch.load(file, weights_only=False)
        for group in tree["optimizer"]["param_groups"]:
            group["name"] = "all"
        torch.save(tree, file)
    with pytest.raises(SurgeryError, match="numbers the states of experts, and does not say which"):
        transplanted(run, source, ORDER)


def test_experts_of_auto_ep_are_refused_by_name(tmp_path: Path) -> None:
    """ZeRO 3 has no others: DeepSpeed does not train its own layers of experts there."""
    with pytest.raises(AssertionError, match="not supported with ZeRO Stage 3"):
        make(tmp_path / "three", replace(ONE, stage=3), 1)
    source, run = tmp_path / "source", tmp_path / "run"
    for root, steps in ((source, STEP), (run, 1)):
        saved(root, replace(ONE, stage=1), steps=steps)
    (file,) = source.glob("*/mp_rank_00_model_states.pt")
    tree = torch.load(file, weights_only=False)
    torch.save({**tree, "ds_autoep_layers": [{"moe_layer_id": 0, "num_experts": 2}]}, file)
    with pytest.raises(SurgeryError, match="has experts of DeepSpeed's AutoEP"):
        transplanted(run, source)
