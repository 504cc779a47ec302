"""There and back is the step that was saved, bit for bit, between layouts that have the same names:
over generated sizes and cuts, as DeepSpeed and torch themselves write and join them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.dcp_tensors import tensors
from tests.support.deepspeed_engine import Options, launched, make, process_group
from tests.support.generated_dcp import written
from tests.support.generated_fsdp2 import FOLDERS
from tests.support.launch import run_module
from tests.support.universal import convert

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of the libraries' own making
STEP = 5


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def filled(run: Path, source: Path) -> Path:
    recipe = from_data({"transplant": {"source": str(source)}})
    made = plan(Run.open(run), recipe)
    assert not any("left" in text or "larger" in text for text in made.warnings), made.warnings
    surgery.apply(Run.open(run), made)
    return run


class Zero(NamedTuple):
    stage: int
    ranks: int
    dtype: str = "fp32"


def engine(root: Path, zero: Zero, model: str, steps: int) -> Path:
    options = Options(stage=zero.stage, dtype=zero.dtype, model=model)
    if zero.ranks == 1:
        make(root, options, steps)
    else:
        launched("make", root, options, zero.ranks, steps)
    return root


def of_engine(root: Path) -> dict[tuple[Any, ...], torch.Tensor]:
    """Every tensor of the step, by file and key path."""
    out: dict[tuple[Any, ...], torch.Tensor] = {}

    def walk(tree: Any, path: tuple[Any, ...]) -> None:
        if isinstance(tree, torch.Tensor):
            out[path] = tree
        items = tree.items() if isinstance(tree, dict) else ()
        for key, value in enumerate(tree) if isinstance(tree, (list, tuple)) else items:
            walk(value, (*path, key))

    for file in sorted((root / f"global_step{STEP}").glob("*.pt")):
        walk(torch.load(file, weights_only=False), (file.name,))
    return out


def joined(root: Path) -> dict[tuple[Any, ...], torch.Tensor]:
    """Masters and moments of ZeRO 3 as DeepSpeed's own converter joins them."""
    files = sorted((convert(root, STEP) / "zero").glob("*/*.pt"))
    found = {(file.parent.name, file.name): torch.load(file, weights_only=False) for file in files}
    return {name: each for name, each in found.items() if isinstance(each, torch.Tensor)} | {
        name: each["param"] for name, each in found.items()
        if isinstance(each, dict) and isinstance(each.get("param"), torch.Tensor)
    }  # fmt: skip


