"""A transplant into its own layout is the step that was saved, in every format that can say so, and
its map has every parameter.

Whatever the surgeon forgets to move (a counter, a name, the state of a schedule) shows here: the
filled step is compared with the source value by value, and every element of every tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Recipe, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.operations.transplant import Transplant
from ckptsurgeon.operations.transplant_map import ParameterMap
from ckptsurgeon.recipe.file import from_data
from tests.cli.conftest import invoke
from tests.formats.matrix import FORMATS
from tests.support.snapshot import exact_snapshot, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]

REFUSED = {
    "DeepSpeed ZeRO 0": "numbers the states of its optimizer",
    "Hugging Face": "numbers the states of its optimizer",
    "NeMo 2": "counts its updates in a place which no surgery writes",
}
"""Format → why it is refused."""
NOT_LOADED = {"Megatron-LM torch_dcp": "step"}
"""Format → the key of its param groups that no load reads, and that stays."""
PADDING = {"Megatron-LM legacy": 118}
"""Format → elements between the parameters of each flat tensor, which are saved as they were in
memory: here at random."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_a_step_is_itself_after_a_transplant_into_its_own_layout(
    run_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(run_of(name), source, symlinks=True)
    shutil.copytree(source, run, symlinks=True)
    first, *_, last = Run.open(source).steps()
    back = from_data({"rollback": {"to": first}, "tensorboard": {"keep": True}})
    surgery.apply(Run.open(run), plan(Run.open(run), back))
    before, untouched = snapshot(run), exact_snapshot(source)
    recipe = from_data({"transplant": {"source": str(source), "step": last}})
    mapped = parameters(run, recipe)
    assert mapped.names("filled") == list(dict.fromkeys(row.name for row in mapped.rows)) != []
    assert mapped.left == ()
    assert [REFUSED[name] in why.what for why in mapped.refused] == [True] * (name in REFUSED)
    if name in REFUSED:
        with pytest.raises(SurgeryError, match=REFUSED[name]):
            plan(Run.open(run), recipe)
        return
    made = plan(Run.open(run), recipe)
    assert not any("not this step" in warning for warning in made.warnings)
    surgery.apply(Run.open(run), made)
    assert exact_snapshot(source) == untouched
    assert made.promise == Run.open(source).state(last).promise
    assert Run.open(run).latest() == last
    assert look.verify(Run.open(run), level=4).findings == ()
    words = ("diff", str(last), f"{run}:{last}", "-C", source, "--tensors", "--json")
    found = json.loads(invoke(*words).stdout)
    assert [each for each in found["changes"] if not known(each, name)] == []
    assert {each["elements"] for each in found["tensors"]["changed"]} <= {PADDING.get(name)}
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before


def parameters(root: Path, recipe: Recipe) -> ParameterMap:
    run = Run.open(root)
    return recipe[Transplant].parameters(run, run.checkpoint(run.latest()))


def known(change: dict[str, Any], name: str) -> bool:
    """Whether a difference is one of the few that must be there: the file of new values that is
    written beside those of torch.distributed.checkpoint, and what no load reads."""
    if change["kind"] != "change":
        return "/__ckptsurgeon_" in change["file"]
    return name in NOT_LOADED and change["field"].endswith(f".{NOT_LOADED[name]}")
