"""A step that numbers its parameters, beside one of the same trainer that names them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptsurgeon import Run, apply, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.operations.section import Recipe
from ckptsurgeon.recipe.file import from_data
from tests.support.numbered_steps import saved
from tests.support.snapshot import snapshot

SIZES = {"lora_B": (4, 2), "lora_A": (2, 3)}
"""Of the parameters, in the order of the optimizer."""
PAGE = "peft-engine"


def named(half: str, adapter: str) -> str:
    return f"model.layers.0.q_proj.{half}.{adapter}weight"


def runs(folder: Path, numbered: str, adapter: str) -> tuple[Path, Path]:
    """A fresh run and its source. One of them numbers its parameters, and the other one names them,
    with their adapter."""
    for root, step in (("fresh", 1), ("source", 4)):
        more = "" if root == numbered else f"{adapter}."
        models = [
            {named(half, more): torch.randn(size) for half, size in SIZES.items()} for _ in range(3)
        ]
        saved(folder / root, step, models, {})
        if more:
            path = folder / root / f"checkpoint-{step}" / "optimizer.pt"
            adam = torch.load(path)
            adam["param_groups"][0]["param_names"] = [*models[0]]
            torch.save(adam, path)
    return folder / "fresh", folder / "source"


def section(source: Path, names: str) -> Recipe:
    return from_data({"transplant": {"source": str(source), "names": names}})


@pytest.mark.parametrize("numbered", ["fresh", "source"])
def test_by_a_page_the_names_of_the_one_are_the_order_of_the_other(
    tmp_path: Path, numbered: str
) -> None:
    run, source = runs(tmp_path, numbered, "default")
    apply(Run.open(run), plan(Run.open(run), section(source, PAGE)))
    for half in SIZES:
        found, known = of_half(run, half), of_half(source, half)
        assert len(found) == 4
        assert all(torch.equal(one, other) for one, other in zip(found, known, strict=True))


def of_half(run: Path, half: str) -> list[torch.Tensor]:
    """The weights, Adam's step and both moments."""
    step = run / "checkpoint-4"
    weights = load_file(step / "model.safetensors")
    states = torch.load(step / "optimizer.pt")["state"]
    return [
        *(each for name, each in weights.items() if half in name),
        *states[[*SIZES].index(half)].values(),
    ]


@pytest.mark.parametrize("numbered", ["fresh", "source"])
@pytest.mark.parametrize(("adapter", "page"), [("default", PAGE), ("other", "FILE")])
def test_without_one_the_names_are_the_reason_and_the_page_is_said(
    tmp_path: Path, numbered: str, adapter: str, page: str
) -> None:
    """That which comes with the product and leads from the one to the other, or one to write."""
    run, source = runs(tmp_path, numbered, adapter)
    before = snapshot(run)
    with pytest.raises(SurgeryError, match="calls the parameters otherwise") as why:
        plan(Run.open(run), section(source, ""))
    assert snapshot(run) == before
    assert named("lora_B", f"{adapter}.") in why.value.what
    assert named("lora_B", "") in why.value.what
    assert f"--names {page}" in str(why.value.next)
