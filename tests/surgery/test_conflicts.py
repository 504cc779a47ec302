"""Two sections of one recipe that would make something of the same numbers are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import UsageError
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

SCALE = {"params": "query_key_value.weight", "by": 0.9}
GRAFT = {"graft": {"step": 4}}
SWAP = {"swap_optimizer": {"to": "sgdw"}}


@pytest.mark.parametrize(
    ("recipe", "pair"),
    [
        ({**GRAFT, "scale": {**SCALE, "moments": "scale"}}, ("graft", "scale")),
        ({**GRAFT, "scale": {**SCALE, "moments": "zero"}}, ("graft", "scale")),
        ({**GRAFT, "clip_moments": {"above": 2}}, ("graft", "clip_moments")),
        ({**GRAFT, "average": {"last": 2, "moments": "average"}}, ("average", "graft")),
        ({**GRAFT, "reset": ["moments"]}, ("reset", "graft")),
        ({"average": {"last": 2}, "scale": SCALE}, ("average", "scale")),
        ({**SWAP, **GRAFT}, ("swap_optimizer", "graft")),
        ({**SWAP, "clip_moments": {"above": 2}}, ("swap_optimizer", "clip_moments")),
        ({**SWAP, "precision": {"to": "bf16"}}, ("swap_optimizer", "precision")),
        ({"precision": {"to": "bf16"}, "set": {"batch_size": 16}}, ("set", "precision")),
    ],
)
def test_two_words_on_one_thing_are_refused(
    trained: Trained, recipe: dict[str, Any], pair: tuple[str, str]
) -> None:
    root = trained()
    before = snapshot(root)
    with pytest.raises(UsageError) as refused:
        surgery.plan(Run.open(root), from_data(recipe))
    first, second = pair
    assert refused.value.what.startswith(f"both `{first}` and `{second}` change ")
    assert refused.value.next == (
        f"apply a recipe with `{first}` alone, and then one with `{second}`",
    )
    assert snapshot(root) == before


@pytest.mark.parametrize(
    "recipe",
    [
        {**GRAFT, "scale": SCALE},
        {**GRAFT, "average": {"last": 2}},
        {"clip_moments": {"above": 2}, "average": {"last": 2}},
        {**SWAP, "average": {"last": 2}, "set": {"lr": 5e-4}},
        {"precision": {"to": "bf16"}, **GRAFT},
        {"rollback": {"to": 6}, **SWAP, "scale": SCALE},
    ],
)
def test_words_on_different_things_are_one_surgery(
    trained: Trained, recipe: dict[str, Any]
) -> None:
    root = trained()
    before = snapshot(root)
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    take_back(root, before)
