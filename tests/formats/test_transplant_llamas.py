"""A Llama goes on in another library: transformers' Trainer; torchtitan, which turns pairs of rows
and may fuse its projections; Megatron-core, which fuses them and the gate, and cuts them over
tensor ranks or its layers over stages. Run by `make test-formats`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import by_step
from tests.support.llamas import HEADS, KV_HEADS
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
STEP, MORE = 4, 5
TORCHTITAN, MEGATRON = "llama-huggingface-torchtitan", "llama-huggingface-megatron"
FSDP, ENGINES = "hugging_face-fsdp", tuple(f"hugging_face-zero-{stage}" for stage in (1, 2, 3))
CUT = {
    "tensor-megatron": ("--tensor", "2"), "staged-megatron": ("--stages", "2"),
    "cut-and-staged-megatron": ("--tensor", "2", "--stages", "2"),
}  # fmt: skip
"""Those that two or four ranks share, and how."""
LIBRARIES = (
    "hugging_face", FSDP, *ENGINES, "titan", "fused-titan", "megatron", *CUT,
)  # fmt: skip
PAGES = {
    "hugging_face": {"titan": TORCHTITAN, "fused-titan": TORCHTITAN, "megatron": MEGATRON,
                     **dict.fromkeys(CUT, MEGATRON), FSDP: "", **dict.fromkeys(ENGINES, "")},
    FSDP: {"titan": TORCHTITAN, "fused-titan": TORCHTITAN, ENGINES[2]: ""},
    ENGINES[0]: {"fused-titan": TORCHTITAN},
    ENGINES[2]: {"tensor-megatron": MEGATRON},
    "titan": {"fused-titan": "torchtitan-fused"},
    "megatron": {"tensor-megatron": ""},
    "staged-megatron": {"tensor-megatron": ""},
}  # fmt: skip
"""The page between two libraries, which is read in both directions."""
MOVES = [
    *(pair for b in ("titan", "fused-titan", "megatron", *CUT, FSDP)
      for pair in (("hugging_face", b), (b, "hugging_face"))),
    ("titan", "fused-titan"), ("fused-titan", "titan"), ("tensor-megatron", "megatron"),
    ("staged-megatron", "tensor-megatron"), ("tensor-megatron", "staged-megatron"),
    (FSDP, "titan"), (ENGINES[2], FSDP),
    ("titan", FSDP), ("fused-titan", FSDP), (FSDP, "fused-titan"),
    *((a, b) for e in ENGINES for a, b in (("hugging_face", e), (e, "hugging_face"))),
    ("fused-titan", ENGINES[0]), ("tensor-megatron", ENGINES[2]),
]  # fmt: skip


def page(source: str, target: str) -> str:
    return PAGES[source][target] if target in PAGES.get(source, ()) else PAGES[target][source]


def train(library: str, root: Path, stop: int, *more: str) -> dict[int, float]:
    """To step `stop`, from where the library resumes: the loss of each update."""
    words, ranks = ["tests.support.llamas", library], 1
    if library.endswith("megatron"):
        words = ["tests.support.megatron_llama"]
        if library in CUT:
            ranks, more = 2 ** (len(CUT[library]) // 2), (*more, *CUT[library])
    environment = {}
    if library == FSDP:
        environment["ACCELERATE_USE_CPU"], ranks = "true", 2
    return by_step(*words, root, stop, *more, ranks=ranks, environment=environment)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[int, float]]]:
    """Of each library a run, one of a single step and another seed, and the losses after `STEP`."""
    folder = tmp_path_factory.mktemp("llamas")
    losses = {}
    for library in LIBRARIES:
        more = ("--saved", str(STEP), "--fresh", str(folder / f"fresh {library}"))
        seen = train(library, folder / library, STEP + MORE, *more)
        losses[library] = {step: loss for step, loss in seen.items() if step > STEP}
    return folder, losses


@pytest.fixture
def runs(trained: tuple[Path, dict[str, dict[int, float]]]) -> Path:
    return trained[0]


@pytest.fixture
def losses(trained: tuple[Path, dict[str, dict[int, float]]]) -> dict[str, dict[int, float]]:
    return trained[1]


def filled(run: Path, source: Path, names: str) -> Plan:
    """The run, filled, taken back and filled again."""
    sharded = any(any(root.glob("checkpoint-*/optimizer_0")) for root in (run, source))
    if names == "torchtitan-fused" or sharded:
        file = run.parent / "page.yaml"  # neither step says how many heads there are
        file.write_text(f"use: {names}\nsizes: {{heads: {HEADS}, kv_heads: {KV_HEADS}}}\n")
        names = str(file) if names else ""
    section: dict[str, Any] = {"source": str(source), "step": STEP, "names": names}
    for root in (run, source):
        if (root / "order.txt").exists():
            section["order"] = str(root / "order.txt")
    before = snapshot(run)
    made = plan(Run.open(run), from_data({"transplant": section}))
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()
    return made


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_next_losses_are_those_of_the_source(
    runs: Path, losses: dict[str, dict[int, float]], tmp_path: Path, source: str, target: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / f"fresh {target}", run)
    filled(run, runs / source, page(source, target))
    more = ["--saved"]  # none
    if source == "hugging_face" and "titan" in target:
        more += ["--like", str(runs / source / f"checkpoint-{STEP}")]
    assert train(target, run, STEP + MORE, *more) == pytest.approx(losses[source], rel=1e-6)


@pytest.mark.parametrize("there", LIBRARIES[1:])
def test_there_and_back_is_the_step_that_was_saved(runs: Path, tmp_path: Path, there: str) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    shutil.copytree(runs / f"fresh {there}", run)
    shutil.copytree(runs / "fresh hugging_face", back)
    filled(run, runs / "hugging_face", page("hugging_face", there))
    filled(back, run, page("hugging_face", there))
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
    made = filled(run, runs / "fused-titan", "")
    assert not any("left" in text for text in made.warnings)


def test_a_number_of_heads_that_no_step_says_is_asked_for(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "fresh fused-titan", run)
    with pytest.raises(SurgeryError, match="how many kv_heads there are is said by neither") as it:
        plan(
            Run.open(run),
            from_data({"transplant": {"source": str(runs / "titan"), "names": "torchtitan-fused"}}),
        )
    assert "sizes: {kv_heads: N}" in str(it.value.next)


def test_a_number_of_heads_that_the_model_has_not_is_refused(runs: Path, tmp_path: Path) -> None:
    """Also one that the rows would allow."""
    file = tmp_path / "page.yaml"
    file.write_text(f"use: {MEGATRON}\nsizes: {{kv_heads: {HEADS}}}\n")
    run = tmp_path / "run"
    shutil.copytree(runs / "fresh megatron", run)
    before = snapshot(run)
    with pytest.raises(SurgeryError, match="the page says 4 kv_heads, and the steps say 2"):
        filled(run, runs / "hugging_face", str(file))
    assert snapshot(run) == before


def test_a_number_of_heads_that_does_not_fit_is_refused(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.yaml"
    query = "model.layers.{i}.self_attn.q_proj.weight"
    file.write_text(f"use: {TORCHTITAN}\nhalves_to_pairs: {{'{query}': 3}}\n")
    run = tmp_path / "run"
    shutil.copytree(runs / "fresh titan", run)
    before = snapshot(run)
    with pytest.raises(SurgeryError, match="32 rows are not those of 1 group and 3 heads"):
        filled(run, runs / "hugging_face", str(file))
    assert snapshot(run) == before
