"""A step of DeepSpeed in a folder of another trainer's checkpoint answers as it does by itself."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ckptsurgeon import Run
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.tensors.strips import strips
from tests.support.deepspeed_engine import Options, make, process_group
from tests.support.universal import convert

KINDS = {
    "zero0": Options(stage=0, dtype="bf16"),
    "zero1": Options(stage=1),
    "zero2": Options(stage=2, dtype="bf16"),
    "zero3": Options(stage=3),
    "experts": Options(stage=1, dtype="bf16", model="moe"),
    "layers": Options(stage=1),
    "universal": Options(stage=1),
    "universal-zero3": Options(stage=3),
}
CAPABILITIES: dict[str, Callable[[Checkpoint], Any]] = {
    "state": lambda c: c.state(),
    "contradictions": lambda c: c.contradictions(),
    "parts": lambda c: c.parts(),
    "exp_avg": lambda c: c.fragments("exp_avg"),
    "replicas": lambda c: c.replicas(),
    "weights": lambda c: list(c.weights()),
    "strips": lambda c: list(strips(c)),
    "attention": lambda c: c.attention(),
    "like": lambda c: sorted(c.like(c).archives),
    "without": lambda c: sorted(c.like(_without_copy(c)).archives),
}


def _without_copy(checkpoint: Any) -> Any:
    """The same checkpoint, as if it had no universal copy."""
    trees = {path: tree for path, tree in checkpoint.trees.items() if "universal" not in str(path)}
    archives = {path: archive for path, archive in checkpoint.archives.items() if path in trees}
    return type(checkpoint)(checkpoint.path, checkpoint.step, trees, archives)


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """A run of DeepSpeed with the steps 4 and 6, and a Trainer's that has the same folders."""
    root = tmp_path_factory.mktemp("pair")
    flat, nested = root / "flat", root / "nested"
    with process_group():
        for step in (4, 6):
            make(flat, KINDS[request.param], step)
            if request.param == "layers":
                _spread(flat / f"global_step{step}")
            if request.param.startswith("universal"):
                convert(flat, step)
    for step in (4, 6):
        folder = nested / f"checkpoint-{step}"
        for item in flat.glob(f"global_step{step}*"):
            shutil.copytree(item, folder / item.name)
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    yield flat, nested


def _spread(folder: Path) -> None:
    """Put the weights into files of layers, as a pipeline does."""
    file = folder / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state["module"].items():
        layer, _, inside = name.partition(".")
        layers.setdefault(layer, {})[inside] = tensor
    state["module"] = None
    torch.save(state, file)
    for layer, tensors in layers.items():
        torch.save(tensors, folder / f"layer_{int(layer):02d}-model_00-model_states.pt")


def _answer(run: Path, folder: Path, capability: str) -> str:
    """What the latest step says, with its paths as they are below the folder of the shards."""
    checkpoint = Run.open(run).checkpoint(6)
    try:
        said = repr(CAPABILITIES[capability](checkpoint))
    except SurgeryError as error:
        said = f"{type(error).__name__}: {error}"
    return re.sub(rf"{re.escape(str(folder))}/|checkpoint-6|global_step6(?!_)", "", said)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.long
def test_every_capability_answers_alike(pair: tuple[Path, Path], capability: str) -> None:
    flat, nested = pair
    alone = _answer(flat, flat, capability)
    assert _answer(nested, nested / "checkpoint-6", capability) == alone
    assert "IndexError" not in alone and len(alone) > 1


@pytest.mark.long
def test_export_and_diff_of_tensors(pair: tuple[Path, Path], tmp_path: Path) -> None:
    exported = []
    for run in pair:
        out = tmp_path / run.name
        done = CliRunner().invoke(app, ["export", "6", "-o", str(out), "-C", str(run)])
        assert done.exit_code == 0, done.output
        (file,) = out.glob("*.safetensors")
        exported.append(load_file(file))
        compared = CliRunner().invoke(app, ["diff", "4", "6", "--tensors", "-C", str(run)])
        assert "tensors" in compared.stdout and not compared.stderr, compared.output
    one, other = exported
    assert one.keys() == other.keys() and one
    assert all(torch.equal(one[name], other[name]) for name in one)
