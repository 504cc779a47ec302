"""A Llama goes on in another library: transformers' Trainer and torchtitan, which turns pairs of
rows and may fuse its projections. Run by `make test-formats`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import run_module
from tests.support.llamas import KV_HEADS
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
STEP, MORE = 4, 5
LIBRARIES = ("hugging_face", "titan", "fused-titan")
PAGE = "llama-huggingface-torchtitan"
MOVES = [(a, b) for a in LIBRARIES for b in LIBRARIES if a != b]


def train(library: str, root: Path, stop: int, *more: str) -> dict[int, float]:
    """To step `stop`, from where the library resumes: the loss of each update."""
    environment = {"PYTHONWARNINGS": "ignore"}
    done = run_module("tests.support.llamas", library, root, stop, *more, environment=environment)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"'))
    return {int(step): loss for step, loss in json.loads(line).items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each library a run, and one of a single step and another seed."""
    folder = tmp_path_factory.mktemp("llamas")
    for library in LIBRARIES:
        train(library, folder / library, STEP)
        train(library, folder / f"fresh {library}", 1, "--seed", "7")
    return folder


@pytest.fixture(scope="module")
def losses(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """Those that each library itself has next."""
    out = {}
    for library in LIBRARIES:
        run = tmp_path_factory.mktemp("on") / "run"
        shutil.copytree(runs / library, run)
        out[library] = train(library, run, STEP + MORE)
    return out


def filled(run: Path, source: Path, **more: str) -> Plan:
    fused = run.parent / "fused.yaml"
    fused.write_text(f"use: torchtitan-fused\nsizes: {{kv_heads: {KV_HEADS}}}\n")
    section = {"source": str(source), "step": STEP, "names": str(fused), **more}
    for root in (run, source):
        if (root / "order.txt").exists():
            section |= {"names": more.get("names", PAGE), "order": str(root / "order.txt")}
    before = snapshot(run)
    made = plan(Run.open(run), from_data({"transplant": section}))
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()
    return made


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_next_losses_are_those_of_the_source(
    runs: Path, losses: dict[str, dict[int, float]], tmp_path: Path, source: str, target: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / f"fresh {target}", run)
    filled(run, runs / source)
    like = ["--like", str(runs / source / f"checkpoint-{STEP}")] if source == LIBRARIES[0] else []
    assert train(target, run, STEP + MORE, *like) == pytest.approx(losses[source], rel=1e-6)


@pytest.mark.parametrize("there", LIBRARIES[1:])
def test_there_and_back_is_the_step_that_was_saved(runs: Path, tmp_path: Path, there: str) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    shutil.copytree(runs / f"fresh {there}", run)
    shutil.copytree(runs / "fresh hugging_face", back)
    filled(run, runs / "hugging_face")
    filled(back, run)
    mine, its = (root / f"checkpoint-{STEP}" for root in (back, runs / "hugging_face"))
    weights, known = (load_file(step / "model.safetensors") for step in (mine, its))
    assert weights.keys() == known.keys()
    assert all(torch.equal(weights[name], known[name]) for name in known)
    states, wanted = (torch.load(step / "optimizer.pt") for step in (mine, its))
    assert states["param_groups"] == wanted["param_groups"]
    for number, state in wanted["state"].items():
        for key, tensor in state.items():
            assert torch.equal(states["state"][number][key], tensor), (number, key)


def test_what_is_fused_in_both_needs_no_page(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "fresh fused-titan", run)
    made = filled(run, runs / "fused-titan", names="")
    assert not any("left" in text for text in made.warnings)


def test_a_number_of_heads_that_no_step_says_is_asked_for(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "fresh fused-titan", run)
    with pytest.raises(SurgeryError, match="how many kv_heads there are is said by neither") as it:
        filled(run, runs / "titan", names="torchtitan-fused")
    assert "sizes: {kv_heads: N}" in str(it.value.next)


def test_a_number_of_heads_that_does_not_fit_is_refused(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.yaml"
    page.write_text(f"use: {PAGE}\nsizes: {{heads: 3}}\n")
    run = tmp_path / "run"
    shutil.copytree(runs / "fresh titan", run)
    before = snapshot(run)
    with pytest.raises(SurgeryError, match="32 rows are not those of 1 groups and 3 heads"):
        filled(run, runs / "hugging_face", names=str(page))
    assert snapshot(run) == before
