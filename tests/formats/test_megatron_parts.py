"""Which elements of a Megatron-LM step are whose: four ranks, two chunks, and what is unknown."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.vitals.vitals import examine
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.megatron_dist import flatten, loaded, save_chained
from tests.support.megatron_dist import save as save_dist
from tests.support.megatron_legacy import VIEWS, megatron_enums, save
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

KINDS = ("param", "exp_avg", "exp_avg_sq")
Rank = tuple[list[dict[str, torch.Tensor]], list[dict[str, Any]]]
"""The weights of each chunk of the model, and its buffer."""


def ranks(root: Path, step: int) -> dict[str, Rank]:
    """As torch loads them."""
    out = {}
    with megatron_enums():
        for folder in sorted((root / f"iter_{step:07d}").iterdir()):
            state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
            flat = torch.load(folder / "distrib_optim.pt", weights_only=False)
            buffers = [next(iter(flat[i].values())) for i in (0, 1) if i in flat]
            out[folder.name] = [v for k, v in state.items() if "model" in k], buffers
    return out


def in_chunks(root: Path) -> None:
    """An interleaved pipeline: each rank has two chunks of the model, with a buffer each."""
    with megatron_enums():
        for path in root.glob("iter_*/*/model_optim_rng.pt"):
            state = torch.load(path, weights_only=False)
            flat = torch.load(path.with_name("distrib_optim.pt"), weights_only=False)
            ((pair, bucket),) = flat[0].items()
            state["model0"] = state.pop("model")
            data = bucket["param"].bfloat16() * 2
            state["model1"] = {
                name: data[start : start + torch.Size(size).numel()].view(size)
                for name, (start, size) in VIEWS.items()
            }
            more = {kind: tensor * 2 for kind, tensor in bucket.items() if kind in KINDS}
            flat[1] = {pair: {**more, "numel_unpadded": 250}}
            torch.save(state, path)
            torch.save(flat, path.with_name("distrib_optim.pt"))


def applied(root: Path, recipe: dict[str, Any]) -> None:
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    assert look.verify(Run.open(root), level=4).findings == ()


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """What is of a parameter, and not of the gaps between them."""
    spans = (tensor[start : start + torch.Size(size).numel()] for start, size in VIEWS.values())
    return torch.cat(list(spans))


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_rank_is_averaged_by_itself(tmp_path: Path, chunks: int) -> None:
    root = save(tmp_path)
    if chunks == 2:
        in_chunks(root)
    before, first, last = snapshot(root), ranks(root, 20), ranks(root, 30)
    applied(root, {"average": {"last": 2, "moments": "average"}})
    found = ranks(root, 30)
    assert len(found) == 4
    for rank, (models, buffers) in found.items():
        assert len(models) == len(buffers) == chunks
        for i, (weights, buffer) in enumerate(zip(models, buffers, strict=True)):
            for kind in KINDS:
                one, other = first[rank][1][i][kind], last[rank][1][i][kind]
                mean = ((one.double() + other.double()) / 2).float()
                assert torch.equal(inside(buffer[kind]), inside(mean))
                assert torch.equal(buffer[kind][96:128], other[96:128])
            for name, (start, size) in VIEWS.items():
                master = buffer["param"][start : start + weights[name].numel()]
                assert torch.equal(weights[name], master.view(size).bfloat16())
    take_back(root, before)


def test_two_buffers_of_one_size_in_a_chunk_are_refused(tmp_path: Path) -> None:
    """Two optimizers in a chain: which has which weights, no file says."""
    root = save(tmp_path, chained=2)
    with pytest.raises(SurgeryError, match="which weights the 250 elements"):
        surgery.plan(Run.open(root), from_data({"average": {"last": 2}}))


def test_a_scale_is_of_the_stage_that_is_named(tmp_path: Path) -> None:
    """Each stage of a pipeline counts its layers anew."""
    root = save(tmp_path)
    before, last = snapshot(root), ranks(root, 30)
    applied(root, {"scale": {"params": r"^stage1\.up\.weight", "by": 0.5, "moments": "scale"}})
    for rank, ((weights,), (buffer,)) in ranks(root, 30).items():
        power = {"param": 1, "exp_avg": 1, "exp_avg_sq": 2}
        for kind in KINDS:
            wanted = last[rank][1][0][kind].clone()
            if rank.endswith("_001"):
                wanted[128:250] *= 0.5 ** power[kind]
            assert torch.equal(buffer[kind], wanted)
        (own,) = last[rank][0]
        by = 0.5 if rank.endswith("_001") else 1.0
        assert torch.equal(weights["up.weight"], own["up.weight"] * by)
        assert torch.equal(weights["up.bias"], own["up.bias"])
    take_back(root, before)


def test_the_moments_of_some_parameters_become_zero(tmp_path: Path) -> None:
    root = save(tmp_path)
    before = snapshot(root)
    applied(root, {"reset": ["moments"], "moments": {"params": r"up\.bias"}})
    for _, (buffer,) in ranks(root, 30).values():
        for kind in KINDS[1:]:
            assert not buffer[kind][64:96].any() and buffer[kind][96:].all()
    take_back(root, before)


def apart(model: dict[str, Any]) -> None:
    """As a script saves weights that moved them to another device first."""
    model.update({name: tensor.clone() for name, tensor in model.items()})


def nested(model: dict[str, Any]) -> None:
    """As Megatron-LM's older models."""
    model["language_model"] = {name: model.pop(name) for name in list(model)}


