"""nanotron: new weights, masters and moments of every rank are torch's, in its own files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.nanotron_files import (
    NAMES,
    RANKS,
    make,
    master,
    save_weight,
    scheduler,
    shard,
    weight,
)
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

KINDS = ("exp_avg", "exp_avg_sq")
State = dict[str, dict[str, torch.Tensor]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "run")


def gathered(root: Path, step: int) -> State:
    """Each parameter's masters and moments, joined over the data ranks, and its weights."""
    out: State = {}
    for number, name in enumerate(NAMES):
        states = [torch.load(shard(root, step, rank))["state"][number] for rank in range(RANKS)]
        out[name] = {kind: torch.cat([state[kind] for state in states]) for kind in KINDS}
        out[name]["master"] = master(root, step, name)
        out[name]["weights"] = load_file(weight(root, step, name))["data"]
    return out


def operated(root: Path, recipe: dict[str, Any]) -> State:
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    assert look.verify(Run.open(root), level=4).findings == ()
    found = gathered(root, 6)
    for name, state in found.items():  # as the trainer rounds them after an update
        assert torch.equal(state["weights"], state["master"].bfloat16().reshape(NAMES[name]))
    return found


def same(found: State, wanted: State) -> None:
    differ = [
        (name, kind)
        for name in NAMES
        for kind in ("master", *KINDS)
        if not torch.equal(found[name][kind], wanted[name][kind])
    ]
    assert differ == []


@pytest.mark.parametrize("moments", ["last", "average", "zero"])
def test_an_average_is_of_the_masters(run: Path, moments: str) -> None:
    before, old = snapshot(run), [gathered(run, step) for step in (2, 4, 6)]
    found = operated(run, {"average": {"last": 3, "moments": moments}})

    def mean(name: str, kind: str) -> torch.Tensor:
        return (sum(state[name][kind].double() for state in old) / 3).float()

    wanted = {
        name: {"master": mean(name, "master"), **{
            kind: {"last": old[-1][name][kind], "zero": torch.zeros_like(old[-1][name][kind]),
                   "average": mean(name, kind)}[moments]
            for kind in KINDS
        }}
        for name in NAMES
    }  # fmt: skip
    same(found, wanted)
    with safe_open(weight(run, 6, "w.weight"), "pt") as reader:  # what a load checks is kept
        assert reader.metadata() == {"version": "1.4"}
    take_back(run, before)


@pytest.mark.parametrize("moments", ["keep", "scale"])
def test_a_scale_is_of_one_parameter(run: Path, moments: str) -> None:
    before, old = snapshot(run), gathered(run, 6)
    found = operated(run, {"scale": {"params": r"w\.weight", "by": 0.9, "moments": moments}})
    for kind, power in (("master", 1), ("exp_avg", 1), ("exp_avg_sq", 2)):
        if kind == "master" or moments == "scale":
            old["w.weight"][kind] = old["w.weight"][kind] * 0.9**power
    same(found, old)
    take_back(run, before)


def test_a_graft_and_a_clip_go_over_the_ranks(run: Path) -> None:
    before, old, first = snapshot(run), gathered(run, 6), gathered(run, 2)
    found = operated(run, {"graft": {"step": 2}})
    same(found, {n: {**first[n], "master": old[n]["master"]} for n in NAMES})
    assert float(torch.load(shard(run, 6, 0))["state"][0]["step"]) == 2
    take_back(run, before)
    found = operated(run, {"clip_moments": {"above": 1.5}})
    for name in NAMES:  # one limit for what the ranks have of a parameter
        square = old[name]["exp_avg_sq"]
        limit = square[square > 0].median() * 1.5
        assert torch.equal(found[name]["exp_avg_sq"], square.clamp(max=limit))
    take_back(run, before)


def test_a_weight_without_its_master_is_refused(run: Path) -> None:
    ranks = weight(run, 6, "w.weight")
    ranks.rename(ranks.with_name(ranks.name.replace("tp-rank-0-of-1", "tp-rank-1-of-2")))
    with pytest.raises(SurgeryError, match="no fp32 master of the same ranks"):
        surgery.plan(Run.open(run), from_data({"scale": {"params": "weight", "by": 2.0}}))


def test_every_tensor_parallel_rank_has_the_masters_of_what_is_whole(run: Path) -> None:
    """Two ranks: the matrix is cut, the bias is not, and its file has no rank in its name."""
    for step in (2, 4, 6):
        for rank in range(RANKS):
            file = shard(run, step, rank)
            state = torch.load(file)
            file.unlink()
            for tp in range(2):
                state["gradient_accumulator"]["w.weight"] += tp
                torch.save(state, file.with_name(file.name.replace("tp-0-of-1", f"tp-{tp}-of-2")))
        schedule = scheduler(run, step)
        for tp in range(2):
            shutil.copy(
                schedule, schedule.parent / schedule.name.replace("tp-0-of-1", f"tp-{tp}-of-2")
            )
        schedule.unlink()
        config = run / str(step) / "optimizer" / "optimizer_config.json"
        config.write_text(config.read_text().replace('"tp_size": "1"', '"tp_size": "2"'))
        path = weight(run, step, "w.weight")
        data = load_file(path)["data"]
        path.unlink()
        for tp in range(2):
            name = path.name.replace("tp-rank-0-of-1", f"tp-rank-{tp}-of-2")
            save_file({"data": data + tp}, path.with_name(name), {"version": "1.4"})
    before = snapshot(run)
    recipe = from_data({"scale": {"params": "^w", "by": 0.9}})
    surgery.apply(Run.open(run), surgery.plan(Run.open(run), recipe))
    for name in NAMES:
        weights, masters = {}, {}
        for tp in range(2):
            joined = [
                torch.load(file)["gradient_accumulator"][name]
                for file in sorted((run / "6" / "optimizer").glob(f"*_tp-{tp}-of-2*"))
            ]
            masters[tp] = torch.cat(joined)
            file = weight(run, 6, name)
            file = file.with_name(file.name.replace("tp-rank-0-of-1", f"tp-rank-{tp}-of-2"))
            weights[tp] = load_file(file)["data"]
            assert torch.equal(weights[tp], masters[tp].bfloat16().reshape(NAMES[name]))
        assert torch.equal(masters[0], masters[1]) == (name == "w.bias")
    take_back(run, before)


def test_each_weight_is_held_to_its_master(run: Path) -> None:
    """In slices over the data ranks, and in a file of another format."""
    assert look.verify(Run.open(run), level=4).findings == ()
    for name, word in (("w.bias", "w.bias"), ("w.weight", "w.weight")):
        path = weight(run, 6, name)
        data = bytearray(path.read_bytes())
        data[-2:] = b"\x80\x3f"  # 1.0, in the slice of the last rank
        path.write_bytes(bytes(data))
        (found,) = look.verify(Run.open(run), level=4).findings
        assert word in str(found) and "master" in str(found)
        data[-2:] = b"\xc0\x7f"  # NaN
        path.write_bytes(bytes(data))
        assert any("NaN" in str(each) for each in look.verify(Run.open(run), level=4).findings)
        path.unlink()
        (run / "6" / "model").mkdir(exist_ok=True)
        save_weight(run, 6, name)
