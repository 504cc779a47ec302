"""Experts in a pipeline of DeepSpeed, over other stages: each counts its layers of experts from 0,
and without ZeRO the numbers of its parameters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import by_step
from tests.support.snapshot import snapshot

STEP, MORE = 4, 5
EXPERTS = [f"moe.deepspeed_moe.experts.deepspeed_experts.{i}" for i in (0, 1)]
OTHERS = {0: ("0.weight", "0.bias", "1.moe.deepspeed_moe.gate.wg.weight"),
          1: ("2.moe.deepspeed_moe.gate.wg.weight", "3.weight", "3.bias")}  # fmt: skip
"""What is no expert, of each of two stages."""
KINDS = {"1 stage": (1, 1), "2 stages": (2, 1), "no zero": (1, 0), "2 stages, no zero": (2, 0)}
"""Stages, and the stage of ZeRO."""


def order(stages: int) -> list[str]:
    """In the param groups of each optimizer, one after another."""
    own = [[0, 1]] if stages == 1 else [[0], [1]]
    out: list[str] = []
    for some in own:
        out += [name for stage in some for name in OTHERS[stage]]
        out += [f"{stage + 1}.{name}.{kind}" for stage in some for name in EXPERTS
                for kind in ("weight", "bias")]  # fmt: skip
    return out


def train(kind: str, root: Path, stop: int, seed: int = 1) -> dict[int, float]:
    stages, stage = KINDS[kind]
    words = ("tests.support.piped_experts", root, stop, seed, stage)
    return by_step(*words, ranks=stages)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a run, one of a single step and another seed, and the losses of the first."""
    folder = tmp_path_factory.mktemp("piped")
    for kind in KINDS:
        train(kind, folder / kind, STEP)
        train(kind, folder / f"fresh {kind}", 1, 7)
        shutil.copytree(folder / kind, folder / f"on {kind}")
        losses = train(kind, folder / f"on {kind}", STEP + MORE)
        (folder / f"{kind}.json").write_text(json.dumps(losses))
    return folder


def filled(run: Path, fresh: Path, root: Path, source: str, target: str) -> None:
    """`fresh`, of the kind `target`, filled from `root`, of the kind `source`."""
    shutil.copytree(fresh, run)
    before = snapshot(run)
    section = {"source": str(root)}
    names = run.with_suffix(".txt")
    numbered = [kind for kind in (target, source) if not KINDS[kind][1]]
    if numbered:
        names.write_text("\n".join(order(KINDS[numbered[0]][0])))
        section["order"] = str(names)
    made = plan(Run.open(run), from_data({"transplant": section}))
    assert not any("left" in text for text in made.warnings), made.warnings
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()


MOVES = [("2 stages", "1 stage"), ("1 stage", "2 stages"), ("no zero", "2 stages"),
         ("2 stages", "2 stages, no zero"), ("2 stages, no zero", "1 stage")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_next_losses_are_those_of_the_source(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    run = tmp_path / "run"
    filled(run, runs / f"fresh {target}", runs / source, source, target)
    wanted = {int(k): v for k, v in json.loads((runs / f"{source}.json").read_text()).items()}
    assert train(target, run, STEP + MORE) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("there", [kind for kind in KINDS if kind != "1 stage"])
def test_there_and_back_is_the_step_that_was_saved(runs: Path, tmp_path: Path, there: str) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    filled(run, runs / f"fresh {there}", runs / "1 stage", "1 stage", there)
    filled(back, runs / "fresh 1 stage", run, there, "1 stage")
    files = sorted((runs / "1 stage" / f"global_step{STEP}").glob("*.pt"))
    for file in files:
        other = back / f"global_step{STEP}" / file.name
        known, found = (
            dict(leaves(torch.load(each, weights_only=False))) for each in (file, other)
        )
        assert known.keys() == found.keys() and known
        assert [path for path in known if not torch.equal(known[path], found[path])] == []


def leaves(tree: object, at: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(at, tree)]
    items = tree.items() if isinstance(tree, dict) else ()
    pairs = enumerate(tree) if isinstance(tree, (list, tuple)) else items
    return [leaf for key, value in pairs for leaf in leaves(value, f"{at}.{key}")]
