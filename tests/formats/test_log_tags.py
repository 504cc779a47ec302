"""Event files whose tags count different things: each is cut by what it counts, or named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, surgery
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.recipe.file import from_data
from tests.support.own_runs import BEGAN, saved

PAGE = """name: own
files:
  "ckpt-{step}.pt": {optimizers: [[optimizer]]FIELDS}
"""
EPOCH, EPOCHS = 12, 4


def log(folder: Path, each: int, apart: bool, early: bool) -> None:
    """A loss at each `each`-th update, and a score of each epoch, in a file of its own or in the
    same one, where a score may also come `early`: before the last loss of its epoch."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
    other = writer
    if apart:
        other = SummaryWriter(str(folder), filename_suffix=".val")  # type: ignore[no-untyped-call]
    for update in range(1, EPOCH * EPOCHS + 1):
        wall, epoch = BEGAN + update, update // EPOCH
        ends = update % EPOCH == 0
        if ends and early:
            other.add_scalar("val/score", 0.5, epoch, walltime=wall - 0.5)
        if update % each == 0:
            writer.add_scalar("criterion", 2.5, update, walltime=wall)
        if ends and not early:
            other.add_scalar("val/score", 0.5, epoch, walltime=wall)
    writer.close()
    other.close()


def numbers(folder: Path) -> Mapping[str, list[int]]:
    """Tag → the numbers that it has in the files of a folder."""
    found: dict[str, list[int]] = {"criterion": [], "val/score": []}
    for path in event_file.files(folder):
        index = event_file.scan(path)
        for tag, step in zip(index.tags, index.steps, strict=True):
            for name in index.names[tag] if tag >= 0 else ():
                if name in found:
                    found[name].append(int(step))
    return found


@pytest.mark.long
@settings(max_examples=24, deadline=None, derandomize=True, database=None)
@example("epochs", True, 1, False, False)
@example("epochs", False, 1, False, False)
@example("updates", False, 1, True, False)
@given(
    named=st.sampled_from(["epochs", "updates"]),
    counter=st.booleans(),
    each=st.sampled_from([1, 2, 4]),
    apart=st.booleans(),
    early=st.booleans(),
)
def test_each_tag_is_cut_by_what_it_counts_or_named(
    tmp_path_factory: pytest.TempPathFactory,
    named: str,
    counter: bool,
    each: int,
    apart: bool,
    early: bool,
) -> None:
    """Steps are epochs or updates, and a page may have their counter of updates."""
    root = tmp_path_factory.mktemp("run") / "run"
    fields = ", fields: {iteration: [[updates]]}" if counter else ""
    size = 1 if named == "updates" else EPOCH
    steps = {EPOCH * k // size: EPOCH * k for k in range(1, EPOCHS + 1)}
    saved(root, steps, PAGE.replace("FIELDS", fields))
    log(root / "logs", each, apart, early)
    before, to = numbers(root / "logs"), 2 * EPOCH // size
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": to}}))
    surgery.apply(Run.open(root), plan)
    assert plan.promise is not None
    said = plan.promise.not_known.get("tensorboard", "")
    history = {"criterion": 2 * EPOCH, "val/score": 2}
    for tag, there in numbers(root / "logs").items():
        cut = [number for number in before[tag] if number <= history[tag]]
        assert there == cut or (there == before[tag] and "logs/" in said), tag
        if there != cut and apart:
            assert f"with the tag {tag}" in said
    if named == "updates" or counter:
        assert numbers(root / "logs")["criterion"][-1] == 2 * EPOCH
