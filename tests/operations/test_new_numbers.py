"""Averaged, scaled and grafted state is torch's own computation on the tensors, bit for bit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.dcp_trainers import olmo, resumed_titan, torchtitan
from tests.support.gathered import Path_, gathered, kind, loaded
from tests.support.launch import first_line, launch
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LAYOUTS = {
    "dp1-zero0-fp32": (1, 0, "fp32"), "dp2-zero1-fp32": (2, 1, "fp32"),
    "dp1-zero1-bf16": (1, 1, "bf16"), "dp1-zero2-bf16": (1, 2, "bf16"),
    "dp2-zero3-fp32": (2, 3, "fp32"), "dp2-zero1-fp16": (2, 1, "fp16"),
}  # fmt: skip
WEIGHT = "query_key_value.weight"


def in_turn(*moments: str) -> list[tuple[str, str]]:
    """Every layout, with one of these each."""
    return list(zip(LAYOUTS, cycle(moments), strict=False))


def operated(root: Path, recipe: dict[str, Any]) -> Plan:
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    assert look.verify(Run.open(root), level=4).findings == ()
    return made


def mean(tensors: list[torch.Tensor], shares: list[float] | None = None) -> torch.Tensor:
    shares = shares or [1.0] * len(tensors)
    total = sum(t.double() * share for t, share in zip(tensors, shares, strict=True))
    assert isinstance(total, torch.Tensor)
    return (total / sum(shares)).to(tensors[0].dtype)


def same(found: dict[Path_, torch.Tensor], wanted: dict[Path_, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    differing = [path for path in wanted if not torch.equal(found[path], wanted[path])]
    assert differing == []


def check_weights(root: Path, step: int, found: dict[Path_, torch.Tensor]) -> None:
    """Each weight is its master, rounded; the masters are gathered by DeepSpeed."""
    masters = gathered(root, step)
    weights = {str(path[-1]): t for path, t in found.items() if kind(path) == "weights"}
    assert weights
    for name, weight in weights.items():
        assert torch.equal(weight, masters[name].to(weight.dtype)), name


@pytest.mark.parametrize(("layout", "moments"), in_turn("average", "last"))
@pytest.mark.long
def test_an_average_is_torchs(trained: Trained, layout: str, moments: str) -> None:
    ranks, zero, dtype = LAYOUTS[layout]
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    before = snapshot(root)
    steps = [loaded(root, step) for step in (4, 6, 8)]
    made = operated(root, {"average": {"last": 3, "moments": moments}})
    assert made.title.startswith("average steps 4, 6, 8")
    found = loaded(root, 8)
    averaged = {"master"} | ({"exp_avg", "exp_avg_sq"} if moments == "average" else set())
    expected = {
        path: mean([step[path] for step in steps]) if kind(path) in averaged else steps[-1][path]
        for path in steps[-1]
    }
    if zero == 0:  # no masters: the weights are fp32
        expected |= {
            path: mean([step[path] for step in steps])
            for path in expected
            if kind(path) == "weights"
        }
    elif zero < 3:
        check_weights(root, 8, found)
        expected |= {path: t for path, t in found.items() if kind(path) == "weights"}
    changed = [path for path in expected if not torch.equal(expected[path], steps[-1][path])]
    assert {kind(path) for path in changed} >= ({"weights"} if zero == 0 else {"master"})
    same(found, expected)
    assert made.promise is not None and made.promise == made.before
    assert compare(made.promise, first_line(root, ranks)) == []
    take_back(root, before)


@pytest.mark.parametrize(
    ("layout", "moments"), [*in_turn("keep", "scale"), ("dp1-zero0-fp32", "scale")]
)
@pytest.mark.long
def test_a_scale_is_torchs(trained: Trained, layout: str, moments: str) -> None:
    ranks, zero, dtype = LAYOUTS[layout]
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    before, old, by = snapshot(root), loaded(root, 8), 0.9
    recipe = {"scale": {"params": WEIGHT, "by": by, "moments": moments}}
    if zero == 0 and moments == "scale":
        with pytest.raises(SurgeryError, match="have no names"):
            plan(Run.open(root), from_data(recipe))
        return
    masters = gathered(root, 8) if zero else {}
    made = operated(root, recipe)
    found = loaded(root, 8)
    if zero:
        for name, master in gathered(root, 8).items():
            assert torch.equal(master, masters[name] * by if WEIGHT in name else masters[name])
    if 0 < zero < 3:
        check_weights(root, 8, found)
    scaled = {path for path in old if kind(path) == "weights" and WEIGHT in str(path[-1])}
    for path in scaled if zero == 0 else ():
        assert torch.equal(found[path], old[path] * by)
    for path, tensor in old.items():
        if path in scaled or kind(path) == "other" or kind(path) == "weights":
            assert path in scaled or torch.equal(found[path], tensor), path
            continue
        # Of a flat partition: nothing, or what the mapping says is of such a parameter.
        power = {"master": 1, "exp_avg": 1, "exp_avg_sq": 2}[kind(path)]
        touched = kind(path) == "master" or moments == "scale"
        either = torch.stack([tensor, tensor * by**power]) if touched else tensor[None]
        assert ((found[path][None] == either).any(0)).all(), path
    assert made.promise is not None and compare(made.promise, first_line(root, ranks)) == []
    take_back(root, before)


def test_a_plan_says_it_in_a_line_for_each_kind(trained: Trained) -> None:
    from ckptsurgeon.report.changes import changes

    root = trained(zero=1, dtype="bf16")
    recipe = {"average": {"last": 2, "moments": "average"}}
    rows = changes(plan(Run.open(root), from_data(recipe)).changes)
    assert [row.label for row in rows][:4] == ["weights", "master", "exp_avg", "exp_avg_sq"]
    assert len(rows) <= 5


def test_two_scales_that_cancel_leave_the_weights(trained: Trained) -> None:
    """By a power of two nothing is rounded."""
    root = trained(zero=1, dtype="bf16")
    old = loaded(root, 8)
    for by in (0.5, 2.0):
        operated(root, {"scale": {"params": "weight", "by": by, "moments": "scale"}})
        assert any(not torch.equal(t, old[p]) for p, t in loaded(root, 8).items()) == (by == 0.5)


@pytest.mark.witness("bundled trainer", "graft moments", by="deepspeed")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.long
def test_a_graft_takes_the_moments_and_the_step(trained: Trained, layout: str) -> None:
    ranks, zero, dtype = LAYOUTS[layout]
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    before, old, donor = snapshot(root), loaded(root, 8), loaded(root, 4)
    made = operated(root, {"graft": {"step": 4}})
    assert made.promise is not None and made.promise.adam_step == 4
    found = loaded(root, 8)
    moments = {"exp_avg", "exp_avg_sq"}
    same(
        {path: t for path, t in found.items() if "step" not in path},
        {
            path: donor[path] if kind(path) in moments else old[path]
            for path in old
            if "step" not in path
        },
    )
    assert any(not torch.equal(found[path], old[path]) for path in old if kind(path) in moments)
    assert compare(made.promise, first_line(root, ranks)) == []
    again = plan(Run.open(root), from_data({"graft": {"step": 4}}))
    assert {change.field for change in again.changes} <= {*moments, "tensorboard"}
    take_back(root, before)


def test_a_graft_of_some_parameters_keeps_the_step(trained: Trained) -> None:
    root = trained(ranks=2, zero=1)
    old, donor = loaded(root, 8), loaded(root, 4)
    made = operated(root, {"graft": {"step": 4, "params": WEIGHT, "only": "exp_avg"}})
    assert made.promise is not None and made.promise.adam_step == 8
    assert "Adam's step is shared" in made.warnings[-1]
    found = loaded(root, 8)
    for path, tensor in old.items():
        if kind(path) != "exp_avg":
            assert torch.equal(found[path], tensor)
            continue
        assert ((found[path] == tensor) | (found[path] == donor[path])).all()
    differing = sum(int((found[p] != old[p]).sum()) for p in old)
    assert 0 < differing < sum(t.numel() for p, t in old.items() if kind(p) == "exp_avg")


def test_the_next_step_of_a_grafted_run_is_torchs(tmp_path: Path) -> None:
    """torchtitan's optimizer, loaded: the moments are those of step 2, the weights of step 6."""
    root = torchtitan(tmp_path / "run")
    wanted = titan(root)
    shutil.move(root / "step-2", tmp_path / "aside")
    shutil.copytree(tmp_path / "aside", root / "step-2")
    donor = titan(only(root, 2, tmp_path))
    operated(root, {"graft": {"step": 2}})
    found = titan(root)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert all(torch.equal(a, b) for a, b in zip(found[name], donor[name], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found["weights"], wanted["weights"], strict=True))


