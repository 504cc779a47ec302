"""Megatron-core loads a transplant between its own layouts: what each of its optimizers holds, by
megatron-core's own knowledge of which tensor is whose. Run by `make test-formats`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.dcp_tensors import tensors
from tests.support.drawn import drawn
from tests.support.launch import run_module
from tests.support.newest_megatron import by
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
pytest.importorskip("megatron.core")

PROGRAM = "tests.support.megatron_real"
STEP = 6
KINDS = {
    "legacy": ["--sharding", "legacy"],
    "legacy-plain": ["--sharding", "legacy", "--no-distributed"],
    "fully": ["--sharding", "fully_reshardable"],
    "dist-plain": ["--sharding", "fully_reshardable", "--no-distributed"],
    "newest": ["--sharding", "fully_reshardable"],
}
NEWEST = ("newest", "fully"), ("fully", "newest"), ("newest", "legacy"), ("newest", "newest")
"""Those of the newest megatron-core, and of the one of the environment."""
OWN = [(a, b) for a in KINDS for b in KINDS if a != b and "newest" not in (a, b)]
MOVES = [*OWN, *NEWEST]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a run, one of a single step and another seed, and what the first holds after a
    load. What can be resharded is saved by two ranks, and loaded by one."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, kind in KINDS.items():
        flags = [*kind, *by(name)]
        ranks = 2 if name in ("fully", "newest") else 1
        run_module(PROGRAM, "save", folder / name, *flags, ranks=ranks)
        fresh = ("--steps", "1", "--seed", "7")
        run_module(PROGRAM, "save", folder / f"fresh-{name}", *flags, *fresh, ranks=ranks)
        run_module(PROGRAM, "gather", folder / name, *flags)
    return folder


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_library_holds_each_tensor_of_the_source(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / f"fresh-{target}", run)
    before = snapshot(run)
    section: dict[str, Any] = {"source": str(runs / source), "step": STEP}
    made = plan(Run.open(run), from_data({"transplant": section}))
    surgery.apply(Run.open(run), made)
    assert look.verify(Run.open(run), level=4).findings == ()
    copy = tmp_path / "loaded"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".ckptsurgeon"))
    run_module(PROGRAM, "gather", copy, *KINDS[target], *by(target))
    held, wanted = (torch.load(f.with_name(f"{f.name}.pt")) for f in (copy, runs / source))
    assert held.keys() == wanted.keys()
    for name, known in wanted.items():
        for key in ("weights", "exp_avg", "exp_avg_sq"):
            assert torch.equal(held[name][key], known[key]), (name, key)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before


def test_a_step_of_nemo_goes_on_in_megatron_lm(runs: Path, tmp_path: Path) -> None:
    """What megatron-core saved under NeMo's names, it holds again under its own."""
    source, run = tmp_path / "nemo" / "checkpoints", tmp_path / "run"
    run_module("tests.support.nemo", "save", source)
    shutil.copytree(runs / "fresh-fully", run)
    section = {"source": str(source), "step": STEP, "names": "nemo-megatron"}
    made = plan(Run.open(run), from_data({"transplant": section}))
    assert made.promise is not None
    assert (made.promise.step, made.promise.consumed_samples) == (STEP + 1, STEP * 8)
    surgery.apply(Run.open(run), made)
    found = look.verify(Run.open(run), level=4).findings
    assert all("has lr" in text and "which the loader replaces" in text for text in found)
    (folder,) = source.glob(f"*-step={STEP}-*0/weights")
    wanted = tensors(folder)
    run_module(PROGRAM, "gather", run, *KINDS["fully"])
    held = torch.load(run.with_name("run.pt"))
    for name, mine in held.items():
        assert torch.equal(mine["weights"], wanted[f"module.{name}"])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(mine[kind], wanted[f"optimizer.state.{kind}.module.{name}"])


CUTS = [(2, 2), (1, 1), (2, 1), (1, 2)]
"""Tensor ranks and stages."""


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    """Those that both two tensor ranks and two stages can share, by the names of the arguments."""
    groups, width = 2 * draw(st.integers(1, 2)), 2 * draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 2))
    return {
        "num_layers": 2 * draw(st.integers(1, 2)), "hidden_size": heads * width,
        "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": width,
        "ffn_hidden_size": 2 * draw(st.integers(1, 7)),
        "padded_vocab_size": 64 + 2 * draw(st.integers(0, 3)),
    }  # fmt: skip


MOVED = st.tuples(sizes(), *[st.sampled_from(CUTS)] * 2).filter(lambda move: move[1] != move[2])


@pytest.mark.parametrize(
    "count", [pytest.param(4, id="thin"), pytest.param(12, id="dense", marks=pytest.mark.slow)]
)
def test_of_any_sizes_there_and_back_over_tensor_ranks_and_stages_is_the_same(
    tmp_path: Path, count: int
) -> None:
    """As torch joins the tensors. One start of four ranks makes all runs."""
    moves = drawn(MOVED, count)
    jobs = [
        {"root": str(tmp_path / f"{name} {i}"), "step": step, "seed": i + 100 * step,
         "tensor_model_parallel_size": cut[0], "pipeline_model_parallel_size": cut[1], **shape}
        for i, (shape, own, other) in enumerate(moves)
        for name, step, cut in (("source", 2, own), ("there", 1, other), ("back", 1, own))
    ]  # fmt: skip
    run_module("tests.support.generated_megatron", json.dumps(jobs), ranks=4)
    for i, move in enumerate(moves):
        source, there, back = (tmp_path / f"{name} {i}" for name in ("source", "there", "back"))
        known = tensors(source / "iter_0000002")
        for run, other in ((there, source), (back, there)):
            recipe = from_data({"transplant": {"source": str(other), "step": 2}})
            made = plan(Run.open(run), recipe)
            assert not any("left" in text or "larger" in text for text in made.warnings), made
            surgery.apply(Run.open(run), made)
            found = tensors(run / "iter_0000002")
            assert known.keys() == found.keys() and len(known) > 30
            assert [n for n in known if not torch.equal(known[n], found[n])] == [], move
