"""Hugging Face's Trainer goes on from a transplant: FSDP2 on other ranks, one process, DeepSpeed.

What its next update uses is read from the live optimizer, element by element.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils import _pytree

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.drawn import drawn
from tests.support.launch import by_step, run_module
from tests.support.snapshot import snapshot
from tests.support.universal import convert

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
STEP, FIRST = 6, 2
KINDS = {
    "fsdp on two ranks": ("trainer", 2),
    "fsdp on three ranks": ("trainer", 3),
    "one process": ("one-trainer", 1),
}
ORDER = ("first.weight", "second.weight", "first.bias", "second.bias")
"""What decays, and then what does not."""
MOVES = [(a, b) for a in KINDS for b in KINDS if a != b]


def train(library: str, root: Path, stop: int, ranks: int) -> dict[int, Any]:
    """To step `stop`, from where the Trainer resumes: what each update used."""
    environment = {}
    if library != "deepspeed":  # which knows the CPU by itself
        environment["ACCELERATE_USE_CPU"] = "true"
    words = ("tests.support.fsdp2", library, root, stop)
    return by_step(*words, ranks=ranks, environment=environment)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a run of 6 steps, one of 2 that is to be filled, and what the first used
    next."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (library, ranks) in KINDS.items():
        train(library, folder / name, STEP, ranks)
        fresh = folder / f"fresh {name}"
        shutil.copytree(folder / name, fresh)
        for step in range(FIRST + 2, STEP + 2, 2):
            shutil.rmtree(fresh / f"checkpoint-{step}")
        on = folder / f"on {name}"
        shutil.copytree(folder / name, on)
        (folder / f"{name}.json").write_text(json.dumps(train(library, on, STEP + 2, ranks)))
    return folder


def filled(run: Path, source: Path) -> None:
    before = snapshot(run)
    recipe = from_data({"transplant": {"source": str(source), "step": STEP}})
    surgery.apply(Run.open(run), plan(Run.open(run), recipe))
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_next_update_has_each_number_of_the_source(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / f"fresh {target}", run)
    filled(run, runs / source)
    library, ranks = KINDS[target]
    seen = train(library, run, STEP + 1, ranks)
    wanted = json.loads((runs / f"{source}.json").read_text())[str(STEP + 1)]
    assert sorted(seen) == [STEP + 1]
    for key in ("lr", "betas", "eps", "weight_decay", "adam_step", "tensors"):
        assert seen[STEP + 1][key] == wanted[key], key


def test_an_engine_of_deepspeed_gets_the_names_for_the_numbers(runs: Path, tmp_path: Path) -> None:
    """And a plain Trainer gets its state back, bit for bit."""
    run, back = tmp_path / "run", tmp_path / "back"
    train("deepspeed", run, FIRST, 1)
    filled(run, runs / "one process")
    shutil.copytree(runs / "fresh one process", back)
    filled(back, run)
    name = f"checkpoint-{STEP}/optimizer.pt"
    mine, its = (torch.load(r / name)["state"] for r in (back, runs / "one process"))
    assert mine.keys() == its.keys()
    for number, state in its.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(mine[number][key]), torch.as_tensor(value))
    nested = run / f"checkpoint-{STEP}"
    (tag,) = nested.glob("global_step*")
    converted = convert(nested, int(tag.name.removeprefix("global_step"))) / "zero"
    for number, parameter in enumerate(ORDER):
        for kind in ("exp_avg", "exp_avg_sq"):
            held = torch.load(converted / parameter / f"{kind}.pt")["param"]
            assert torch.equal(held.reshape(its[number][kind].shape), its[number][kind])
    shutil.rmtree(converted.parent)
    assert sorted(train("deepspeed", run, STEP + 1, 1)) == [STEP + 1]


def test_without_a_step_that_names_them_numbers_are_refused(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "fresh one process", run)
    recipe = from_data({"transplant": {"source": str(runs / "one process"), "step": STEP}})
    with pytest.raises(SurgeryError, match="numbers the states") as error:
        plan(Run.open(run), recipe)
    assert "--order FILE" in str(error.value.next)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(ORDER))
    section = {"source": str(runs / "one process"), "step": STEP, "order": str(order)}
    surgery.apply(Run.open(run), plan(Run.open(run), from_data({"transplant": section})))
    one, other = (r / f"checkpoint-{STEP}/optimizer.pt" for r in (run, runs / "one process"))
    mine, its = (torch.load(file)["state"] for file in (one, other))
    assert all(torch.equal(mine[i]["exp_avg"], its[i]["exp_avg"]) for i in its)


@st.composite
def llamas(draw: st.DrawFn) -> dict[str, int]:
    """Sizes, by the names of transformers' config."""
    groups = draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 2))
    return {
        "num_hidden_layers": draw(st.integers(1, 2)), "num_attention_heads": heads,
        "num_key_value_heads": groups, "hidden_size": heads * 2 * draw(st.integers(1, 3)),
        "intermediate_size": draw(st.integers(1, 9)), "vocab_size": 64 + draw(st.integers(0, 9)),
    }  # fmt: skip


