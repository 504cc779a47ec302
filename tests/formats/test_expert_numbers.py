"""New numbers for a model with experts: each rank counts its own, and the files count all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support import deepspeed_engine as engine
from tests.support.deepspeed_engine import Options, launched, make, process_group
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts"
TWO = "moe-on-two-ranks"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def applied(root: Path, recipe: dict[str, Any]) -> None:
    surgery.apply(Run.open(root), plan(Run.open(root), from_data(recipe)))
    told = look.verify(Run.open(root), level=4)
    assert told.findings == () and not any("masters" in text for text in told.not_compared)


def weights(root: Path, step: int) -> dict[str, torch.Tensor]:
    """Of the model file and of every expert's."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted((root / f"global_step{step}").glob("*model_states.pt")):
        tree = torch.load(path, weights_only=False)
        found |= tree.get("module", tree)
    return found


def masters(root: Path, step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Those of one data rank, by the names that it has for them."""
    name = f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    (path,) = (root / f"global_step{step}").glob(name)
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    return {
        name: flat[at.start : at.start + at.numel]
        for flat, mapping in zip(
            state["single_partition_of_fp32_groups"], state["param_slice_mappings"], strict=True
        )
        for name, at in mapping.items()
    }


def test_experts_are_averaged_with_the_rest(tmp_path: Path) -> None:
    options = Options(stage=1, dtype="bf16", model="moe")
    for step in (4, 6):
        make(tmp_path, options, step)
    before, steps = snapshot(tmp_path), [masters(tmp_path, step) for step in (4, 6)]
    applied(tmp_path, {"average": {"last": 2}})
    found, kept = masters(tmp_path, 6), weights(tmp_path, 6)
    assert found.keys() == kept.keys() and any(f"{EXPERT}.1" in name for name in found)
    for name, master in found.items():
        mean = ((steps[0][name].double() + steps[1][name].double()) / 2).float()
        assert torch.equal(master, mean)
        assert torch.equal(kept[name].flatten(), master.bfloat16())
    loaded = engine.build(options)
    loaded.load_checkpoint(str(tmp_path))
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter.detach(), kept[name])
    take_back(tmp_path, before)


@pytest.mark.parametrize(("before", "to"), [("bf16", "fp32"), ("fp16", "bf16")])
def test_experts_go_on_in_another_precision(tmp_path: Path, before: str, to: str) -> None:
    """An expert's file keeps its name, and gets what its master in the shards rounds to."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[to]
    make(tmp_path, Options(stage=1, dtype=before, model="moe"))
    was = snapshot(tmp_path)
    applied(tmp_path, {"precision": {"to": to}})
    (shard,) = (tmp_path / "global_step6").glob("*_optim_states.pt")
    assert shard.name.startswith("bf16_") == (to == "bf16")
    found, kept = masters(tmp_path, 6), weights(tmp_path, 6)
    assert found.keys() == kept.keys() and any(f"{EXPERT}.1" in name for name in found)
    for name, master in found.items():
        assert kept[name].dtype == dtype and torch.equal(kept[name].flatten(), master.to(dtype))
    loaded = engine.build(Options(stage=1, dtype=to, model="moe"))
    loaded.load_checkpoint(str(tmp_path))
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter.detach(), kept[name])
    engine.train(loaded, 2)
    take_back(tmp_path, was)


@pytest.mark.slow
def test_an_expert_of_the_second_rank_is_scaled_there(tmp_path: Path) -> None:
    """Both ranks call theirs expert 0."""
    options = Options(stage=1, dtype="bf16", model=TWO)
    launched("make", tmp_path, options)
    before, old, files = snapshot(tmp_path), masters(tmp_path, 6, 1), weights(tmp_path, 6)
    applied(tmp_path, {"scale": {"params": r"experts\.1\.weight", "by": 0.9}})
    found, kept = masters(tmp_path, 6, 1), weights(tmp_path, 6)
    name = f"{EXPERT}.0.weight"
    assert {n for n in found if not torch.equal(found[n], old[n])} == {name}
    assert torch.equal(found[name], old[name] * 0.9)
    assert torch.equal(kept[f"{EXPERT}.1.weight"].flatten(), found[name].bfloat16())
    assert torch.equal(kept[name], files[name])
    assert len(launched("resume", tmp_path, options)) == 2
    take_back(tmp_path, before)


@pytest.mark.parametrize("how", ["name", "config"])
def test_experts_of_which_no_file_says_where_they_are_are_refused(tmp_path: Path, how: str) -> None:
    """Param groups that do not say over how many ranks theirs are spread, or ranks in another
    order."""
    make(tmp_path, Options(stage=1, dtype="bf16", model="moe"))
    for path in (tmp_path / "global_step6").glob("*mp_rank_00_*states.pt"):
        tree = torch.load(path, weights_only=False)
        if how == "config" and "ds_config" in tree:
            tree["ds_config"]["use_data_before_expert_parallelism"] = True
        elif how == "name" and "optimizer_state_dict" in tree:
            for group in tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
                group["name"] = "experts" if group.get("moe") else "others"
        torch.save(tree, path)
    with pytest.raises(SurgeryError, match="which ranks have which of them"):
        plan(Run.open(tmp_path), from_data({"scale": {"params": "weight", "by": 0.5}}))
    assert look.verify(Run.open(tmp_path), level=4).findings == ()
