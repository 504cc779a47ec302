"""Whatever a step says of where its parameters lie, a transplant has each element at its place, or
is refused in words: no plan is made that can't be applied."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import DEFECT, SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, make, process_group

SIZES = {"both.weight": 128, "out.weight": 128}
"""Those of the first param group, which the layouts are of; its flat tensor has all of them."""


class Layout(NamedTuple):
    """Where each parameter lies in the flat tensor, and another shape of the first one."""

    spans: tuple[tuple[int, int], ...] = ((0, 128), (128, 128))
    shape: tuple[int, ...] | None = None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("layouts")
    with process_group():
        make(folder / "source", Options(stage=1, model="fused"), 2)
        make(folder / "run", Options(stage=2, model="fused"), 1)
        yield folder


def laid_out(root: Path, layout: Layout) -> dict[str, Any]:
    """Rewrite the one step of a run with this layout; its masters by that."""
    (step,) = root.glob("global_step*")
    shard, model = step / "zero_pp_rank_0_mp_rank_00_optim_states.pt", step / MODEL
    content, weights = (torch.load(file, weights_only=False) for file in (shard, model))
    mapping = content["optimizer_state_dict"]["param_slice_mappings"][0]
    for name, (start, numel) in zip(SIZES, layout.spans, strict=True):
        mapping[name].start, mapping[name].numel = start, numel
    if layout.shape is not None:
        weights["param_shapes"][0]["both.weight"] = torch.Size(layout.shape)
        torch.save(weights, model)
    torch.save(content, shard)
    return masters(root)


MODEL = "mp_rank_00_model_states.pt"


def masters(root: Path) -> dict[str, Any]:
    (shard,) = root.glob("global_step*/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state = torch.load(shard, weights_only=False)["optimizer_state_dict"]
    flat = state["single_partition_of_fp32_groups"][0]
    return {
        name: flat[at.start : at.start + at.numel].tolist()
        for name, at in state["param_slice_mappings"][0].items()
    }


EDGE = st.integers(0, 256) | st.sampled_from([0, 64, 128, 256])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Mostly one that covers the flat tensor, which nothing else is wrong with."""
    edge = draw(EDGE)
    spans = ((0, edge), (edge, 256 - edge))
    if draw(st.booleans()):
        spans = ((256 - edge, edge), (0, 256 - edge))
    if not draw(st.integers(0, 3)):
        spans = draw(st.tuples(*[st.tuples(st.integers(-8, 264), st.integers(-8, 264))] * 2))
    shape = draw(st.none() | st.tuples(st.integers(0, 20), st.sampled_from([1, 8, 16])))
    return Layout(spans, shape)


@given(layouts(), layouts())
@example(Layout(((0, 150), (150, 106))), Layout())
@example(Layout(), Layout(((0, 150), (150, 106))))
@example(Layout(), Layout(((0, 100), (100, 156))))
@example(Layout(shape=(15, 8)), Layout())
@example(Layout(), Layout(shape=(17, 8)))
@settings(max_examples=6)
def test_any_layout_is_filled_right_or_refused(
    saved: Path, source: Layout, template: Layout
) -> None:
    with TemporaryDirectory() as folder:
        run, old = (Path(shutil.copytree(saved / n, Path(folder) / n)) for n in ("run", "source"))
        wanted = laid_out(old, source)
        laid_out(run, template)
        try:
            made = plan(Run.open(run), from_data({"transplant": {"source": str(old)}}))
        except SurgeryError as error:
            assert error.next != DEFECT and str(error)
            return
        assert surgery.apply(Run.open(run), made) is not None
        found = masters(run)
    assert found == wanted and {name: len(found[name]) for name in found} == SIZES
