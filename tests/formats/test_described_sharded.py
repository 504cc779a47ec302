"""Pages for trainers that save in shards: folders of torch's values, an engine, files of ranks.

No library of theirs runs here: torch's and DeepSpeed's own functions write what the cited sources
write, and load what was edited."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.export import export
from tests.formats.conftest import Make
from tests.support import deepspeed_engine, megatron_dist, nemo_files
from tests.support.described_runs import (
    FLAT,
    composer_sharded,
    composer_state,
    stepped,
    verl,
)
from tests.support.new_numbers import State, clipped, grafted, same
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.distributed")
EDITS = {"beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}


def test_a_sharded_composer_run(made: Make) -> None:
    root = made(composer_sharded)
    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("composer-sharded", [2, 4, 6], 6)
    recipe = {"set": {**EDITS, "lr": 5e-4, "tokens": 1000}, "reset": ["moments"]}
    plan = operate(root, recipe)
    state = composer_state(6)
    dcp.load(state, checkpoint_id=root / "ep0-ba6", no_dist=True)
    saved = state["state"]
    model, adam, schedule = stepped(0)
    set_optimizer_state_dict(model, adam, saved["optimizers"]["AdamW"])
    schedule.load_state_dict(saved["schedulers"]["LambdaLR"])
    group = adam.param_groups[0]
    assert plan.promise is not None
    assert group["lr"] == plan.promise.lr == pytest.approx(5e-4 * 0.9**6)
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.97), 1e-6, 0.3)
    assert schedule.base_lrs == [5e-4]
    assert all(not s["exp_avg"].any() and int(s["step"]) == 0 for s in adam.state.values())
    assert saved["timestamp"]["Timestamp"]["token"] == 1000
    shapes = {weight.name: weight.shape for weight in Run.open(root).checkpoint(6).weights()}
    assert shapes == {"0.weight": (2, 4), "0.bias": (2,)}
    take_back(root, before)


def test_new_numbers_of_a_sharded_composer_run(made: Make) -> None:
    """Weights and moments go by the same names, whatever the page says that they begin with."""
    root = made(composer_sharded)
    before = snapshot(root)

    def held(step: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        state = composer_state(step)
        dcp.load(state, checkpoint_id=root / f"ep0-ba{step}", no_dist=True)
        model, adam, _ = stepped(0)
        set_optimizer_state_dict(model, adam, state["state"]["optimizers"]["AdamW"])
        return state["state"]["model"], list(adam.state.values())

    (weights, states), (first, first_states) = held(6), held(2)
    recipe: dict[str, Any] = {"scale": {"params": "weight", "by": 0.5, "moments": "scale"}}
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    found, found_states = held(6)
    assert torch.equal(found["0.weight"], weights["0.weight"] * 0.5)
    assert torch.equal(found["0.bias"], weights["0.bias"])
    for kind, factor in (("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
        assert torch.equal(found_states[0][kind], states[0][kind] * factor)
        assert torch.equal(found_states[1][kind], states[1][kind])
    take_back(root, before)
    recipe = {"average": {"steps": ["2", "6"]}}
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    found, _ = held(6)
    for name, tensor in found.items():
        assert torch.equal(tensor, ((weights[name].double() + first[name].double()) / 2).float())
    take_back(root, before)
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data({"graft": {"step": 2}})))
    _, found_states = held(6)
    for new, old in zip(found_states, first_states, strict=True):
        assert all(torch.equal(new[kind], old[kind]) for kind in ("exp_avg", "exp_avg_sq", "step"))
    take_back(root, before)
    with pytest.raises(SurgeryError, match="LambdaLR can't decay linear") as error:
        surgery.plan(Run.open(root), from_data({"cooldown": {"steps": 4}}))
    assert "make the scheduler LambdaLR(optimizer, lambda t" in error.value.next[0]


def test_a_verl_run(made: Make) -> None:
    root = made(verl)
    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("verl", [2, 4, 6], 6)
    operate(root, {"rollback": {"to": 4}, "set": {**EDITS, "lr": 5e-4}, "reset": ["moments"]})
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "4"
    for rank in range(2):
        folder = root / "global_step_4" / "actor"
        _, adam, schedule = stepped(0)
        adam.load_state_dict(torch.load(folder / f"optim_world_size_2_rank_{rank}.pt"))
        extra = torch.load(folder / f"extra_state_world_size_2_rank_{rank}.pt")
        schedule.load_state_dict(extra["lr_scheduler"])
        group = adam.param_groups[0]
        assert group["lr"] == pytest.approx(5e-4 * 0.9**4) and schedule.base_lrs == [5e-4]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.97), 1e-6, 0.3)
        assert all(not s["exp_avg"].any() for s in adam.state.values())
    take_back(root, before)
    (root / "global_step_6/actor/optim_world_size_2_rank_1.pt").unlink()
    assert not Run.open(root).complete(6)


def test_the_files_of_fsdp2_hold_what_a_rank_has_of_each_tensor(made: Make) -> None:
    """verl with FSDP2 saves DTensors: their local part is edited."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    root = made(verl)
    with deepspeed_engine.process_group():
        model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(6):
            model(torch.ones(3, 4)).sum().backward()
            adam.step()
        state = adam.state_dict()
        state["param_groups"][0].update(initial_lr=1e-3, lr=1e-3 * 0.9**6)
        files = sorted((root / "global_step_6" / "actor").glob("optim_*.pt"))
        for file in files:
            torch.save(state, file)
        before = snapshot(root)
        operate(root, {"set": {**EDITS, "lr": 5e-4}, "reset": ["moments"]})
        for file in files:
            adam.load_state_dict(torch.load(file, weights_only=False))
            group = adam.param_groups[0]
            assert group["lr"] == pytest.approx(5e-4 * 0.9**6) and group["eps"] == 1e-6
            for held in adam.state.values():
                assert not held["exp_avg"].full_tensor().any() and int(held["step"]) == 0
        take_back(root, before)


