"""Megatron-core's experts go on over other ranks and stages, as its own model, optimizer and
checkpoints have them. Run by `make test-formats`."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.megatron import experts
from ckptsurgeon.recipe.file import from_data
from tests.support.dcp_tensors import tensors
from tests.support.launch import by_step
from tests.support.newest_megatron import by
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
pytest.importorskip("megatron.core")

STEP, MORE = 4, 5
SAVED = f"iter_{STEP:07d}"
SPREAD, CUT = ("--expert-ranks", "2"), ("--tensor", "2")
LEGACY = ("--sharding", "legacy")
KINDS = {
    "one rank": (1, ()),
    "two ranks": (2, SPREAD),
    "two stages": (2, ("--stages", "2")),
    "two tensor ranks": (2, CUT),
    "experts whole on tensor ranks": (2, (*CUT, *SPREAD, "--expert-tensor", "1")),
    "experts cut and spread": (4, (*CUT, *SPREAD)),
    "newest": (2, ("--newest", *SPREAD)),
    "newest on tensor ranks": (2, ("--newest", *CUT)),
    "legacy": (1, LEGACY),
    "legacy on two ranks": (2, (*LEGACY, *SPREAD)),
    "legacy and plain on two ranks": (2, (*LEGACY, *SPREAD, "--no-distributed")),
    "legacy and whole on tensor ranks": (2, (*LEGACY, *CUT, *SPREAD, "--expert-tensor", "1")),
    "legacy, of one rank on tensor ranks": (2, (*LEGACY, *CUT, "--expert-tensor", "1")),
}
"""How many ranks share the four experts of each layer, and how; by the newest megatron-core, or the
one of the environment."""
MOVES = [
    ("one rank", "two ranks"), ("two ranks", "two stages"), ("two stages", "one rank"),
    ("one rank", "two tensor ranks"), ("two tensor ranks", "experts whole on tensor ranks"),
    ("experts whole on tensor ranks", "experts cut and spread"),
    ("experts cut and spread", "newest"), ("newest", "newest on tensor ranks"),
    ("newest on tensor ranks", "two stages"),
]  # fmt: skip
LEGACY_MOVES = [
    ("legacy", "legacy on two ranks"), ("legacy on two ranks", "legacy and plain on two ranks"),
    ("legacy and plain on two ranks", "legacy on two ranks"), ("legacy on two ranks", "legacy"),
    ("legacy and whole on tensor ranks", "legacy and whole on tensor ranks"),
    ("legacy, of one rank on tensor ranks", "legacy, of one rank on tensor ranks"),
]  # fmt: skip
SIZES = st.sampled_from([1, 2, 3, 4, 8])
CHAINED = re.compile(r"chained_\d+\.")
"""How the core begins the names of an optimizer that is several: where experts have their own
ranks."""


def train(kind: str, root: Path, stop: int, *more: str) -> dict[int, float]:
    """To step `stop`, from where the library resumes: the loss of each update."""
    ranks, how = KINDS[kind]
    if "--newest" in how:
        by("newest")
    words = ("tests.support.megatron_llama", root, stop, "--experts", "4", *how, *more)
    return by_step(*words, ranks=ranks)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a run, one of a single step and another seed, and the losses after `STEP`."""
    folder = tmp_path_factory.mktemp("experts")
    for kind in KINDS:
        more = ("--saved", str(STEP), "--fresh", str(folder / f"fresh {kind}"))
        losses = train(kind, folder / kind, STEP + MORE, *more)
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
    assert goes_on(run, target) == pytest.approx(losses(runs, source), rel=1e-6)


@pytest.mark.parametrize(("source", "target"), LEGACY_MOVES)
def test_in_the_legacy_format_each_rank_has_its_own_experts(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    """Which it counts from 0 on, and whose files the core itself reads."""
    run = tmp_path / "run"
    shutil.copytree(runs / f"fresh {target}", run)
    filled(run, runs / source)
    assert goes_on(run, target) == pytest.approx(losses(runs, source), rel=1e-6)


def test_of_legacy_files_other_tensor_ranks_are_refused(runs: Path, tmp_path: Path) -> None:
    """They don't say how a parameter is cut."""
    source, run = "legacy on two ranks", tmp_path / "run"
    shutil.copytree(runs / "fresh legacy and whole on tensor ranks", run)
    with pytest.raises(SurgeryError, match="which block of it each rank has is not known"):
        filled(run, runs / source)


def losses(runs: Path, kind: str) -> dict[int, float]:
    """Those that the run itself had after `STEP`."""
    found = json.loads((runs / f"{kind}.json").read_text())
    return {int(step): loss for step, loss in found.items() if int(step) > STEP}


def goes_on(run: Path, kind: str) -> dict[int, float]:
    return train(kind, run, STEP + MORE, "--saved")  # none


@given(SIZES, SIZES, SIZES, st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_legacy_files_and_the_states_in_them_are_those_of_the_cores_own_groups(
    tensor: int, spread: int, cut: int, more: int
) -> None:
    """Each rank loads a file. The first of a data-parallel group, of the attention or of the
    experts, has in its file the state of what the group has."""
    from megatron.core.parallel_state import RankGenerator

    world = math.lcm(tensor, cut * spread) * more
    order: dict[str, Any] = {"pp": 1, "cp": 1, "order": "tp-cp-ep-dp-pp"}
    attention = RankGenerator(tp=tensor, ep=1, dp=world // tensor, **order)
    sparse = RankGenerator(tp=cut, ep=spread, dp=world // (cut * spread), **order)
    mine, data = places(attention, "tp"), places(attention, "dp")
    expert, piece, copy = (places(sparse, axis) for axis in ("ep", "tp", "dp"))
    files: dict[tuple[int, int], list[int]] = {}
    for rank in range(world):
        files.setdefault((mine[rank], expert[rank]), []).append(rank)
    assert experts.shares(tensor, spread, cut) == sorted(files)

    def folder(own: int, other: int) -> str:
        return f"mp_rank_{own:02d}" + (f"_{other:03d}" if spread > 1 else "")

    folders = [folder(mine[rank], expert[rank]) for rank in range(world)]
    several = [ranks for ranks in files.values() if len({piece[rank] for rank in ranks}) > 1]
    assert experts.share_one_file(tensor, spread, cut) == bool(several)
    args = {
        "tensor_model_parallel_size": tensor, "expert_model_parallel_size": spread,
        "expert_tensor_parallel_size": cut,
    }  # fmt: skip
    for (own, other), (one, *_) in files.items() if not several else ():
        leading = next(r for r in range(world) if data[r] == 0 and mine[r] == own)
        assert experts.first(folder(own, other), args, False) == folders[leading]
        same = (expert[one], piece[one], 0)
        leading = next(r for r in range(world) if (expert[r], piece[r], copy[r]) == same)
        assert experts.first(folder(own, other), args, True) == folders[leading]


def places(generator: Any, axis: str) -> dict[int, int]:
    """Of each rank, its place among those that differ from it along this axis alone."""
    return {rank: i for group in generator.get_ranks(axis) for i, rank in enumerate(group)}