def lacking(model: dict[str, Any]) -> None:
    """A weight that is not saved."""
    del model["up.bias"]


@pytest.mark.parametrize(
    ("change", "says"),
    [(apart, "which weights the 250"), (nested, "nested"), (lacking, "which weights the 250")],
)
def test_weights_of_which_no_file_says_where_they_lie_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    root = save(tmp_path, tensor=1, pipeline=1)
    path = root / "iter_0000030" / "mp_rank_00" / "model_optim_rng.pt"
    with megatron_enums():
        state = torch.load(path, weights_only=False)
        change(state["model"])
        torch.save(state, path)
    before = snapshot(root)
    for recipe in (
        {"average": {"last": 2}},
        {"scale": {"params": "up", "by": 0.5}},
        {"reset": ["moments"], "moments": {"params": "up"}},
    ):
        with pytest.raises(SurgeryError, match=says):
            surgery.plan(Run.open(root), from_data(recipe))
    assert snapshot(root) == before
    assert look.verify(Run.open(root), level=4).findings == ()


def plain(root: Path, groups: list[list[str]], dtype: torch.dtype) -> Path:
    """Optimizers that number what they hold: the weights of these names, in groups."""
    for step in (20, 30):
        save(root, (step,), tensor=1, pipeline=1, use_distributed_optimizer=False)
        folder = root / f"iter_{step:07d}" / "mp_rank_00"
        (folder / "distrib_optim.pt").unlink()
        with megatron_enums():
            state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
            draw = torch.Generator().manual_seed(step)
            sizes = {"a.weight": (4, 8), "b.weight": (4, 8), "a.bias": (4,), "b.bias": (4,)}
            names = [name for group in groups for name in group]
            masters = {name: torch.rand(size, generator=draw) for name, size in sizes.items()}
            state["model"] = {name: masters[name].to(dtype) for name in sizes}
            inner = state["optimizer"]["optimizer"]
            inner["state"] = {
                i: {"exp_avg": masters[name] * 0.1, "exp_avg_sq": masters[name] + 0.1}
                for i, name in enumerate(names)
            }
            for own, group in zip(inner["param_groups"], groups, strict=True):
                own["params"] = [names.index(name) for name in group]
            if dtype != torch.float32:
                state["optimizer"]["fp32_from_fp16_params"] = [
                    [masters[name] for name in group] for group in groups
                ]
            torch.save(state, folder / "model_optim_rng.pt")
    return root