def of_verl(root: Path, step: int) -> State:
    """What each rank loads: weights by name, moments by number."""
    held: State = {}
    for file in sorted((root / f"global_step_{step}" / "actor").glob("*.pt")):
        kind, _, rank = file.stem.partition("_")
        saved = torch.load(file, weights_only=False)
        if kind == "model":
            held |= {f"{rank} {name}": {"weights": local(saved[name])} for name in saved}
        if kind == "optim":
            for number, state in saved["state"].items():
                moments = {key: local(state[key]) for key in ("exp_avg", "exp_avg_sq")}
                held[f"{rank} {number}"] = moments
    return held


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


VERL: dict[str, dict[str, Any]] = {
    "average": {"average": {"steps": ["4", "6"], "weights": ["1", "3"], "moments": "average"}},
    "graft": {"graft": {"step": 4}},
    "clip": {"clip_moments": {"above": 2}},
    "scale": {"scale": {"params": r"^0\.weight$", "by": 0.9}},
}


def as_torch(name: str, first: State, last: State) -> State:
    """What becomes of `last`."""
    if name in ("graft", "clip"):
        moments = {key: held for key, held in last.items() if "exp_avg" in held}
        return last | (clipped(moments) if name == "clip" else grafted(first, moments))
    names = {key: 0.9 for key in last if key.endswith("0.weight")}
    if name == "scale":
        return {k: {m: t * names.get(k, 1.0) for m, t in held.items()} for k, held in last.items()}
    return {
        key: {
            kind: ((first[key][kind].double() + 3 * tensor.double()) / 4).to(tensor.dtype)
            for kind, tensor in held.items()
        }
        for key, held in last.items()
    }


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.long
def test_new_numbers_of_verl(made: Make, sharded: bool) -> None:
    """Of FSDP1 as it flattens them, and the DTensors of FSDP2, as a rank loads them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    root = made(verl)
    if sharded:
        with deepspeed_engine.process_group():
            for step in (4, 6):
                model, _, _ = stepped(0)
                fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
                adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
                for _ in range(step):
                    model(torch.ones(3, 4)).pow(2).sum().backward()
                    adam.step()
                state = adam.state_dict()
                state["param_groups"][0].update(initial_lr=1e-3, lr=1e-3 * 0.9**step)
                for rank in range(2):
                    folder = root / f"global_step_{step}" / "actor"
                    torch.save(model.state_dict(), folder / f"model_world_size_2_rank_{rank}.pt")
                    torch.save(state, folder / f"optim_world_size_2_rank_{rank}.pt")
            first, last = (of_verl(root, step) for step in (4, 6))
    else:
        first, last = (of_verl(root, step) for step in (4, 6))
    before = snapshot(root)
    for name, recipe in VERL.items():
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        assert look.verify(Run.open(root), level=4).findings == ()
        with deepspeed_engine.process_group():
            same(of_verl(root, 6), as_torch(name, first, last), last)
        take_back(root, before)
    with pytest.raises(SurgeryError, match="weights in 2 files"):
        export(Run.open(root), 6, root.parent / "out")
    (root / "global_step_6/actor/model_world_size_2_rank_1.pt").unlink()
    assert not Run.open(root).complete(6)


@pytest.mark.parametrize("file", [True, False])
def test_a_nemo_run_with_its_common_state_in_a_file_or_among_the_values(
    tmp_path: Path, file: bool
) -> None:
    """What megatron-core itself takes of the edited step, `test_nemo.py` asks."""
    root = nemo_files.make(tmp_path / "run", file=file)
    assert any(root.glob("*/weights/common.pt")) is file
    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("nemo", [20, 30], 30)
    assert run.format.idle_paths(root, 30) == []
    recipe = {"rollback": {"to": 20}, "set": {"lr": 3e-5, "beta2": 0.9}, "reset": ["moments"]}
    plan = operate(root, recipe)
    assert plan.promise is not None and plan.promise.betas == (0.9, 0.9)
    assert (plan.promise.step, plan.promise.adam_step) == (21, 0)
    (last,) = root.glob("*-last")
    for folder in (last, *root.glob("*step=20*")):
        if file:
            state = torch.load(folder / "weights" / "common.pt", weights_only=True)
        else:
            wanted: dict[str, Any] = {megatron_dist.COMMON: io.BytesIO()}
            dcp.load(wanted, checkpoint_id=folder / "weights", no_dist=True)
            (state,) = wanted[megatron_dist.COMMON]
        assert state["lr_schedulers"][0]["_last_lr"] == [plan.promise.lr] * 2
        assert state["PreTrainingDataModule"] == {"consumed_samples": 320}
    assert (Run.open(root).steps(), Run.open(root).latest()) == ([20], 20)
    take_back(root, before)


def test_a_folder_without_a_common_state_is_named(tmp_path: Path) -> None:
    root = nemo_files.make(tmp_path / "run")
    for common in root.glob("*/weights/common.pt"):
        common.unlink()
    run = Run.open(root)
    assert run.steps() == []
    assert "holds no common state of Megatron-core" in run.format.nameless(root)


def test_a_half_saved_folder_hides_no_other(made: Make) -> None:
    root = made(composer_sharded)
    shutil.rmtree(root / "ep0-ba4")
    (root / "ep0-ba6" / ".metadata").unlink()
    run = Run.open(root)
    assert (run.format.name, run.complete(2), run.complete(6)) == ("composer-sharded", True, False)


OPTIONS = deepspeed_engine.Options(stage=1)


def lightning(root: Path) -> Path:
    """`DeepSpeedStrategy.save_checkpoint` of lightning 2.6.6: a real engine under the tag
    `checkpoint`, the Trainer's state as its client state, and no scheduler of the engine's own."""
    with deepspeed_engine.process_group():
        engine = deepspeed_engine.build(OPTIONS)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(deepspeed_engine.live(engine), T_max=40)
        for step in range(1, 5):
            deepspeed_engine.train(engine, 1)
            cosine.step()
            if step % 2:
                continue
            state = {"pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": step}
            state["lr_schedulers"] = [cosine.state_dict()]
            state["callbacks"] = {"ModelCheckpoint{'monitor': 'loss'}": saver(root, step)}
            for name in (f"epoch=0-step={step}.ckpt", "last.ckpt"):
                engine.save_checkpoint(str(root / name), client_state=state, tag="checkpoint")
    return root


def saver(root: Path, step: int) -> dict[str, Any]:
    """What `ModelCheckpoint.state_dict` has at a step, with one file that has left since."""
    scores = {"best.ckpt": torch.tensor(0.25), f"epoch=0-step={step}.ckpt": torch.tensor(0.5)}
    return {
        "monitor": "loss", "best_model_score": scores["best.ckpt"],
        "best_model_path": str(root / "best.ckpt"), "dirpath": str(root),
        "best_k_models": {str(root / name): score for name, score in scores.items()},
        "kth_best_model_path": "", "kth_value": torch.tensor(float("inf")), "last_model_path": "",
    }  # fmt: skip


def test_an_engine_of_lightning(made: Make) -> None:
    root = made(lightning)
    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("lightning-deepspeed", [2, 4], 4)
    operate(root, {"set": {"eps": 1e-5}})
    operate(root, {"rollback": {"to": 2}, "set": {**EDITS, "lr": 5e-4}, "reset": ["moments"]})
    with deepspeed_engine.process_group():
        engine = deepspeed_engine.build(OPTIONS)
        _, state = engine.load_checkpoint(str(root / "last.ckpt"), load_lr_scheduler_states=False)
        held = deepspeed_engine.effective(engine)
        adam = deepspeed_engine.live(engine)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40)
        cosine.load_state_dict(state["lr_schedulers"][0])
    assert (state["global_step"], cosine.base_lrs) == (2, [5e-4] * 2)
    (held_files,) = state["callbacks"].values()
    (left,) = held_files["best_k_models"]
    assert Path(left).name == "epoch=0-step=2.ckpt"
    assert (held_files["best_model_path"], held_files["best_model_score"]) == (left, 0.5)
    assert Path(held_files["last_model_path"]).name == "last.ckpt"
    assert held["lr"] == pytest.approx(cosine.get_last_lr())
    assert (held["betas"], held["eps"]) == ([[0.9, 0.97]] * 2, [1e-6] * 2)
    assert held["weight_decay"] == [0.3, 0.0]
    assert held["steps"] == [0] and held["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    for _ in range(2):
        run = Run.open(root)
        surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before
    recipes: tuple[dict[str, Any], ...] = (
        {"average": {"last": 2, "moments": "average"}},
        {"graft": {"step": 2}},
        {"precision": {"to": "bf16"}},
    )
    for recipe in recipes:
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        for file in sorted((root / "epoch=0-step=4.ckpt" / "checkpoint").glob("*.pt")):
            copy = root / "last.ckpt" / "checkpoint" / file.name
            assert copy.read_bytes() == file.read_bytes()
        assert snapshot(root) != before
        take_back(root, before)


TWICE = """
name: twice
files:
  "meta_{step}.pt":
    fields: {consumed_samples: [[seen]]}
  "epoch_{epoch}_step_{step}":
    loader: dcp
    optimizers: [[optim]]
"""


def test_a_step_that_two_epochs_saved_is_edited_in_both(tmp_path: Path) -> None:
    """At the end of an epoch a trainer saves its last step once more, and resumes that one."""
    root = tmp_path / "run"
    root.mkdir()
    model, adam, _ = stepped(2)
    folders = [root / f"epoch_{epoch}_step_20" for epoch in (0, 1)]
    for folder in folders:
        saved = {"optim": get_optimizer_state_dict(model, adam, options=FLAT)}
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
    torch.save({"seen": 160}, root / "meta_20.pt")
    page = tmp_path / "twice.yaml"
    page.write_text(TWICE)
    run = Run.open(root, str(page))
    plan = surgery.plan(run, from_data({"set": {"beta2": 0.9}, "reset": ["moments"]}))
    surgery.apply(run, plan)
    for folder in folders:
        loaded = {"optim": get_optimizer_state_dict(model, adam, options=FLAT)}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        values = loaded["optim"]
        assert values["param_groups.0.weight.betas"] == (0.9, 0.9)
        assert float(values["state.0.weight.step"]) == 0
        assert not values["state.0.weight.exp_avg"].any()
