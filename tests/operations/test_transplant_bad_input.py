"""What a transplant refuses or warns of before it reads a tensor: steps that are not complete, a
source that a trainer writes to, pages that name one parameter twice or leave out a part."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Plan, Run, plan
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats import Part, Place
from ckptsurgeon.operations.numbered_parameters import order_of_each
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction import process
from tests.support.deepspeed_engine import Options, build, client, make, process_group, train
from tests.support.snapshot import exact_snapshot


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A source of the steps 2, 4 and 6, and a fresh run."""
    folder = tmp_path_factory.mktemp("runs")
    with process_group():
        engine = build(Options(stage=1, model="apart"))
        for step in (2, 4, 6):
            train(engine, 2)
            engine.save_checkpoint(str(folder / "source"), client_state=client(step))
        make(folder / "fresh", Options(stage=2, model="fused"), 1)
        make(folder / "apart", Options(stage=2, model="apart"), 1)
        yield folder


def planned(run: Path, source: Path, **more: Any) -> Plan:
    return plan(Run.open(run), from_data({"transplant": {"source": str(source), **more}}))


def refused(run: Path, source: Path, **more: Any) -> tuple[str, str]:
    """What is said, and what to do next."""
    before = exact_snapshot(run), exact_snapshot(source)
    with pytest.raises((SurgeryError, UsageError)) as error:
        planned(run, source, **more)
    assert (exact_snapshot(run), exact_snapshot(source)) == before
    return str(error.value), str(error.value.next)


def test_an_incomplete_step_is_refused_with_the_newest_complete_one(
    runs: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(runs / "source", tmp_path / "source"))
    (source / "global_step6" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    said, next = refused(runs / "apart", source, step=6)
    assert "step 6 of" in said and "is not complete; the newest complete one is 4" in said
    assert "status" in next
    made = planned(runs / "apart", source)  # without a step it is that one
    assert made.promise is not None and made.promise.step == 5
    for step in (2, 4):
        (source / f"global_step{step}" / "mp_rank_00_model_states.pt").unlink()
    said, _ = refused(runs / "apart", source)
    assert "complete" in said


def test_a_source_that_a_trainer_writes_to_is_read_with_a_warning(
    runs: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(runs / "source", tmp_path / "source"))
    assert not any("read as it is now" in text for text in planned(runs / "apart", source).warnings)
    record = {
        "pid": os.getpid(), "start_time": process.start(os.getpid()), "host": os.uname().nodename,
    }  # fmt: skip
    (source / "trainer.pid").write_text(json.dumps(record))
    (said,) = (t for t in planned(runs / "apart", source).warnings if "read as it is now" in t)
    assert f"process {os.getpid()} is running; step 6 is read as it is now" in said


PAGES = {
    "rename: {one.weight: out.weight}": "both one.weight and out.weight would be out.weight here",
    "rename: {one.weight: both.weight, two.weight: both.weight}":
        "both one.weight and two.weight would be both.weight here",
    "fuse: {both.weight: [one.weight, three.weight], both.bias: [one.bias, two.bias]}":
        "both.weight would be made of three.weight as well, which the source has not",
    "fuse: {both.weight: [one.weight], both.bias: [one.bias, two.bias]}":
        "both.weight has the sizes [16, 8] and [8, 8]",
    "fuse: {both.weight: [one.weight, two.weight, two.weight], both.bias: [one.bias, two.bias]}":
        "both.weight has 16 rows where it is one, and 8 and 8 and 8 where it is several",
}  # fmt: skip
"""What is wrong with a page, by the names."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_names_one_twice_or_leaves_out_a_part_is_refused(
    runs: Path, tmp_path: Path, page: str
) -> None:
    names = tmp_path / "names.yaml"
    names.write_text(page)
    said, next = refused(runs / "fresh", runs / "source", names=str(names))
    assert PAGES[page] in said and next


ORDERS: dict[str, tuple[str, str] | None] = {
    "a b c d": ("a b", "c d"),
    "c d a b": ("a b", "c d"),
    "a x b c x d": ("a x b", "c x d"),
    "c d x x a b": ("x a b", "c d x"),
    "a x x c": ("a x", "x c"),
    "x y y x": None,
    "a x c x a": None,
}
"""What stands in the file, and the order of the run that is filled (a, b), and of the source."""


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_of_two_runs_that_share_names_is_read_as_two(order: str) -> None:
    names = order.split()
    tensor = Tensor("float32", "0", 1, 0, (1,), (1,))
    own, theirs = (
        [
            Part.whole(name, "0", "weights", Place(Path(), (name,), tensor))
            for name in names if name not in others
        ]
        for others in ("cd", "ab")
    )  # fmt: skip
    wanted = ORDERS[order]
    if wanted is None:
        with pytest.raises(SurgeryError, match="twice, and of which run it is there is not clear"):
            order_of_each(names, own, theirs)
        return
    assert tuple(" ".join(each) for each in order_of_each(names, own, theirs)) == wanted
