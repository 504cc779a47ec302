"""Averaged, scaled, grafted and clipped: what transformers and accelerate load is torch's own."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import DamagedFile, SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support import hugging_face
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.usefixtures("accelerate_on_cpu"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
MOMENTS = ("exp_avg", "exp_avg_sq")
Live = dict[str, Any]
"""`weights` by name, and each moment by number, as the library holds them."""


def trained(root: Path, stop: int) -> Any:
    wanted = argparse.Namespace(
        run=root, stop=stop, max_steps=8, scheduler="linear", width=8, optim="adamw_torch"
    )
    trainer = hugging_face.trainer(wanted)
    trainer.args.report_to = []
    return trainer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf") / "run"
    trained(root, 6).train()
    return root


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def held(model: Any, optimizer: Any) -> Live:
    states = [state for state in getattr(optimizer, "optimizer", optimizer).state.values() if state]
    return {
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        **{kind: [state[kind].clone() for state in states] for kind in MOMENTS},
        "step": [float(state["step"]) for state in states],
    }


def resumed(root: Path, step: int) -> Live:
    """What the Trainer has loaded when it begins to train from a step."""
    from transformers import TrainerCallback

    seen: list[Live] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            seen.append(held(live["model"], live["optimizer"]))

        def on_step_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            control.should_training_stop = True

    copy = Path(shutil.copytree(root, root.parent / f"resumed-{len(list(root.parent.iterdir()))}"))
    trainer = trained(copy, step + 1)
    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=str(copy / f"checkpoint-{step}"))
    return seen[0]


def mean(tensors: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    total = sum(t.double() * share for t, share in zip(tensors, shares, strict=True))
    assert isinstance(total, torch.Tensor)
    return (total / sum(shares)).to(tensors[0].dtype)


def same(found: Live, wanted: Live) -> None:
    assert found["weights"].keys() == wanted["weights"].keys()
    differ = [n for n, t in wanted["weights"].items() if not torch.equal(found["weights"][n], t)]
    assert differ == []
    for kind in MOMENTS:
        assert all(torch.equal(a, b) for a, b in zip(found[kind], wanted[kind], strict=True)), kind
    assert found["step"] == wanted["step"]


AVERAGE = {"average": {"steps": ["2", "6"], "weights": ["1", "3"]}}


def averaged(first: Live, last: Live, moments: bool) -> Live:
    shares = [1.0, 3.0]
    out = dict(last)
    out["weights"] = {
        name: mean([first["weights"][name], tensor], shares)
        for name, tensor in last["weights"].items()
    }
    for kind in MOMENTS if moments else ():
        pairs = zip(first[kind], last[kind], strict=True)
        out[kind] = [mean([a, b], shares) for a, b in pairs]
    return out


@pytest.mark.witness(
    "Hugging Face", "average", "average --moments average", "graft moments", "clip_moments",
    "scale", by="transformers",
)  # fmt: skip
def test_the_trainer_loads_new_numbers(run: Path) -> None:
    before = snapshot(run)
    first, last = resumed(run, 2), resumed(run, 6)
    for moments in (False, True):
        recipe = {"average": {**AVERAGE["average"], **({"moments": "average"} if moments else {})}}
        operated(run, recipe)
        same(resumed(run, 6), averaged(first, last, moments))
        take_back(run, before)
    operated(run, {"scale": {"params": r"attn\.c_attn\.weight$", "by": 0.9}})
    scaled = {n: t * 0.9 if n.endswith("attn.c_attn.weight") else t
              for n, t in last["weights"].items()}  # fmt: skip
    same(resumed(run, 6), {**last, "weights": scaled})
    take_back(run, before)
    operated(run, {"graft": {"step": 2}})
    same(resumed(run, 6), {**first, "weights": last["weights"]})
    take_back(run, before)
    operated(run, {"clip_moments": {"percentile": 75}})
    same(resumed(run, 6), clipped(last))
    take_back(run, before)


def operated(root: Path, recipe: dict[str, Any]) -> None:
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    assert look.verify(Run.open(root), level=4).findings == ()


def clipped(last: Live) -> Live:
    out: Live = {**last, "exp_avg": [], "exp_avg_sq": []}
    for average, square in zip(last["exp_avg"], last["exp_avg_sq"], strict=True):
        above = square[square > 0]
        limit = above.sort().values[math.ceil(0.75 * above.numel()) - 1]
        share = (limit.double() / square.double()).clamp(max=1).sqrt()
        out["exp_avg_sq"].append(square.clamp(max=limit))
        touched = (square > limit).any()
        out["exp_avg"].append((average.double() * share).float() if touched else average)
    return out


# --- every way to save weights -------------------------------------------------------------------


def sharded(folder: Path, *, safe: bool) -> None:
    """The weights of a step as `save_pretrained` cuts large ones: several files and an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, end = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    names = sorted(tensors)
    cuts = [names[: len(names) // 2], names[len(names) // 2 :]]
    where = {}
    for i, mine in enumerate(cuts, 1):
        file = f"{stem}-{i:05}-of-00002.{end}"
        part = {name: tensors[name] for name in mine}
        save_file(part, folder / file, {"format": "pt"}) if safe else torch.save(
            part, folder / file
        )
        where |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps(index))


def as_torch(folder: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def in_bf16(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


WAYS: dict[str, Callable[[Path], None]] = {
    "safetensors, sharded": lambda folder: sharded(folder, safe=True),
    "torch, sharded": lambda folder: sharded(folder, safe=False),
    "torch": as_torch,
    "bf16": in_bf16,
}


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as `from_pretrained` reads them, which knows every way."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, dtype="auto")
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_averaged_however_they_were_saved(run: Path, way: str) -> None:
    for step in (2, 4, 6):
        WAYS[way](run / f"checkpoint-{step}")
    before = snapshot(run)
    old = {step: saved(run / f"checkpoint-{step}") for step in (2, 6)}
    operated(run, AVERAGE)
    found = saved(run / "checkpoint-6")
    for name, tensor in found.items():
        assert torch.equal(tensor, mean([old[2][name], old[6][name]], [1.0, 3.0])), name
    assert any(not torch.equal(found[name], old[6][name]) for name in found)
    take_back(run, before)


def test_two_copies_of_the_weights_stay_alike(run: Path) -> None:
    from safetensors.torch import load_file

    for step in (2, 4, 6):
        folder = run / f"checkpoint-{step}"
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    before = snapshot(run)
    operated(run, {"average": {"last": 2}})
    folder = run / "checkpoint-6"
    mine, theirs = load_file(folder / "model.safetensors"), torch.load(folder / "pytorch_model.bin")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    take_back(run, before)


def test_names_in_the_groups_are_those_of_the_moments(run: Path) -> None:
    """torch saves `param_names` of an optimizer that was made of named parameters."""
    names = None
    for step in (2, 4, 6):
        file = run / f"checkpoint-{step}" / "optimizer.pt"
        state = torch.load(file)
        names = names or in_order(run)
        for group in state["param_groups"]:
            group["param_names"] = [names[number] for number in group["params"]]
        torch.save(state, file)
    before, old, first = snapshot(run), resumed(run, 6), resumed(run, 2)
    pattern = r"h\.0\.mlp\."
    recipe = {"scale": {"params": pattern, "by": 0.5, "moments": "scale"}}
    operated(run, recipe)
    found = resumed(run, 6)
    for number, name in enumerate(names or ()):
        power = 1 if "h.0.mlp." in name else 0
        assert torch.equal(found["weights"][name], old["weights"][name] * 0.5**power)
        assert torch.equal(found["exp_avg"][number], old["exp_avg"][number] * 0.5**power)
        assert torch.equal(found["exp_avg_sq"][number], old["exp_avg_sq"][number] * 0.25**power)
    take_back(run, before)
    operated(run, {"graft": {"step": 2, "params": pattern}})
    found = resumed(run, 6)
    for number, name in enumerate(names or ()):
        wanted = first if "h.0.mlp." in name else old
        assert torch.equal(found["exp_avg"][number], wanted["exp_avg"][number])
    take_back(run, before)


def in_order(root: Path) -> list[str]:
    """The parameters in the order of the Trainer's groups: those that decay, then the others."""
    trainer = trained(root.parent / "order", 1)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    return [names[id(p)] for group in groups for p in group["params"]]


def test_what_cannot_be_computed_is_refused(run: Path) -> None:
    before = snapshot(run)
    folder = run / "checkpoint-6"

    def refused(recipe: dict[str, Any], says: str) -> None:
        with pytest.raises(SurgeryError, match=says):
            surgery.plan(Run.open(run), from_data(recipe))

    refused({"scale": {"params": "attn", "by": 2.0, "moments": "scale"}}, "have no names")
    refused({"graft": {"step": 2, "params": "attn"}}, "does not say which parameter")
    state = torch.load(folder / "optimizer.pt")
    for each in state["state"].values():
        each["z"] = torch.zeros_like(each["exp_avg"])
    torch.save(state, folder / "optimizer.pt")
    refused({"average": {"last": 2}}, "the optimizer keeps z of each parameter")
    shutil.copytree(folder, run / "aside")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4])
    with pytest.raises(DamagedFile, match="the tensors end at byte"):
        surgery.plan(Run.open(run), from_data({"scale": {"params": "attn", "by": 2.0}}))
    (folder / "model.safetensors").unlink()
    refused({"scale": {"params": "attn", "by": 2.0}}, "in files that ckptsurgeon does not edit")
    shutil.rmtree(folder)
    shutil.copytree(run / "aside", folder)
    shutil.rmtree(run / "aside")
    assert snapshot(run).keys() == before.keys()


# --- Accelerate ----------------------------------------------------------------------------------


def accelerated() -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, adam = accelerator.prepare(model, adam)
    return accelerator, model, adam


@pytest.mark.parametrize("safe", [True, False])
def test_an_accelerator_loads_new_numbers(tmp_path: Path, safe: bool) -> None:
    root = tmp_path / "run"
    accelerator, model, adam = accelerated()
    seen = {}
    for step in (1, 2, 3):
        accelerator.backward(model(torch.randn(4, 8)).pow(2).sum())
        adam.step()
        adam.zero_grad()
        accelerator.save_state(str(root / f"step_{step}"), safe_serialization=safe)
        seen[step] = held(model, adam)
    before = snapshot(root)

    def loaded() -> Live:
        accelerator, model, adam = accelerated()
        accelerator.load_state(str(root / "step_3"))
        return held(model, adam)

    operated(root, {"average": {"steps": ["1", "3"], "weights": ["1", "3"], "moments": "average"}})
    wanted = averaged(seen[1], seen[3], True)
    counter = "1.num_batches_tracked"  # counts, and is no weight
    wanted["weights"][counter] = seen[3]["weights"][counter]
    same(loaded(), wanted)
    take_back(root, before)
    operated(root, {"scale": {"params": r"^0\.weight", "by": 3.0, "moments": "keep"}})
    weights = seen[3]["weights"] | {"0.weight": seen[3]["weights"]["0.weight"] * 3}
    same(loaded(), {**seen[3], "weights": weights})
    take_back(root, before)
    operated(root, {"graft": {"step": 1}})
    same(loaded(), {**seen[1], "weights": seen[3]["weights"]})
    take_back(root, before)
