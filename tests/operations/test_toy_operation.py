"""An operation is one file and one line of the table: this file, listed for one test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from typer.testing import CliRunner

from ckptsurgeon import Recipe, Run, apply, from_data, inspect, operations, plan, plan_undo
from ckptsurgeon.cli import app
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.section import Changes, Section
from ckptsurgeon.plans.edits import Change
from tests.support.tiny_run import make_run


@dataclass(frozen=True)
class Sharpen(Section):
    """Adam's eps becomes `times` what it was, in every place of every shard."""

    key: ClassVar[str] = "sharpen"
    times: Annotated[float, Key("what Adam's eps is multiplied by", "TIMES", "The factor.")]

    def title(self, run: Run, step: int) -> list[str]:
        return [f"sharpen {self.times:g} times"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        return [
            Change(run.relative(at.file), "eps", at.value, at.value * self.times, at.path)
            for at in checkpoint.locate("eps")
        ], ["the first update is larger"]


def sharpen(section: Sharpen) -> Recipe:
    """Make Adam's eps smaller."""
    return Recipe(section)


COMMANDS = {"sharpen": sharpen}
LINE = operations.Operation(__name__, ("Sharpen",), {"sharpen": "Make Adam's eps smaller."})


def test_it_is_a_command_a_recipe_and_can_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "OPERATIONS", (*operations.OPERATIONS, LINE))
    run = Run.open(make_run(tmp_path / "run"))
    done = CliRunner().invoke(app, ["sharpen", "0.5", "--yes", "-C", str(run.root)])
    assert "sharpen 0.5 times" in done.output and "note  the first update is larger" in done.output
    assert inspect(run).promise.eps == 0.5e-8
    apply(run, plan(run, from_data({"sharpen": {"times": 4}})))
    assert [receipt.title for receipt in run.receipts()] == ["sharpen 0.5 times", "sharpen 4 times"]
    apply(run, plan_undo(run))
    assert inspect(run).promise.eps == 0.5e-8