WIDTHS = st.tuples(st.integers(1, 9), st.integers(1, 9))
STAGES = st.integers(1, 3)
ZEROS = st.builds(Zero, STAGES, st.integers(1, 2), st.sampled_from(["fp32", "bf16"]))
PHASES = [Phase.generate]
"""Each example trains: smaller ones of a failure are not looked for."""
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
DENSITY = [pytest.param(3, id="thin"), pytest.param(25, id="dense", marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", DENSITY)
@pytest.mark.long
def test_between_stages_and_ranks_of_zero(examples: int) -> None:
    """Of one precision: weights of another one are rounded."""

    @given(WIDTHS, ZEROS, STAGES, st.integers(1, 2))
    @settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, phases=PHASES)
    def holds(widths: tuple[int, int], own: Zero, stage: int, ranks: int) -> None:
        model = f"sized-{widths[0]}-{widths[1]}"
        with TemporaryDirectory() as place:
            folder = Path(place)
            source = engine(folder / "source", own, model, STEP)
            there = engine(folder / "there", Zero(stage, ranks, own.dtype), model, 1)
            back = engine(folder / "back", own, model, 1)
            filled(back, filled(there, source))
            how = joined if own.stage == 3 else of_engine  # whose shards end with padding
            known, found = how(source), how(back)
        assert known.keys() == found.keys() and known
        assert [path for path in known if not torch.equal(known[path], found[path])] == []

    holds()


@st.composite
def cuts(draw: st.DrawFn, shapes: dict[str, list[int]]) -> dict[str, int | None]:
    return {name: draw(st.sampled_from([None, *range(len(shape))]))
            for name, shape in shapes.items()}  # fmt: skip


def shapes_of(widths: tuple[int, int]) -> dict[str, list[int]]:
    """Those of the model of `engine`."""
    one, two = widths
    return {
        "0.weight": [one, 8], "0.bias": [one], "1.weight": [one], "1.bias": [one],
        "2.weight": [two, one], "2.bias": [two],
    }  # fmt: skip


def by_fsdp2(root: Path, step: int, widths: tuple[int, int], ranks: int) -> Path:
    """A run that torch's FSDP2 trained and saved on so many ranks."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run_module(
        "tests.support.generated_fsdp2", root, step, *widths, ranks=ranks,
        environment=environment if ranks == 1 else None,
    )  # fmt: skip
    return root


def sharded(place: Path, jobs: dict[str, dict[str, Any]], ranks: int) -> None:
    """These runs by torch on several ranks."""
    told = [{"root": str(place / name), **job} for name, job in jobs.items()]
    run_module("tests.support.generated_dcp", json.dumps(told), ranks=ranks)


@pytest.mark.parametrize("examples", DENSITY)
@pytest.mark.long
def test_between_cuts_and_ranks_of_torchtitan_and_zero(examples: int) -> None:
    """From three ranks to one, or to an engine of ZeRO, and to three ranks with other cuts."""

    @given(st.data(), WIDTHS, STAGES | st.none())
    @settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, phases=PHASES)
    def holds(data: st.DataObject, widths: tuple[int, int], stage: int | None) -> None:
        one, two = widths
        shapes = shapes_of(widths)
        with TemporaryDirectory() as place:
            folder = Path(place)
            jobs = {
                name: {"step": step, "shapes": shapes, "cuts": data.draw(cuts(shapes))}
                for name, step in (("source", STEP), ("back", 1))
            }
            sharded(folder, jobs, 3)
            if stage is None:
                there = written(folder / "there", 1, shapes)
            else:
                there = engine(folder / "there", Zero(stage, 1), f"sized-{one}-{two}", 1)
            back = filled(folder / "back", filled(there, folder / "source"))
            known, found = (tensors(root / f"step-{STEP}") for root in (folder / "source", back))
        assert known.keys() == found.keys() and len(known) > 3 * len(shapes)
        assert [name for name in known if not torch.equal(known[name], found[name])] == []

    holds()


@pytest.mark.parametrize("examples", DENSITY)
@pytest.mark.long
def test_between_ranks_of_fsdp2_torchtitan_and_zero(examples: int) -> None:
    """Also where a rank has nothing of a parameter, as there are more ranks than rows."""

    @given(WIDTHS, st.integers(1, 3), st.integers(1, 3), st.sampled_from(["fsdp2", "titan", 1, 3]))
    @settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, phases=PHASES)
    def holds(widths: tuple[int, int], ranks: int, others: int, kind: str | int) -> None:
        one, two = widths
        with TemporaryDirectory() as place:
            folder = Path(place)
            source = by_fsdp2(folder / "source", STEP, widths, ranks)
            back = by_fsdp2(folder / "back", 1, widths, ranks)
            if kind == "fsdp2":
                there = by_fsdp2(folder / "there", 1, widths, others)
            elif isinstance(kind, int):
                there = engine(folder / "there", Zero(kind, 1), f"sized-{one}-{two}", 1)
            else:
                there = written(folder / "there", 1, shapes_of(widths))
            filled(back, filled(there, source))
            known, found = (
                {name: tensor for part in FOLDERS
                 for name, tensor in tensors(root / f"checkpoint-{STEP}" / part).items()}
                for root in (source, back)
            )  # fmt: skip
        assert known.keys() == found.keys() and len(known) > 3 * len(shapes_of(widths))
        assert [name for name in known if not torch.equal(known[name], found[name])] == []

    holds()
