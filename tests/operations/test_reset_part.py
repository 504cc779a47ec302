"""The moments of some parameters become 0 inside ZeRO's flat partitions, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.operations.section import Recipe
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.launch import first_line, run_module
from tests.support.snapshot import snapshot


def gathered(root: Path, ranks: int) -> dict[str, list[float]]:
    """Each parameter's [L1 of exp_avg, L1 of exp_avg_sq], by DeepSpeed's own gathering."""
    done = run_module("tests.operations.full_state", root, ranks=ranks)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def part(**moments: str) -> Recipe:
    return from_data({"reset": ["moments"], "moments": moments})


@pytest.mark.parametrize(("ranks", "zero"), [(2, 1), (2, 3)])
@pytest.mark.long
def test_only_the_moments_of_matching_parameters_are_zeroed(
    trained: Trained, ranks: int, zero: int
) -> None:
    root = trained(ranks=ranks, zero=zero)
    before = snapshot(root)
    run = Run.open(root)
    old = gathered(root, ranks)
    wanted = plan(run, part(params=r"layernorm|layers\.1\.dense\."))
    assert "the step is shared and stays" in " ".join(wanted.warnings)
    assert wanted.promise is not None and wanted.promise.adam_step == 8
    surgery.apply(run, wanted)
    new = gathered(root, ranks)
    matching = {name for name in old if re.search(r"layernorm|layers\.1\.dense\.", name)}
    assert 6 < len(matching) < len(old)
    for name, norms in old.items():
        assert new[name] == ([0.0, 0.0] if name in matching else norms), name
    assert plan(run, part(params=r"layernorm|layers\.1\.dense\.")).empty
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before


def test_exp_avg_alone_is_zeroed_with_the_step_kept(trained: Trained) -> None:
    root = trained(zero=2)
    run = Run.open(root)
    surgery.apply(run, plan(run, part(only="exp_avg")))
    assert all(first == 0 < second for first, second in gathered(root, 1).values())
    assert json.loads(first_line(root))["adam_step"] == 8
    assert plan(run, part(only="exp_avg")).empty


def test_what_can_not_be_reset_in_part_is_refused(trained: Trained) -> None:
    run = Run.open(trained())
    with pytest.raises(UsageError, match="exp_avg_sq can't be reset alone"):
        part(only="exp_avg_sq")
    with pytest.raises(UsageError, match=r"`moments\.only` takes no 'exp_av'"):
        part(only="exp_av")
    with pytest.raises(UsageError, match="narrows a reset of the moments, and they are not reset"):
        from_data({"moments": {"only": "exp_avg"}})
    with pytest.raises(UsageError, match="unterminated"):
        part(params="[a")
    with pytest.raises(UsageError, match="no parameter matches 'router'"):
        plan(run, part(params="router"))


def test_stage_0_numbers_its_parameters_and_is_refused(trained: Trained) -> None:
    run = Run.open(trained(zero=0))
    with pytest.raises(SurgeryError, match="ZeRO 0 numbers them"):
        plan(run, part(params="layernorm"))


def test_moments_that_have_seen_nothing_begin_with_the_new_beta2(trained: Trained) -> None:
    run = Run.open(trained())
    lower = from_data({"set": {"beta2": 0.9}})
    assert any("seen only 8 steps" in text for text in plan(run, lower).warnings)
    surgery.apply(run, plan(run, from_data({"reset": ["moments"]})))
    assert not any("seen only" in text for text in plan(run, lower).warnings)
