"""Four data ranks become two: live engines have of each parameter what DeepSpeed's own universal
checkpoint gives them, and go on with the same losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, launched
from tests.support.new_numbers import MOMENTS, State
from tests.support.saved_engines import STEP, saved
from tests.support.universal import convert

OLD, NEW = 4, 2
KINDS = [
    Options(stage=1, model="wide"),
    Options(stage=2, dtype="bf16", model="wide"),
    Options(stage=3, dtype="bf16", model="wide"),
]
SETTINGS = ("step", "lr", "betas", "eps", "loss_scale", "clip_grad")


def held(root: Path, options: Options) -> tuple[State, list[dict[str, Any]]]:
    """Of each parameter its weights, its fp32 master and its moments, whole; and what each rank
    uses."""
    each = launched("gathered", root, options, NEW, STEP)
    return torch.load(root.with_name("held.pt")), each


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", KINDS, ids=lambda each: f"zero{each.stage}-{each.dtype}")
@pytest.mark.long
def test_two_ranks_have_what_a_universal_checkpoint_of_four_gives_them(
    tmp_path: Path, options: Options
) -> None:
    source = saved(tmp_path / "source", options, OLD)
    run = saved(tmp_path / "run", options, NEW, 1)
    surgery.apply(
        Run.open(run), plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))
    )
    assert look.verify(Run.open(run), level=4).findings == ()
    found, ranks = held(run, options)
    convert(source)
    known, others = held(source, replace(options, config={"checkpoint": {"load_universal": True}}))
    assert found.keys() == known.keys()
    for name, tensors in known.items():
        assert tensors.keys() == found[name].keys() == {"weights", "param", *MOMENTS}
        for kind, tensor in tensors.items():
            assert torch.equal(found[name][kind], tensor), (name, kind)
    # At ZeRO 3, DeepSpeed gives all groups the decay of the first, and one counter, which each of
    # them moves on: from the first update on it goes on otherwise than the source would.
    same = 1 if options.stage == 3 else 2
    for mine, its in zip(ranks, others, strict=True):
        assert mine["losses"][:same] == its["losses"][:same]
        assert [mine[key] for key in SETTINGS] == [its[key] for key in SETTINGS]
        assert (mine["steps"], mine["weight_decay"]) == ([STEP], [0.1, 0.0])