def only(root: Path, step: int, folder: Path) -> Path:
    """A run that has this step alone."""
    shutil.copytree(root / f"step-{step}", folder / "only" / f"step-{step}")
    return folder / "only"


def titan(root: Path) -> dict[str, list[torch.Tensor]]:
    trainer = resumed_titan(root)
    states = list(trainer.optimizer.state.values())
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    return {
        "weights": weights,
        **{key: [s[key].clone() for s in states] for key in ("exp_avg", "exp_avg_sq", "step")},
    }


@pytest.mark.parametrize("moments", ["last", "average", "zero"])
@pytest.mark.long
def test_torchtitan_loads_the_average(tmp_path: Path, moments: str) -> None:
    root = torchtitan(tmp_path / "run")
    before = snapshot(root)
    old = {step: titan(only(root, step, tmp_path / str(step))) for step in (2, 4, 6)}
    operated(root, {"average": {"steps": ["2", "6"], "weights": ["1", "3"], "moments": moments}})
    found = titan(root)
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        for i, tensor in enumerate(found[key]):
            expected = mean([old[2][key][i], old[6][key][i]], [1.0, 3.0])
            if key != "weights" and moments != "average":
                expected = old[6][key][i] if moments == "last" else torch.zeros_like(tensor)
            assert torch.equal(tensor, expected)
    take_back(root, before)


