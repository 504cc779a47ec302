"""GPT-2 goes on where its matrices are transposed, by the rules of docs/transplant.md.

Run by `make test-formats`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import REPO, by_step

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
STEP, MORE = 3, 4
KINDS = ("conv1d", "linear")


def train(kind: str, root: Path, stop: int, *seed: str) -> dict[int, float]:
    return by_step("tests.support.gpt2s", kind, root, stop, *seed)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a run, and one of a single step and another seed; and the page."""
    folder = tmp_path_factory.mktemp("gpt2s")
    for kind in KINDS:
        train(kind, folder / kind, STEP)
        train(kind, folder / f"fresh {kind}", 1, "7")
    text = (REPO / "docs" / "transplant.md").read_text("utf-8")
    (rules,) = re.findall(r"<!-- names: conv1d -->\n```yaml\n(.*?)```", text, re.DOTALL)
    (folder / "names.yaml").write_text(rules)
    return folder


def filled(run: Path, source: Path, names: Path) -> Plan:
    order = str(source / "order.txt")
    section = {"source": str(source), "step": STEP, "names": str(names), "order": order}
    made = plan(Run.open(run), from_data({"transplant": section}))
    surgery.apply(Run.open(run), made)
    assert look.verify(Run.open(run), level=4).findings == ()
    return made


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("source", "target"), [KINDS, KINDS[::-1]])
def test_the_next_losses_are_those_of_the_source(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    run, on = tmp_path / "run", tmp_path / "on"
    shutil.copytree(runs / f"fresh {target}", run)
    shutil.copytree(runs / source, on)
    made = filled(run, runs / source, runs / "names.yaml")
    assert not any("left" in text for text in made.warnings)
    wanted = train(source, on, STEP + MORE)
    assert sorted(wanted) == list(range(STEP + 1, STEP + MORE + 1))
    assert train(target, run, STEP + MORE) == pytest.approx(wanted, rel=1e-6)


def test_each_matrix_is_transposed_as_torch_does_and_back(runs: Path, tmp_path: Path) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    shutil.copytree(runs / "fresh linear", run)
    shutil.copytree(runs / "fresh conv1d", back)
    filled(run, runs / "conv1d", runs / "names.yaml")
    filled(back, run, runs / "names.yaml")
    steps = [root / f"checkpoint-{STEP}" for root in (runs / "conv1d", run, back)]
    known, made, again = (load_file(step / "model.safetensors") for step in steps)
    turned = [
        name for name in known if not torch.equal(known[name], made[name].view_as(known[name]))
    ]
    assert len(turned) == 8
    for name, tensor in known.items():
        expected = tensor.t().contiguous() if name in turned else tensor
        assert made[name].shape == expected.shape and torch.equal(made[name], expected)
        assert torch.equal(again[name], tensor)
    states, wanted = (torch.load(step / "optimizer.pt")["state"] for step in steps[::2])
    for number, state in wanted.items():
        assert all(torch.equal(states[number][key], state[key]) for key in state), number
