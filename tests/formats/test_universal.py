"""Universal copies that the real ds_to_universal made, loaded by engines with `load_universal`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.export import export
from tests.support.deepspeed_engine import (
    Options,
    build,
    effective,
    gathered,
    launched,
    make,
    process_group,
    resume,
    train,
)
from tests.support.new_numbers import cases, same
from tests.support.snapshot import snapshot
from tests.support.surgeries import WANTED, take_back
from tests.support.universal import convert

KINDS = {
    "zero1": Options(stage=1),
    "zero2-bf16": Options(stage=2, dtype="bf16"),
    "zero1-fused": Options(stage=1, optimizer="fused"),
    "zero1-apex": Options(stage=1, optimizer="apex"),
    "zero3": Options(stage=3),
    "zero3-fused": Options(stage=3, optimizer="fused"),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def universal(options: Options) -> Options:
    return replace(options, config={**options.config, "checkpoint": {"load_universal": True}})


def operate(root: Path, **recipe: Any) -> Plan:
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    assert look.verify(Run.open(root), level=4).findings == ()
    assert plan(Run.open(root), from_data(recipe)).empty
    return made


@pytest.mark.thinned(3)
@pytest.mark.witness(
    "DeepSpeed universal",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="deepspeed",
)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.long
def test_shards_and_copy_hold_the_same_whichever_is_loaded(tmp_path: Path, name: str) -> None:
    options = KINDS[name]
    make(tmp_path, options)
    convert(tmp_path)
    files, clipped = snapshot(tmp_path), {} if options.stage == 3 else {"clip_grad": 0.5}
    operate(tmp_path, set={**WANTED, **clipped})
    for loaded in (options, universal(options)):
        held = resume(tmp_path, loaded)
        assert held["rates"] == [[5e-4, 5e-4]] * 3
        assert held["betas"] == [[0.8, 0.99]] * 2 and held["eps"] == [1e-6] * 2
        of_group_0 = options.stage == 3 and loaded is not options
        assert held["weight_decay"] == [0.3, 0.3 if of_group_0 else 0.0]
        assert held["clip_grad"] == (clipped or {"clip_grad": 1.0})["clip_grad"]
        assert held["moments"]["exp_avg"] > 0 and held["moments"]["exp_avg_sq"] > 0
    operate(tmp_path, reset=["moments"])
    for loaded in (options, universal(options)):
        held = resume(tmp_path, loaded)
        assert held["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0}
        assert set(held["steps"]) <= {0} and not any(held["group_step"])
    for _ in range(2):
        surgery.apply(Run.open(tmp_path), surgery.plan_undo(Run.open(tmp_path)))
    assert snapshot(tmp_path) == files


@pytest.mark.parametrize("name", ["zero1", "zero3"])
@pytest.mark.long
def test_a_run_of_universal_copies_alone(tmp_path: Path, name: str) -> None:
    make(tmp_path, KINDS[name])
    convert(tmp_path)
    shutil.rmtree(tmp_path / "global_step6")
    (tmp_path / "latest").unlink()
    made = operate(tmp_path, set=WANTED, reset=["moments"])
    assert made.promise is not None and made.promise.adam_step == 0
    held = resume(tmp_path, universal(KINDS[name]))
    assert held["lr"] == [made.promise.lr] * 2 and held["steps"] == [0]
    assert held["betas"] == [list(made.promise.betas or ())] * 2


@pytest.mark.long
def test_the_defects_of_zero_3_are_warned_of_and_real(tmp_path: Path) -> None:
    make(tmp_path, KINDS["zero3"])
    convert(tmp_path)
    made = plan(Run.open(tmp_path), from_data({"set": {"eps": 1e-6}}))
    assert len([text for text in made.warnings if "universal copy of ZeRO 3" in text]) == 2
    held = resume(tmp_path, universal(KINDS["zero3"]), 3)
    assert held["weight_decay"] == [0.1, 0.1]  # of group 0, in both
    engine = build(universal(KINDS["zero3"]))
    engine.load_checkpoint(str(tmp_path))
    train(engine, 2)
    assert effective(engine)["steps"] == [6 + 2 * 2]  # once for each group


# --- pointers ------------------------------------------------------------------------------------


def two_steps(root: Path, options: Options = KINDS["zero1"]) -> None:
    """Steps 4 and 6, both converted: `latest_universal` names the last one."""
    make(root, options, steps=4)
    convert(root, 4)
    make(root, options, steps=6)
    convert(root, 6)


def test_a_rollback_takes_latest_universal_along(tmp_path: Path) -> None:
    two_steps(tmp_path)
    operate(tmp_path, rollback={"to": 4})
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert (tmp_path / "latest_universal").read_text() == "global_step4_universal"
    assert not (tmp_path / "global_step6_universal").exists()
    assert resume(tmp_path, universal(KINDS["zero1"]))["step"] == 4


def test_a_pointer_that_cannot_follow_is_told(tmp_path: Path) -> None:
    two_steps(tmp_path)
    shutil.rmtree(tmp_path / "global_step4_universal")
    made = plan(Run.open(tmp_path), from_data({"rollback": {"to": 4}}))
    assert any("has no universal copy" in text for text in made.warnings)
    surgery.apply(Run.open(tmp_path), made)
    assert (tmp_path / "latest_universal").read_text() == "global_step6_universal"


def test_a_stale_latest_universal_is_told(tmp_path: Path) -> None:
    """A run that went on after its conversion, as tr11 did: the flag would take it back."""
    make(tmp_path, KINDS["zero1"], steps=4)
    convert(tmp_path, 4)
    make(tmp_path, KINDS["zero1"], steps=6)
    state = look.inspect(Run.open(tmp_path))
    assert state.step == 6
    assert any("latest_universal names 'global_step4_universal'" in note for note in state.notes)
    assert look.verify(Run.open(tmp_path)).findings == ()


def test_a_conversion_that_was_cut_off_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path, KINDS["zero1"])
    copy = convert(tmp_path)
    (copy / "tmp").mkdir()
    before = snapshot(copy)
    surgery.apply(Run.open(tmp_path), plan(Run.open(tmp_path), from_data({"set": WANTED})))
    assert snapshot(copy) == before


def test_an_export_has_each_weight_once(tmp_path: Path) -> None:
    """The model files of the copy are no further tensor-parallel ranks."""
    root = tmp_path / "run"
    make(root, KINDS["zero1"])
    convert(root)
    for file in root.glob("*/mp_rank_00_model_states.pt"):
        state = torch.load(file, weights_only=False)
        state["module"]["lm_head.weight"] = state["module"].pop("0.weight")
        torch.save(state, file)
    export(Run.open(root), 6, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert load_file(file)["lm_head.weight"].shape == (8, 8)


# --- new numbers ---------------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.witness(
    "DeepSpeed universal",
    "average",
    "average --moments average",
    "scale",
    "scale --moments scale",
    "graft moments",
    "graft moments --params",
    "clip_moments",
    by="deepspeed",
)
@pytest.mark.parametrize("name", ["zero1", "zero2-bf16", "zero3"])
@pytest.mark.long
def test_an_engine_loads_what_torch_computes(tmp_path: Path, name: str) -> None:
    """Whichever it loads: the shards or their copy."""
    options = KINDS[name]
    two_steps(tmp_path, options)
    first, last = (gathered(tmp_path, options, step) for step in (4, 6))
    before = snapshot(tmp_path)
    for recipe, expected in cases(4, 6, "0.weight").values():
        surgery.apply(Run.open(tmp_path), plan(Run.open(tmp_path), from_data(recipe)))
        assert look.verify(Run.open(tmp_path), level=4).findings == ()
        for loaded in (options, universal(options)):
            same(gathered(tmp_path, loaded, 6), expected(first, last), last)
        take_back(tmp_path, before)


@pytest.mark.witness("DeepSpeed universal", "precision bf16", by="deepspeed")
@pytest.mark.parametrize("name", ["zero1", pytest.param("zero3", marks=pytest.mark.slow)])
def test_an_engine_of_another_precision_loads_either(tmp_path: Path, name: str) -> None:
    """An fp16 run with a copy: its weights are rounded from the masters, its scaler goes."""
    was = replace(KINDS[name], dtype="fp16")
    make(tmp_path, was)
    convert(tmp_path)
    held, before = gathered(tmp_path, was, 6), snapshot(tmp_path)
    for to, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        made = operate(tmp_path, precision={"to": to})
        assert made.promise is not None and made.promise.loss_scale == 1.0
        options = replace(was, dtype=to)
        for loaded in (options, universal(options)):
            for parameter, found in gathered(tmp_path, loaded, 6).items():
                kept = held[parameter]
                assert torch.equal(found.pop("weights"), kept["param"].to(dtype))
                assert all(torch.equal(tensor, kept[key]) for key, tensor in found.items())
            assert resume(tmp_path, loaded)["loss_scale"] in (None, 1.0)
        model = tmp_path / "global_step6_universal" / "mp_rank_00_model_states.pt"
        if model.exists():
            weights = torch.load(model, weights_only=False)["module"].items()
            assert all(torch.equal(w, held[n]["param"].to(dtype)) for n, w in weights)
        take_back(tmp_path, before)


def test_a_reset_of_some_parameters_reaches_the_copy(tmp_path: Path) -> None:
    options = KINDS["zero1"]
    make(tmp_path, options)
    convert(tmp_path)
    operate(tmp_path, reset=["moments"], moments={"params": "^0.weight$"})
    for loaded in (options, universal(options)):
        held = gathered(tmp_path, loaded, 6)
        still = {name for name, kept in held.items() if not kept["exp_avg"].any()}
        assert still == {"0.weight"}


def test_a_step_that_was_not_converted_is_refused(tmp_path: Path) -> None:
    """What its copy would hold is not there; without that of the edited step all is well."""
    two_steps(tmp_path)
    shutil.rmtree(tmp_path / "global_step4_universal")
    recipes: tuple[dict[str, Any], ...] = ({"average": {"last": 2}}, {"graft": {"step": 4}})
    for recipe in recipes:
        with pytest.raises(SurgeryError, match="step 6 has a universal copy, and step 4 has none"):
            plan(Run.open(tmp_path), from_data(recipe))
    shutil.move(tmp_path / "global_step6_universal", tmp_path / "global_step4_universal")
    (tmp_path / "latest_universal").unlink()
    for recipe in recipes:
        files = {change.file for change in plan(Run.open(tmp_path), from_data(recipe)).changes}
        assert files and not any("universal" in file for file in files)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
@pytest.mark.long
def test_copies_alone_get_new_numbers(tmp_path: Path, name: str) -> None:
    options = KINDS[name]
    two_steps(tmp_path, options)
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"global_step{step}")
    (tmp_path / "latest").unlink()
    first, last = (gathered(tmp_path, universal(options), step) for step in (4, 6))
    before = snapshot(tmp_path)
    recipe, expected = cases(4, 6, "0.weight")["average-all"]
    surgery.apply(Run.open(tmp_path), plan(Run.open(tmp_path), from_data(recipe)))
    assert look.verify(Run.open(tmp_path), level=4).findings == ()
    same(gathered(tmp_path, universal(options), 6), expected(first, last), last)
    take_back(tmp_path, before)


def test_a_copy_alone_that_was_joined_from_ranks_is_refused(tmp_path: Path) -> None:
    """Its model files have what each rank had, and no loader reads it there."""
    make(tmp_path, KINDS["zero1"])
    copy = convert(tmp_path)
    shutil.rmtree(tmp_path / "global_step6")
    (tmp_path / "latest").unlink()
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        file = copy / "zero" / "0.weight" / f"{kind}.pt"
        state = torch.load(file, weights_only=False)
        torch.save({**state, "param": torch.cat([state["param"]] * 2)}, file)
    with pytest.raises(SurgeryError, match=r"has 0\.weight whole"):
        plan(Run.open(tmp_path), from_data({"scale": {"params": "weight", "by": 0.5}}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_run_of_two_ranks_goes_on_with_one(tmp_path: Path, name: str) -> None:
    launched("make", tmp_path, KINDS[name])
    convert(tmp_path)
    made = operate(tmp_path, set=WANTED, reset=["moments"])
    held = resume(tmp_path, universal(KINDS[name]))
    assert made.promise is not None and held["lr"] == [made.promise.lr] * 2
    assert held["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0} and held["steps"] == [0]
