"""New numbers that can't be meant are refused, and so is a source that is not what it was."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.dcp_trainers import torchtitan
from tests.support.nanotron_files import make as nanotron
from tests.support.snapshot import snapshot

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"scale": {"params": "weight", "by": 0}}, "a number other than 0"),
        (
            {"scale": {"params": "weight", "by": 0.9, "moments": "drop"}},
            "one of: keep, scale, zero",
        ),
        ({"scale": {"params": "query_key_val.wieght", "by": 0.9}}, "query_key_value.weight"),
        ({"average": {"last": 1}}, "write a whole number, at least 2"),
        ({"average": {"last": 9}}, "of those up to 8 are saved: 4"),
        ({"average": {"steps": ["4", "5"]}}, "step 5 is not saved"),
        ({"average": {"steps": ["4", "4"]}}, "two different steps"),
        ({"average": {"steps": ["4", "x"]}}, "last: 2"),
        ({"average": {"steps": ["4", "6"], "weights": ["1"]}}, "one for each of `steps`"),
        ({"average": {"last": 2}, "reset": ["moments"]}, "moments: zero"),
        ({"average": {}}, "either `steps` or `last`"),
        ({"clip_moments": {}}, "either `above` or `percentile`"),
        ({"clip_moments": {"above": 0.5}}, "write a number, at least 1"),
        ({"clip_moments": {"percentile": 100}}, "at least 50 and below 100"),
        ({"clip_moments": {"above": 9}, "reset": ["moments"]}, "drop one of them"),
        ({"clip_moments": {"above": 9, "params": "embeding"}}, "embeddings"),
        ({"graft": {"step": 8}}, "the step that is edited"),
        ({"graft": {"step": 5}}, "step 5 is not saved"),
        ({"graft": {"step": 4, "only": "momentum"}}, "exp_avg"),
        ({"graft": {"step": 4, "only": "exp_avg_sq"}}, "exp_avg_sq can't be grafted alone"),
        ({"graft": {"step": 4, "params": "nothing"}}, "no parameter matches"),
        ({"graft": {"step": 4, "params": "word_embedings"}}, "are word_embeddings.weight"),
        ({"reset": ["moments"], "moments": {"params": "word_embedings"}}, "are word_embeddings.w"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    trained: Trained, recipe: dict[str, Any], says: str
) -> None:
    root = trained()
    before = snapshot(root)
    with pytest.raises(UsageError) as error:
        plan(Run.open(root), from_data(recipe))
    assert says in f"{error.value.what} {' '.join(error.value.next)}"
    assert snapshot(root) == before


def test_a_scale_by_nan_is_refused() -> None:
    with pytest.raises(UsageError, match=r"scale\.by"):
        from_data({"scale": {"params": "weight", "by": math.nan}})


def test_what_is_wrong_with_another_run_is_told_of_that_run(
    trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    other = torchtitan(tmp_path / "an other")
    for recipe, what, then in (
        ({"step": 3, "run": str(other)}, "step 3 is not saved in", f"-C '{other}' status"),
        ({"step": 4, "run": str(other)}, "is split or stored differently", "the same parallel"),
    ):
        with pytest.raises(SurgeryError, match=what) as refused:
            plan(Run.open(root), from_data({"graft": recipe}))
        assert then in refused.value.next[0]
    assert re.search(r": \S+ is float32 \[\d+\] here and absent there", refused.value.what)


@pytest.mark.parametrize("recipe", [{"graft": {"step": 4}}, {"average": {"steps": ["4", "8"]}}])
def test_half_a_step_leads_to_another(trained: Trained, recipe: dict[str, Any]) -> None:
    """And not back to a step before it, as a rollback to it would."""
    root = trained()
    next((root / "global_step4").glob("*model_states.pt")).unlink()
    with pytest.raises(UsageError, match=r"step 4 lacks .*so nothing is taken") as refused:
        plan(Run.open(root), from_data(recipe))
    assert refused.value.next == ("ckptsurgeon status    list the complete steps",)


def test_steps_of_another_layout_are_refused(trained: Trained, tmp_path: Path) -> None:
    root = trained(ranks=2, zero=1)
    other = torchtitan(tmp_path / "titan")
    with pytest.raises(SurgeryError, match="split or stored differently"):
        plan(Run.open(root), from_data({"graft": {"step": 4, "run": str(other)}}))


def test_a_step_whose_weights_are_not_there_is_refused(tmp_path: Path) -> None:
    root = nanotron(tmp_path / "run")
    shutil.rmtree(root / "6" / "model")
    for recipe in ({"average": {"last": 2}}, {"scale": {"params": "weight", "by": 2.0}}):
        with pytest.raises(SurgeryError, match="has an fp32 master, and no file in 6/model"):
            plan(Run.open(root), from_data(recipe))


def test_a_source_that_changes_before_the_commit_is_noticed(trained: Trained) -> None:
    root = trained(zero=1)
    made = plan(Run.open(root), from_data({"average": {"last": 2}}))
    shard = next((root / "global_step6").glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes())
    with pytest.raises(SurgeryError, match="global_step6"):
        surgery.apply(Run.open(root), made)
