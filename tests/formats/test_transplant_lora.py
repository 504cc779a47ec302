"""A LoRA by peft, whose base stays frozen and is saved nowhere, goes on in another layout.

What it can't take is refused by name. Run by `make test-formats`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support import llamas, loras
from tests.support.launch import by_step
from tests.support.new_numbers import MOMENTS
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
STEP, MORE = 3, 2
ALONE, ENGINE = "", "zero-3"
"""The Trainer by itself, which numbers the states of its optimizer, and over DeepSpeed."""
PAGE = "peft-engine"
"""DeepSpeed's engine keeps the name of the adapter, and peft leaves it out of its file."""
State = dict[str, dict[str, torch.Tensor]]


def train(root: Path, stop: int, how: str, **more: Any) -> dict[int, float]:
    """To step `stop`, from where the Trainer resumes: the loss of each update."""
    if how == ALONE:
        return loras.train(root, stop, how, **more)
    words = (f"--{key}={value}" for key, value in more.items())
    return by_step("tests.support.loras", root, stop, "--how", how, *words)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a run, and one of a single step whose adapters began otherwise."""
    folder = tmp_path_factory.mktemp("loras")
    for how in (ALONE, ENGINE):
        train(folder / f"lora {how}", STEP, how)
        train(folder / f"fresh {how}", 1, how, seed=7)
    return folder


def filled(run: Path, source: Path, **more: Any) -> Plan:
    before = snapshot(run)
    section = {"source": str(source), **more}
    made = plan(Run.open(run), from_data({"transplant": section}))
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()
    return made


@pytest.mark.parametrize(("source", "target"), [(ALONE, ENGINE), (ENGINE, ALONE)])
def test_the_next_losses_of_a_lora_are_those_of_the_source(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    own, run = tmp_path / "own", tmp_path / "run"
    shutil.copytree(runs / f"lora {source}", own)
    shutil.copytree(runs / f"fresh {target}", run)
    made = filled(run, runs / f"lora {source}", names=PAGE)
    assert not [text for text in made.warnings if re.search("left|weight_decay", text)]
    wanted = train(own, STEP + MORE, source)
    assert sorted(wanted) == list(range(STEP + 1, STEP + MORE + 1))
    assert train(run, STEP + MORE, target) == pytest.approx(wanted, rel=1e-5)


def held(root: Path, step: int) -> State:
    """Of each half of an adapter the weights and the moments, as the Trainer loads them."""
    folder = root / f"checkpoint-{step}"
    weights = load_file(folder / "adapter_model.safetensors")
    states = torch.load(folder / "optimizer.pt")["state"]
    order = (root / "order.txt").read_text().split("\n")
    assert len(order) == len(weights) == len(states)
    return {
        name: {"weights": weights[name], **{kind: states[i][kind] for kind in MOMENTS}}
        for i, name in enumerate(order)
    }


@pytest.mark.parametrize("more", [True, False])
def test_adapters_of_one_run_alone_are_named(runs: Path, tmp_path: Path, more: bool) -> None:
    """Those of both are filled with their moments; the others here stay as they began."""
    run = tmp_path / "run"
    targets = ("q_proj", "v_proj", "k_proj") if more else ("q_proj",)
    train(run, 1, ALONE, seed=7, targets=targets)
    fresh, known = held(run, 1), held(runs / "lora ", STEP)
    order = (run if more else runs / "lora ") / "order.txt"
    made = filled(run, runs / "lora ", order=str(order))
    found = held(run, STEP)
    assert found.keys() == fresh.keys()
    for name, kinds in found.items():
        wanted = known.get(name, fresh[name])
        assert all(torch.equal(kinds[kind], wanted[kind]) for kind in kinds), name
    said = [text for text in made.warnings if "_proj.lora_A" in text]
    assert len(said) == 1 and ("k_proj" if more else "v_proj") in said[0], made.warnings


def refused(run: Path, source: Path, **more: Any) -> str:
    before = snapshot(run)
    with pytest.raises(SurgeryError) as error:
        filled(run, source, **more)
    assert snapshot(run) == before
    return f"{error.value} {error.value.next}"


@pytest.mark.parametrize(("source", "target"), [(ALONE, ENGINE), (ENGINE, ALONE)])
def test_without_a_page_the_names_are_the_reason_and_the_page_is_named(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / f"fresh {target}", run)
    said = refused(run, runs / f"lora {source}")
    assert (
        "numbers the states of its optimizer" in said and "calls the parameters otherwise" in said
    )
    assert ".lora_A.default.weight" in said and ".lora_A.weight" in said
    assert f"--names {PAGE}" in said


def test_a_step_of_adapters_takes_no_whole_model(runs: Path, tmp_path: Path) -> None:
    """It has no place for the base, which its trainer loads from elsewhere."""
    source, run = tmp_path / "source", tmp_path / "run"
    llamas.hugging_face(source, STEP)
    shutil.copytree(runs / f"fresh {ENGINE}", run)
    said = refused(run, source, order=str(source / "order.txt"))
    assert "no parameter of checkpoint-1 is in checkpoint-3 by its name" in said


def test_adapters_of_another_rank_are_refused_by_name(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, 1, ALONE, rank=2)
    said = refused(run, runs / "lora ", order=str(run / "order.txt"))
    assert "lora_A.weight has the sizes [2, 32] and [4, 32]" in said