def test_torchtitan_loads_the_scaled_weights(tmp_path: Path) -> None:
    root = torchtitan(tmp_path / "run")
    before, old = snapshot(root), titan(root)
    recipe = {"scale": {"params": r"^0\.weight$", "by": 0.9, "moments": "scale"}}
    operated(root, recipe)
    found = titan(root)
    for key, power in (("weights", 1), ("exp_avg", 1), ("exp_avg_sq", 2)):
        for i, tensor in enumerate(found[key]):
            assert torch.equal(tensor, old[key][i] * 0.9**power if i == 0 else old[key][i])
    take_back(root, before)


def test_olmo_core_is_averaged_too(tmp_path: Path) -> None:
    root = olmo(tmp_path / "run")
    before = snapshot(root)
    operated(root, {"average": {"last": 2, "moments": "average"}})
    take_back(root, before)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Path]:
    """Runs on two model ranks, bf16, ZeRO 1, saved at steps 2 and 4."""
    made: dict[str, Path] = {}

    def make(axis: str) -> Path:
        if axis not in made:
            made[axis] = tmp_path_factory.mktemp(axis) / "run"
            launch(
                "--config=train/configs/tiny.yaml", "--from-scratch", f"save={made[axis]}",
                f"data={corpus}", f"{axis}_model_parallel_size=2", "dtype=bf16", "train_iters=4",
                "save_interval=2", ranks=2,
            )  # fmt: skip
        return made[axis]

    return make


