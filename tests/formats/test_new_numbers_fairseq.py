"""metaseq and fairseq: every shard and its copy in checkpoint_last get torch's new numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.fairseq_files import NAMES, make_run, resumed
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

KINDS = ("weights", "exp_avg", "exp_avg_sq")
State = dict[str, dict[str, torch.Tensor]]


def held(root: Path, stem: str) -> State:
    """What torch's own optimizer and `torch.load` have of each shard."""
    out: State = {}
    for suffix in NAMES:
        adam, document = resumed(root / f"{stem}{suffix}.pt")
        (state,) = adam.state.values()
        (weights,) = document["model"].values()
        out[suffix] = {"weights": weights, **{kind: state[kind] for kind in KINDS[1:]}}
    return out


def operated(root: Path, recipe: dict[str, Any]) -> State:
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    assert look.verify(Run.open(root), level=4).findings == ()
    for suffix in NAMES:  # what a restart loads is a copy, byte for byte
        last = root / f"checkpoint_last{suffix}.pt"
        assert last.read_bytes() == (root / f"checkpoint_30{suffix}.pt").read_bytes()
    return held(root, "checkpoint_last")


def same(found: State, wanted: State) -> None:
    differ = [
        (suffix, kind)
        for suffix in NAMES
        for kind in KINDS
        if not torch.equal(found[suffix][kind], wanted[suffix][kind])
    ]
    assert differ == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.mark.parametrize("moments", ["last", "average", "zero"])
def test_an_average_is_torchs(run: Path, moments: str) -> None:
    before, old = snapshot(run), [held(run, f"checkpoint_{step}") for step in (10, 20, 30)]
    found = operated(run, {"average": {"last": 3, "moments": moments}})
    wanted = {}
    for suffix in NAMES:
        of = [state[suffix] for state in old]
        mean = {
            kind: (sum(each[kind].double() for each in of) / 3).to(of[0][kind].dtype)
            for kind in KINDS
        }
        zero = {kind: torch.zeros_like(mean[kind]) for kind in KINDS}
        ways = {"last": of[-1], "average": mean, "zero": zero}
        wanted[suffix] = {**ways[moments], "weights": mean["weights"]}
        assert mean["weights"].dtype == torch.float16
    same(found, wanted)
    take_back(run, before)


def test_a_scale_a_graft_and_a_clip_are_torchs(run: Path) -> None:
    before, old, first = snapshot(run), held(run, "checkpoint_30"), held(run, "checkpoint_10")
    found = operated(run, {"scale": {"params": "flat_param", "by": 0.9}})
    for state in found.values():
        assert state["weights"].abs().sum() > 0
    same(found, {
        suffix: {**state, "weights": (state["weights"].float() * 0.9).half()}
        for suffix, state in old.items()
    })  # fmt: skip
    take_back(run, before)
    found = operated(run, {"graft": {"step": 10}})
    same(found, {s: {**first[s], "weights": old[s]["weights"]} for s in NAMES})
    adam, _ = resumed(run / f"checkpoint_last{NAMES[0]}.pt")
    assert [float(state["step"]) for state in adam.state.values()] == [10]
    take_back(run, before)
    found = operated(run, {"clip_moments": {"above": 2}})
    square = torch.cat([old[suffix]["exp_avg_sq"] for suffix in NAMES])
    limit = square[square > 0].median() * 2  # the shards are pieces of one flat parameter
    for suffix in NAMES:
        assert torch.equal(found[suffix]["exp_avg_sq"], old[suffix]["exp_avg_sq"].clamp(max=limit))
    take_back(run, before)


def test_a_graft_works_from_and_to_a_step_without_copies(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", folders=True)
    before = snapshot(root)
    for recipe in ({"graft": {"step": 20}}, {"average": {"last": 2}}):
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        take_back(root, before)
    for suffix in NAMES:
        assert (root / "checkpoint_30" / f"checkpoint{suffix}.pt").is_file()


def test_parameters_of_a_flat_one_are_not_told_apart(run: Path) -> None:
    for recipe in (
        {"graft": {"step": 10, "params": "weight"}},
        {"scale": {"params": "flat", "by": 2.0, "moments": "scale"}},
    ):
        with pytest.raises(SurgeryError, match=r"does not say which parameter|have no names"):
            surgery.plan(Run.open(run), from_data(recipe))
