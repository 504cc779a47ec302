"""Megatron-core's experts go on over other ranks and stages, as its own model, optimizer and
checkpoints have them. Run by `make test-formats`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.dcp_tensors import tensors
from tests.support.launch import run_module
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
pytest.importorskip("megatron.core")

STEP, MORE = 4, 5
SAVED = f"iter_{STEP:07d}"
KINDS = {
    "one rank": (), "two ranks": ("--expert-ranks", "2"), "two stages": ("--stages", "2"),
}  # fmt: skip
"""How the ranks share the four experts of each layer."""
MOVES = [("one rank", "two ranks"), ("two ranks", "two stages"), ("two stages", "one rank"),
         ("two ranks", "one rank")]  # fmt: skip
CHAINED = re.compile(r"chained_\d+\.")
"""How the core begins the names of an optimizer that is several: where experts have their own
ranks."""


def train(kind: str, root: Path, stop: int, *more: str) -> dict[int, float]:
    """To step `stop`, from where the library resumes: the loss of each update."""
    words = ("tests.support.megatron_llama", root, stop, "--experts", "4", *KINDS[kind], *more)
    done = run_module(
        *words, ranks=2 if KINDS[kind] else 1, environment={"PYTHONWARNINGS": "ignore"}
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"'))
    return {int(step): loss for step, loss in json.loads(line).items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a run, one of a single step and another seed, and the next losses of the
    first."""
    folder = tmp_path_factory.mktemp("experts")
    for kind in KINDS:
        train(kind, folder / kind, STEP)
        train(kind, folder / f"fresh {kind}", 1, "--seed", "7")
        shutil.copytree(folder / kind, folder / f"on {kind}")
        losses = train(kind, folder / f"on {kind}", STEP + MORE)
        (folder / f"{kind}.json").write_text(json.dumps(losses))
    return folder


def filled(run: Path, source: Path) -> None:
    """The run, filled, taken back and filled again."""
    before = snapshot(run)
    made = plan(Run.open(run), from_data({"transplant": {"source": str(source), "step": STEP}}))
    assert not any("left" in text for text in made.warnings), made.warnings
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_next_losses_are_those_of_the_source(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    """And each tensor is that of the source, as torch.distributed.checkpoint joins both."""
    run = tmp_path / "run"
    shutil.copytree(runs / f"fresh {target}", run)
    filled(run, runs / source)
    known, found = (
        {CHAINED.sub("", name): tensor for name, tensor in tensors(root / SAVED).items()}
        for root in (runs / source, run)
    )
    assert known.keys() == found.keys() and any("experts" in name for name in known)
    assert [name for name in known if not torch.equal(known[name], found[name])] == []
    wanted = {int(k): v for k, v in json.loads((runs / f"{source}.json").read_text()).items()}
    assert train(target, run, STEP + MORE) == pytest.approx(wanted, rel=1e-6)