@pytest.mark.witness("bundled trainer", "average", "scale", by="deepspeed")
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@pytest.mark.long
def test_model_parallel_runs(cut: Callable[[str], Path], tmp_path: Path, axis: str) -> None:
    """Each rank's weights are its own masters, rounded; the trainer loads them."""
    root = tmp_path / "run"
    shutil.copytree(cut(axis), root, symlinks=True)
    before, steps = snapshot(root), [loaded(root, step) for step in (2, 4)]
    made = operated(root, {"average": {"last": 2}})
    found = loaded(root, 4)
    for path, tensor in found.items():
        if kind(path) == "master":
            assert torch.equal(tensor, mean([step[path] for step in steps]))
        elif kind(path) == "weights":
            # A norm's steps can be too small for bf16.
            assert not torch.equal(tensor, steps[1][path]) or tensor.numel() < 99, path
        else:
            assert torch.equal(tensor, steps[1][path])
    assert made.promise is not None and compare(made.promise, first_line(root, 2)) == []
    rounded(root, 4)
    take_back(root, before)
    operated(root, {"scale": {"params": WEIGHT, "by": 0.9}})
    rounded(root, 4)
    take_back(root, before)


def rounded(root: Path, step: int) -> None:
    """Every weight of every rank is found, rounded, in that rank's masters."""
    folder = root / f"global_step{step}"
    flats: dict[str, list[torch.Tensor]] = {}
    for file in sorted(folder.glob("*optim_states.pt")):
        shard = torch.load(file, weights_only=False)["optimizer_state_dict"]
        for flat, mapping in zip(
            shard["single_partition_of_fp32_groups"], shard["param_slice_mappings"], strict=True
        ):
            for name, at in mapping.items():
                flats.setdefault(name, []).append(flat[at.start : at.start + at.numel].bfloat16())
    seen = 0
    for file in sorted(folder.glob("*model_states.pt")):
        content = torch.load(file, weights_only=False)
        prefix = f"{int(file.name[6:8])}." if file.name.startswith("layer_") else ""
        for name, weight in (content if prefix else content.get("module") or {}).items():
            known = (prefix + name, f"tied_modules.embed.{name}")
            if isinstance(weight, torch.Tensor) and (full := next(filter(flats.get, known), "")):
                each = flats[full]
                assert any(torch.equal(weight.flatten(), one) for one in each), name
                seen += 1
    assert seen >= len(flats) // 2 > 3


# --- moments that are clipped --------------------------------------------------------------------


def test_clipped_moments_are_torchs(trained: Trained) -> None:
    """The median is torch's, of the whole parameter; the next update stays what it was."""
    root = trained(zero=1)
    before, old, name = snapshot(root), loaded(root, 8), "layers.0.query_key_value.weight"
    operated(root, {"clip_moments": {"above": 3, "params": name}})
    found = loaded(root, 8)
    shard = next((root / "global_step8").glob("*optim_states.pt"))
    mappings = torch.load(shard, weights_only=False)["optimizer_state_dict"]["param_slice_mappings"]
    (group,) = [i for i, mapping in enumerate(mappings) if name in mapping]
    at = mappings[group][name]
    part = slice(at.start, at.start + at.numel)
    for path, tensor in old.items():
        if kind(path) not in ("exp_avg", "exp_avg_sq") or group not in path:
            assert torch.equal(found[path], tensor), path
            continue
        squares = old[(*path[:-1], "exp_avg_sq")][part]
        limit = squares[squares > 0].median() * 3
        assert 0 < int((squares > limit).sum()) < at.numel
        expected = tensor.clone()
        if kind(path) == "exp_avg_sq":
            expected[part] = squares.clamp(max=limit)
        else:
            share = (limit.double() / squares.double()).clamp(max=1).sqrt()
            expected[part] = (tensor[part].double() * share).float()
        assert torch.equal(found[path], expected)
    again = plan(Run.open(root), from_data({"clip_moments": {"above": 3, "params": name}}))
    assert [change for change in again.changes if "exp_avg" in change.field] == []
    take_back(root, before)


def test_a_percentile_is_of_the_whole_parameter(tmp_path: Path) -> None:
    root = torchtitan(tmp_path / "run")
    old = titan(root)
    operated(root, {"clip_moments": {"percentile": 75}})
    found = titan(root)
    for before, after in zip(old["exp_avg_sq"], found["exp_avg_sq"], strict=True):
        above = before[before > 0]
        limit = above.flatten().sort().values[math.ceil(0.75 * above.numel()) - 1]
        assert torch.equal(after, before.clamp(max=limit))
