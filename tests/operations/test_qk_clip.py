"""QK-clip by the weights: bit for bit torch's product, head by head, in every layout."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.plans.edits import Change, Computed
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.attention import logits_of, train_shared_keys
from tests.support.dcp_trainers import torchtitan
from tests.support.gathered import gathered, kind, loaded
from tests.support.launch import first_line
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back
from tests.support.torch_files import load_shard

LAYOUTS = {
    "dp1-zero0-fp32": (1, 0, "fp32"), "dp2-zero1-fp32": (2, 1, "fp32"),
    "dp1-zero2-bf16": (1, 2, "bf16"), "dp2-zero3-fp32": (2, 3, "fp32"),
    "dp2-zero1-fp16": (2, 1, "fp16"),
}  # fmt: skip
HEADS, WIDTH, HIDDEN = 2, 16, 32
NAME = "layers.{}.query_key_value.weight"
NOWHERE = 1e9


def operated(root: Path, recipe: dict[str, Any]) -> Plan:
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    assert look.verify(Run.open(root), level=4).findings == ()
    return made


def rms(weight: torch.Tensor, bias: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor) -> Any:
    """Of each head, by torch from second moments; the rows are [head, query key value, width]."""
    matrix, constant = weight.double() * gain.double(), weight.double() @ shift.double() + bias
    rows = torch.cat([matrix, constant[:, None]], 1).view(HEADS, 3, WIDTH, HIDDEN + 1)
    grams = [torch.einsum("hif,hjf->hij", side, side) for side in (rows[:, 0], rows[:, 1])]
    return ((grams[0] * grams[1]).sum((1, 2)) / WIDTH).sqrt()


def weights(root: Path, zero: int) -> dict[str, torch.Tensor]:
    """fp32 masters as DeepSpeed gathers them; of stage 0 the weights."""
    file = root / "global_step8/mp_rank_00_model_states.pt"
    held = gathered(root, 8) if zero else load_shard(file)["module"]
    return {name: tensor.detach().clone() for name, tensor in held.items()}


@pytest.mark.witness("bundled trainer", "scale --qk-clip", by="deepspeed")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.long
def test_queries_and_keys_are_torchs_product(trained: Trained, layout: str) -> None:
    ranks, zero, dtype = LAYOUTS[layout]
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    before, old, masters = snapshot(root), loaded(root, 8), weights(root, zero)
    estimates = {
        (i, head): 5 * float(value)
        for i in (0, 1)
        for head, value in enumerate(rms(*(masters[f"layers.{i}.{n}"] for n in OF_A_LAYER)))
    }
    threshold = sum(sorted(estimates.values())[:2]) / 2  # three heads are above it, one is not
    made = operated(root, {"scale": {"qk_clip": {"threshold": threshold}}})
    assert made.warnings[-1].startswith("3 heads are estimated above")
    found = weights(root, zero)
    used = factors(made)
    expected = dict(masters)
    for (i, head), largest in estimates.items():
        if largest <= threshold:
            continue
        wanted = math.sqrt(threshold / largest)
        by = min(used, key=lambda factor: abs(factor - wanted))
        assert by == pytest.approx(wanted, rel=1e-9)
        for name in (NAME.format(i), NAME.format(i).replace("weight", "bias")):
            rows = expected[name].clone().view(HEADS, 3, WIDTH, -1)
            rows[head, :2] *= by
            expected[name] = rows.view(expected[name].shape)
    assert len(used) == 3
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(found[name], masters[name]) for name in masters)
    now = loaded(root, 8)
    for path, tensor in old.items():
        if kind(path) == "weights":
            assert zero in (0, 3) or torch.equal(now[path], found[str(path[-1])].to(tensor.dtype))
        elif kind(path) != "master":
            assert torch.equal(now[path], tensor), path
    assert made.promise is not None and compare(made.promise, first_line(root, ranks)) == []
    again = plan(Run.open(root), from_data({"scale": {"qk_clip": {"threshold": threshold}}}))
    assert [change.field for change in again.changes if "query" in change.field] == []
    take_back(root, before)


OF_A_LAYER = (
    "query_key_value.weight", "query_key_value.bias", "input_layernorm.weight",
    "input_layernorm.bias",
)  # fmt: skip


def factors(made: Plan) -> set[float]:
    """The numbers that weights and masters are multiplied by."""
    return {
        change.new.numbers[0]
        for change in made.changes
        if isinstance(change, Change) and isinstance(change.new, Computed)
    }


def test_moments_go_with_them(trained: Trained) -> None:
    root = trained(zero=1, dtype="bf16")
    old = loaded(root, 8)
    made = operated(root, {"scale": {"qk_clip": {"threshold": 0.5}, "moments": "scale"}})
    found = loaded(root, 8)
    factor = {f: max(factors(made)) for f in ("exp_avg", "exp_avg_sq")}
    for name, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
        paths = [path for path in old if kind(path) == name]
        touched = [p for p in paths if not torch.equal(old[p], found[p])]
        assert touched
        for path in touched:
            moved = old[path] != found[path]
            ratios = (found[path][moved].double() / old[path][moved].double()).abs()
            assert float(ratios.max()) <= factor[name] ** power * 1.01 < 1


def test_shared_keys_stay_and_queries_take_all(tmp_path: Path, corpus: Path) -> None:
    """Two tensor ranks, each with two heads of one key."""
    root = tmp_path / "run"
    train_shared_keys(root, corpus)
    before = snapshot(root)
    checkpoint = Run.open(root).checkpoint(2)
    told = logits_of(checkpoint)
    files = [root / "global_step2" / f"mp_rank_0{rank}_model_states.pt" for rank in (0, 1)]
    old = [load_shard(file)["module"] for file in files]
    threshold = 5 * min(each.rms for each in told) / 2
    operated(root, {"scale": {"qk_clip": {"threshold": threshold}}})
    new = [load_shard(file)["module"] for file in files]
    for i in (0, 1):
        name = NAME.format(i)
        for head, each in enumerate(told[4 * i : 4 * i + 4]):
            rank, place = divmod(head, 2)
            rows, was = (one[rank][name].double().view(4, 8, 32) for one in (new, old))
            left = threshold / (5 * each.rms)
            torch.testing.assert_close(rows[place], was[place] * left, rtol=2**-7, atol=1e-6)
            assert torch.equal(rows[2:], was[2:])  # key and value
    checkpoint = Run.open(root).checkpoint(2)
    for now in logits_of(checkpoint):
        assert 5 * now.rms == pytest.approx(threshold, rel=1e-3)
    take_back(root, before)


def test_params_narrow_it_to_layers(trained: Trained) -> None:
    root = trained(zero=1)
    recipe = {"scale": {"params": "layers.1.", "qk_clip": {"threshold": 0.5, "sigmas": 4}}}
    fields = {change.field for change in plan(Run.open(root), from_data(recipe)).changes}
    assert any("layers.1" in field for field in fields)
    assert not any("layers.0" in field for field in fields)


def test_no_head_above_it_is_nothing_to_do(trained: Trained) -> None:
    root = trained(zero=1)
    recipe = {"scale": {"qk_clip": {"threshold": NOWHERE}}}
    assert plan(Run.open(root), from_data(recipe)).changes == ()


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        ({"qk_clip": {"threshold": 0}}, "write a number, above 0"),
        ({"qk_clip": {"threshold": 100, "sigmas": -1}}, "write a number, above 0"),
        ({"qk_clip": {"threshold": math.inf}}, "qk_clip.threshold"),
        ({"qk_clip": {}}, "qk_clip.threshold"),
        ({"qk_clip": {"threshold": 100}, "by": 0.5}, "drop one of them"),
        ({"qk_clip": {"threshold": 100}, "moments": "zero"}, "keep or scale"),
        ({"qk_clip": {"threshold": 100}, "params": "embeddings"}, "no query weight matches"),
        ({"by": 0.9}, "`scale.params` is missing"),
        ({"params": "weight"}, "`scale.by` is missing"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    trained: Trained, scale: dict[str, Any], says: str
) -> None:
    root = trained(zero=1)
    with pytest.raises(UsageError) as error:
        plan(Run.open(root), from_data({"scale": scale}))
    assert says in f"{error.value.what} {' '.join(error.value.next)}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_heads_that_are_not_known_are_refused(tmp_path: Path, trained: Trained) -> None:
    titan = torchtitan(tmp_path / "titan")
    before = snapshot(titan)
    with pytest.raises(SurgeryError, match="how many attention heads"):
        plan(Run.open(titan), from_data({"scale": {"qk_clip": {"threshold": 100}}}))
    assert snapshot(titan) == before
    root = trained(zero=1)
    edited(root, lambda args: setattr(args, "qk_layernorm", True))
    with pytest.raises(SurgeryError, match="are normalized"):
        plan(Run.open(root), from_data({"scale": {"qk_clip": {"threshold": 100}}}))
    shutil.rmtree(root)
    root = trained(zero=1)
    edited(root, lambda args: setattr(args, "num_query_groups", 1))
    with pytest.raises(SurgeryError, match="2 heads of 16 with 1 key make 64 rows of 32"):
        plan(Run.open(root), from_data({"scale": {"qk_clip": {"threshold": 100}}}))


def edited(root: Path, change: Any) -> None:
    """The arguments that the model file keeps, changed."""
    file = root / "global_step8" / "mp_rank_00_model_states.pt"
    held = load_shard(file)
    change(held["args"])
    torch.save(held, file)
