"""bitsandbytes' 8-bit Adam reads the reset moments as zeros, and steps on as a new one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.edits import Fill
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, build, live, make, process_group, train
from tests.support.megatron_legacy import megatron_enums, save
from tests.support.snapshot import snapshot

pytestmark = pytest.mark.formats
NESTED = "__bnb_optimizer_quant_state__"
RESET = {"reset": ["moments"]}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def options(stage: int, dtype: str = "fp32") -> Options:
    return Options(stage=stage, dtype=dtype, optimizer="adamw8bit", model="wide")


def files(root: Path) -> list[Path]:
    return [path for path in (root / "global_step6").glob("*.pt") if quantized(path)]


def quantized(path: Path) -> list[dict[str, Any]]:
    """The quantized states of a file, nested or not."""
    tree = torch.load(path, weights_only=False)
    outer = tree["optimizer"] if "optimizer_state_dict" not in tree else tree
    inner = outer if outer is not tree else tree["optimizer_state_dict"]["base_optimizer_state"]
    states = [] if inner is None else inner["state"].values()
    held = [state.get(NESTED, state) for state in states]
    return [state for state in held if "qmap1" in state]


def numbers(state: dict[str, Any], which: str) -> torch.Tensor:
    """What the library makes of the codes."""
    from bitsandbytes.functional import dequantize_blockwise

    flat = state[f"state{which}"].reshape(-1)
    blocks = state[f"absmax{which}"]
    size = 1 << max(0, (-(-flat.numel() // blocks.numel()) - 1).bit_length())
    found = dequantize_blockwise(flat, absmax=blocks, code=state[f"qmap{which}"], blocksize=size)
    return torch.as_tensor(found)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (2, "bf16")])
def test_a_reset_moment_is_zero_by_its_codes(tmp_path: Path, stage: int, dtype: str) -> None:
    make(tmp_path, options(stage, dtype))
    before = [numbers(s, which) for f in files(tmp_path) for s in quantized(f) for which in "12"]
    assert before and all(bool(tensor.any()) for tensor in before)
    made = plan(Run.open(tmp_path), from_data(RESET))
    assert Fill(127) in {getattr(change, "new", None) for change in made.changes}
    surgery.apply(Run.open(tmp_path), made)
    assert look.verify(Run.open(tmp_path), level=4).findings == ()
    assert plan(Run.open(tmp_path), from_data(RESET)).empty
    for state in (state for file in files(tmp_path) for state in quantized(file)):
        for which in "12":
            assert not numbers(state, which).any()
            assert not state[f"absmax{which}"].any()
            codes = state[f"state{which}"].long()
            assert not state[f"qmap{which}"][codes].any()  # whatever the scale


def test_byte_0_is_not_0(tmp_path: Path) -> None:
    """What zeroing the bytes would have done."""
    make(tmp_path, options(0))
    state = quantized(files(tmp_path)[0])[0]
    state["state1"].zero_()
    assert bool((numbers(state, "1") < 0).all())


@pytest.mark.parametrize("stage", [0, 1])
def test_the_next_updates_are_those_of_a_new_optimizer(tmp_path: Path, stage: int) -> None:
    make(tmp_path, options(stage))
    fresh = build(options(stage))
    fresh.load_checkpoint(str(tmp_path))
    live(fresh).state.clear()
    train(fresh, 3)
    surgery.apply(Run.open(tmp_path), plan(Run.open(tmp_path), from_data(RESET)))
    reset = build(options(stage))
    reset.load_checkpoint(str(tmp_path))
    train(reset, 3)
    for new, old in zip(reset.module.parameters(), fresh.module.parameters(), strict=True):
        assert torch.equal(new, old)


def test_states_of_older_versions_are_not_nested(tmp_path: Path) -> None:
    make(tmp_path, options(0))
    (file,) = files(tmp_path)
    tree = torch.load(file, weights_only=False)
    for state in tree["optimizer"]["state"].values():
        state |= state.pop(NESTED, {})
    torch.save(tree, file)
    surgery.apply(Run.open(tmp_path), plan(Run.open(tmp_path), from_data(RESET)))
    for state in quantized(file):
        assert not numbers(state, "1").any() and not numbers(state, "2").any()


def test_a_map_without_0_is_refused(tmp_path: Path) -> None:
    make(tmp_path, options(0))
    (file,) = files(tmp_path)
    tree = torch.load(file, weights_only=False)
    for state in tree["optimizer"]["state"].values():
        for key in ("qmap1", "qmap2"):
            if key in state[NESTED]:
                state[NESTED][key] = state[NESTED][key].clone() + 1e-3
    torch.save(tree, file)
    with pytest.raises(SurgeryError, match="no code of qmap1 stands for 0"):
        plan(Run.open(tmp_path), from_data(RESET))


def test_a_part_of_the_codes_is_refused(tmp_path: Path) -> None:
    """Blocks of one scale do not end where parameters do."""
    make(tmp_path, options(1))
    with pytest.raises(SurgeryError, match="does not say which parameter"):
        plan(Run.open(tmp_path), from_data({**RESET, "moments": {"params": "weight"}}))


COMPUTED: dict[str, dict[str, Any]] = {
    "averaged": {"average": {"last": 2, "moments": "average"}},
    "scaled": {"scale": {"params": "weight", "by": 0.5, "moments": "scale"}},
    "clipped": {"clip_moments": {"above": 10.0}},
}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_codes_are_not_computed_with(tmp_path: Path, stage: int) -> None:
    """Refused by what they are; weights alone are averaged and scaled."""
    for step in (4, 6):
        make(tmp_path, options(stage), step)
    for what, recipe in COMPUTED.items():
        with pytest.raises(SurgeryError, match=f"the moments are uint8, which can't be {what}"):
            plan(Run.open(tmp_path), from_data(recipe))
    assert not plan(Run.open(tmp_path), from_data({"average": {"last": 2}})).empty


def test_the_states_of_a_megatron_checkpoint(tmp_path: Path) -> None:
    """The legacy layout without the distributed optimizer: one torch state dict for each rank."""
    from bitsandbytes.optim import AdamW8bit

    save(tmp_path, (20,), tensor=1, pipeline=1)
    file = tmp_path / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt"
    (file.parent / "distrib_optim.pt").unlink()
    weight = torch.nn.Parameter(torch.randn(64, 128))
    adam = AdamW8bit([weight], lr=1e-3)
    weight.grad = torch.randn_like(weight)
    adam.step()
    with megatron_enums():
        held = torch.load(file, weights_only=False)
        held["args"].use_distributed_optimizer = False
        held["optimizer"]["optimizer"]["state"] = adam.state_dict()["state"]
        for group in held["optimizer"]["optimizer"]["param_groups"]:
            del group["step"]  # bitsandbytes counts in each state
        torch.save(held, file)
    surgery.apply(Run.open(tmp_path), plan(Run.open(tmp_path), from_data(RESET)))
    assert plan(Run.open(tmp_path), from_data(RESET)).empty
    with megatron_enums():
        (state,) = torch.load(file, weights_only=False)["optimizer"]["optimizer"]["state"].values()
    assert state["step"] == 0
    assert not numbers(state[NESTED], "1").any() and not numbers(state[NESTED], "2").any()
    assert bool((state[NESTED]["state1"] == 127).all())


def test_codes_in_safetensors(tmp_path: Path) -> None:
    """As in a run of LeRobot's form: the next updates are those of a new optimizer."""
    from bitsandbytes.optim import AdamW8bit
    from safetensors.torch import load_file, save_file

    weight = torch.nn.Parameter(torch.randn(64, 128))
    adam = AdamW8bit([weight], lr=1e-3)
    for _ in range(4):
        updated(weight, adam)
    folder = tmp_path / "checkpoints" / "000004" / "training_state"
    folder.mkdir(parents=True)
    held = adam.state_dict()
    file = folder / "optimizer_state.safetensors"
    inner = held["state"][0][NESTED].items()
    flat = {f"state/0/{NESTED}/{key}": tensor.contiguous() for key, tensor in inner}
    save_file({**flat, "state/0/step": torch.tensor(held["state"][0]["step"])}, file)
    groups, step = folder / "optimizer_param_groups.json", folder / "training_step.json"
    groups.write_text(json.dumps(held["param_groups"]))
    step.write_text('{"step": 4}')
    before = snapshot(tmp_path)
    assert Run.open(tmp_path).format.name == "lerobot"
    surgery.apply(Run.open(tmp_path), plan(Run.open(tmp_path), from_data(RESET)))
    assert look.verify(Run.open(tmp_path), level=4).findings == ()
    assert plan(Run.open(tmp_path), from_data(RESET)).empty
    tensors = load_file(file)
    quantized = {name.rpartition("/")[2]: tensors[name] for name in flat}
    assert not numbers(quantized, "1").any() and not numbers(quantized, "2").any()
    assert bool((quantized["state1"] == 127).all())
    pair = [torch.nn.Parameter(weight.detach().clone()) for _ in range(2)]
    reset, fresh = (AdamW8bit([each], lr=1e-3) for each in pair)
    state = {0: {"step": int(tensors["state/0/step"]), NESTED: quantized}}
    reset.load_state_dict({"state": state, "param_groups": json.loads(groups.read_text())})
    for _ in range(3):
        for each, optimizer in zip(pair, (reset, fresh), strict=True):
            updated(each, optimizer)
    assert torch.equal(*pair)
    surgery.apply(Run.open(tmp_path), surgery.plan_undo(Run.open(tmp_path)))
    assert snapshot(tmp_path) == before


def updated(weight: torch.nn.Parameter, optimizer: Any) -> None:
    torch.manual_seed(int(weight.detach().sum().item() * 1e3) % 1000)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