def optimizer(root: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What is saved of the optimizer, and the model."""
    with megatron_enums():
        path = root / "iter_0000030" / "mp_rank_00" / "model_optim_rng.pt"
        state = torch.load(path, weights_only=False)
    return state["optimizer"], state["model"]


USUAL = [["a.weight", "b.weight"], ["a.bias", "b.bias"]]
MIXED = [["b.weight", "a.bias"], ["a.weight", "b.bias"]]


def test_masters_in_groups_of_one_shape_are_in_the_order_of_the_model(tmp_path: Path) -> None:
    root = plain(tmp_path, USUAL, torch.bfloat16)
    before = snapshot(root)
    last = optimizer(root)[0]["optimizer"]["state"]
    applied(root, {"scale": {"params": r"^b\.weight", "by": 0.9, "moments": "scale"}})
    held, model = optimizer(root)
    masters = [master for group in held["fp32_from_fp16_params"] for master in group]
    for master, name in zip(masters, ("a.weight", "b.weight", "a.bias", "b.bias"), strict=True):
        assert torch.equal(model[name], master.bfloat16())
    moments = held["optimizer"]["state"]
    assert torch.equal(moments[1]["exp_avg"], last[1]["exp_avg"] * 0.9)
    assert torch.equal(moments[0]["exp_avg"], last[0]["exp_avg"])
    take_back(root, before)


def test_masters_of_one_shape_in_two_groups_are_refused(tmp_path: Path) -> None:
    """Which of them is first in the model, no file says."""
    root = plain(tmp_path, MIXED, torch.bfloat16)
    for recipe in ({"average": {"last": 2}}, {"scale": {"params": "up", "by": 0.5}}):
        with pytest.raises(SurgeryError, match="which weights its fp32 masters are of"):
            surgery.plan(Run.open(root), from_data(recipe))


def test_moments_without_names_are_averaged_all_the_same(tmp_path: Path) -> None:
    """In fp32 there are no masters: weights by name, and moments by number."""
    root = plain(tmp_path, MIXED, torch.float32)
    before = snapshot(root)
    applied(root, {"average": {"last": 2, "moments": "average"}})
    take_back(root, before)
    with pytest.raises(SurgeryError, match="have no names"):
        recipe = {"scale": {"params": "weight", "by": 0.5, "moments": "scale"}}
        surgery.plan(Run.open(root), from_data(recipe))


def test_a_graft_pairs_values_by_name(tmp_path: Path) -> None:
    """`.metadata` lists them in another order in each save."""
    root = save_dist(tmp_path)
    before = snapshot(root)
    for more in ({}, {"params": "weight"}, {"only": "exp_avg"}):
        applied(root, {"graft": {"step": 20, **more}})
        take_back(root, before)


def test_a_state_without_weights_that_are_cut_like_it_is_refused(tmp_path: Path) -> None:
    root = save_chained(tmp_path)
    with pytest.raises(SurgeryError, match=r"no weights of up\.weight are cut like it"):
        surgery.plan(Run.open(root), from_data({"scale": {"params": "up", "by": 0.5}}))


def test_states_that_are_flattened_are_of_the_weights_that_they_begin_in(tmp_path: Path) -> None:
    """What NeMo 2.0 to 2.4 saves: each stretch of a state belongs to rows of the weights."""
    torch.manual_seed(3)
    whole, flat = save_dist(tmp_path / "whole", (20,)), tmp_path / "flat"
    shutil.copytree(whole, flat)
    flatten(flat, 20)
    signs = [{s.parameter: s for s in examine(Run.open(root), 20).signs} for root in (whole, flat)]
    assert signs[0].keys() == signs[1].keys() == {"up.weight", "down.weight"}
    for name, sign in signs[0].items():
        other = signs[1][name]
        assert (sign.elements, other.elements) == (256, 256)
        assert other.norms == pytest.approx(sign.norms)
        assert other.update_rms == pytest.approx(sign.update_rms)
    before = snapshot(flat)
    recipe = {"scale": {"params": "up", "by": 0.5, "moments": "scale"}}
    applied(whole, recipe)
    applied(flat, recipe)
    (_, wanted), (_, halves) = loaded(whole, 20), loaded(flat, 20, (2, 1, 128))
    for name, tensor in wanted.items():
        assert torch.equal(halves[name].view(64, 4), tensor), name
    take_back(flat, before)
    applied(flat, {"reset": ["moments"], "moments": {"params": "down"}})
    _, halves = loaded(flat, 20, (2, 1, 128))
    assert {name for name, t in halves.items() if not t.any()} == {
        "optimizer.state.exp_avg.down.weight", "optimizer.state.exp_avg_sq.down.weight",
    }  # fmt: skip
