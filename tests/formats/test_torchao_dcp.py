"""torchao's optimizers through torch.distributed.checkpoint: the state of a weight is an object of
a class of its own, though `.metadata` calls it a tensor of numbers. Run by `make test-formats`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from ckptsurgeon import Run, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import exact_snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
CLASSES = {
    "AdamW8bit": "torchao.optim.subclass_8bit.OptimState8bit",
    "AdamW4bit": "torchao.optim.subclass_4bit.OptimState4bit",
    "AdamWFp8": "torchao.optim.subclass_fp8.OptimStateFp8",
}


def saved(root: Path, step: int, name: str) -> Path:
    """A step as torchtitan lays it out, by torch's own functions; `name` is of torchao, or torch's
    AdamW."""
    import torchao.optim

    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(8, 640), torch.nn.Linear(640, 8))
    made = torch.optim.AdamW if name == "AdamW" else getattr(torchao.optim, name)
    adam = made(model.parameters(), lr=1e-3)
    for _ in range(step):
        model(torch.randn(2, 8)).pow(2).mean().backward()
        adam.step()
        adam.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, adam, options=options)
    state: dict[str, Any] = {
        "train_state.step": step, **model.state_dict(),
        **{f"optimizer.{key}": value for key, value in states.items()},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=root / f"step-{step}", no_dist=True)
    return root


@pytest.fixture(autouse=True)
def without_a_compiler() -> Iterator[None]:
    """torchao compiles its update, which takes minutes on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("side", ["source", "run"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_transplant_is_refused_by_the_class(tmp_path: Path, name: str, side: str) -> None:
    source = saved(tmp_path / "source", 3, name if side == "source" else "AdamW")
    run = saved(tmp_path / "run", 1, name if side == "run" else "AdamW")
    before = exact_snapshot(run), exact_snapshot(source)
    with pytest.raises(SurgeryError) as refused:
        plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))
    assert CLASSES[name] in str(refused.value) and "damaged" not in str(refused.value)
    assert refused.value.next
    assert (exact_snapshot(run), exact_snapshot(source)) == before


@pytest.mark.parametrize("recipe", [
    {"reset": ["moments"]}, {"scale": {"params": ".*", "by": 0.5, "moments": "scale"}},
])  # fmt: skip
def test_what_touches_the_moments_is_refused_and_what_does_not_is_done(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    root = saved(tmp_path / "run", 1, "AdamW8bit")
    before = exact_snapshot(root)
    with pytest.raises(SurgeryError, match=CLASSES["AdamW8bit"]):
        plan(Run.open(root), from_data(recipe))
    assert exact_snapshot(root) == before
    assert plan(Run.open(root), from_data({"set": {"eps": 1e-6}})).changes
