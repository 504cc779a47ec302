"""Layer norms that drifted apart across tensor ranks are equal again, in every copy of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import UsageError
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.launch import first_line, launch
from tests.support.snapshot import snapshot

SYNC = from_data({"sync_replicas": {}})
MODEL = "mp_rank_{:02d}_model_states.pt"
OPTIM = "bf16_zero_pp_rank_0_mp_rank_{:02d}_optim_states.pt"


@pytest.fixture(scope="module")
def tensor_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Two tensor ranks, bf16, ZeRO 1, saved at step 4."""
    root = tmp_path_factory.mktemp("tensor") / "run"
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "tensor_model_parallel_size=2", "dtype=bf16", "train_iters=4", "save_interval=4", ranks=2,
    )  # fmt: skip
    return root


def changed(path: Path, edit: Callable[[Any], None]) -> None:
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


def copies(step: Path, name: str) -> dict[str, list[torch.Tensor]]:
    """Weights, master and moments of a parameter on both ranks, as torch reads them."""
    out: dict[str, list[torch.Tensor]] = {}
    for rank in range(2):
        model = torch.load(step / MODEL.format(rank), weights_only=False)
        out.setdefault("weights", []).append(model["module"][name])
        shard = torch.load(step / OPTIM.format(rank), weights_only=False)["optimizer_state_dict"]
        for i, mapping in enumerate(shard["param_slice_mappings"]):
            if name in mapping:
                part = slice(mapping[name].start, mapping[name].start + mapping[name].numel)
                state = shard["base_optimizer_state"]["state"][i]
                flats = {"master": shard["single_partition_of_fp32_groups"][i], **state}
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    out.setdefault(kind, []).append(flats[kind][part])
    return out


@pytest.mark.long
def test_drifted_layer_norms_become_their_mean(tensor_run: Path) -> None:
    root, step = tensor_run, tensor_run / "global_step4"
    run = Run.open(root)
    assert plan(run, SYNC).empty, "the trainer keeps its replicas equal"
    name = "layers.1.post_attention_layernorm.weight"

    def drift(state: Any) -> None:
        state["module"][name] += 0.25

    def drift_optimizer(state: Any) -> None:
        shard = state["optimizer_state_dict"]
        group = next(i for i, m in enumerate(shard["param_slice_mappings"]) if name in m)
        part = shard["param_slice_mappings"][group][name]
        for flat in (
            shard["single_partition_of_fp32_groups"][group],
            shard["base_optimizer_state"]["state"][group]["exp_avg"],
            shard["base_optimizer_state"]["state"][group]["exp_avg_sq"],
        ):
            flat.data[part.start : part.start + part.numel] += torch.rand(part.numel)

    changed(step / MODEL.format(1), drift)
    changed(step / OPTIM.format(1), drift_optimizer)
    before, old = snapshot(root), copies(step, name)
    (ill,) = diagnose(run)
    assert ill.what.endswith(f"between tensor-parallel ranks that each keep them whole: {name}")
    wanted = plan(run, SYNC)
    assert {change.field for change in wanted.changes} == {
        f"{kind} of {name}" for kind in ("weights", "master", "exp_avg", "exp_avg_sq")
    } | {"tensorboard"}
    surgery.apply(run, wanted)
    for kind, (left, right) in copies(step, name).items():
        mean = np.mean([t.detach().double().numpy() for t in old[kind]], axis=0)
        assert torch.equal(left, right), kind
        assert torch.equal(left, torch.from_numpy(mean).to(left.dtype)), kind
    assert plan(run, SYNC).empty
    assert look.verify(run, level=3).findings == ()
    assert wanted.promise is not None
    assert compare(wanted.promise, first_line(root, 2)) == []
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before


def test_what_has_no_replicas_needs_nothing(trained: Trained, tensor_run: Path) -> None:
    assert plan(Run.open(trained(ranks=2)), SYNC).empty
    with pytest.raises(UsageError, match="no replicated parameter matches 'query_key_value'"):
        plan(Run.open(tensor_run), from_data({"sync_replicas": {"params": r"query_key_value"}}))