@pytest.mark.parametrize(
    "count", [pytest.param(4, id="thin"), pytest.param(12, id="dense", marks=pytest.mark.slow)]
)
def test_of_any_sizes_there_and_back_over_stages_of_zero_is_the_same(
    tmp_path: Path, count: int
) -> None:
    """From either side. Two ranks of ZeRO; one start of each makes all of its runs."""
    cases = drawn(st.tuples(llamas(), st.integers(1, 3)), count)
    roots = [{name: tmp_path / f"{name} {i}" for name in RUNS} for i in range(len(cases))]
    for ranks, names in ((1, RUNS[:2]), (2, RUNS[2:])):
        jobs = [
            {"root": str(roots[i][name]), "step": STEP if "source" in name else 1,
             "seed": 100 * RUNS.index(name) + i, "how": f"zero-{stage}" if ranks == 2 else "",
             **shape}
            for i, (shape, stage) in enumerate(cases) for name in names
        ]  # fmt: skip
        environment = {"PYTHONWARNINGS": "ignore"}
        words = ("tests.support.generated_llamas", json.dumps(jobs))
        run_module(*words, ranks=ranks, environment=environment)
    for case, runs in zip(cases, roots, strict=True):
        source, plain, zero_source, zero = (runs[name] for name in RUNS)
        for origin, between, back, held in (
            (source, zero, plain, trained), (zero_source, plain, zero, sharded),
        ):  # fmt: skip
            filled(between, origin)
            filled(back, between)
            known, found = held(origin), held(back)
            assert known.keys() == found.keys() and len(known) > 10
            assert [n for n in known if not torch.equal(known[n], found[n])] == [], case
            for run in (between, back):
                surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))


RUNS = ("source", "fresh", "source over zero", "fresh over zero")


def sharded(root: Path) -> dict[tuple[Any, ...], torch.Tensor]:
    """Every tensor in the files of DeepSpeed, of each rank."""
    (tag,) = (root / f"checkpoint-{STEP}").glob("global_step*")
    return {
        (file.name, *path): leaf
        for file in tag.glob("*.pt")
        for path, leaf in _pytree.tree_flatten_with_path(torch.load(file, weights_only=False))[0]
        if isinstance(leaf, torch.Tensor)
    }


def trained(root: Path) -> dict[tuple[str, str], torch.Tensor]:
    """The weights, and what the optimizer keeps of each number."""
    folder = root / f"checkpoint-{STEP}"
    states = torch.load(folder / "optimizer.pt")["state"]
    weights = load_file(folder / "model.safetensors")
    return {("weights", name): each for name, each in weights.items()} | {
        (str(number), key): torch.as_tensor(value)
        for number, state in states.items() for key, value in state.items()
    }  # fmt: skip
