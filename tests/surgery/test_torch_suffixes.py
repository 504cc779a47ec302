"""A torch file is one by whichever of its usual names: shrunk, and counted where it is copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptsurgeon import Run, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.formats.fields.constants import TORCH
from ckptsurgeon.report.plans import cost
from tests.support.lightning_files import lightning
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run


@pytest.mark.parametrize("suffix", TORCH)
def test_bytes_that_no_tensor_uses_go_whatever_the_file_is_called(
    tmp_path: Path, suffix: str
) -> None:
    folder = make_run(tmp_path / "run") / "checkpoint-4"
    weights = {"w": torch.rand(2_000_000)[7:107]}
    torch.save(weights, folder / f"own{suffix}")
    (folder / f"notes{suffix}").write_text("no archive")
    (folder / f"folder{suffix}").mkdir()
    before = snapshot(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    plan = surgery.plan_shrink(run)
    assert [change.file for change in plan.changes] == [f"checkpoint-4/own{suffix}"]
    surgery.apply(run, plan)
    assert (folder / f"own{suffix}").stat().st_size < 10_000
    assert torch.equal(torch.load(folder / f"own{suffix}")["w"], weights["w"])
    assert surgery.plan_shrink(run).empty
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(tmp_path / "run") == before


def test_a_run_of_lightning_shrinks_and_is_compacted(tmp_path: Path) -> None:
    lightning(tmp_path, 10, torch.rand(2_000_000)[:100])
    run = Run.open(tmp_path)
    surgery.apply(run, surgery.plan_shrink(run))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.ckpt")]
    assert len(sizes) == 2 and max(sizes) < 20_000
    assert CliRunner().invoke(app, ["set-lr", "1e-4", "-y", "-C", str(tmp_path)]).exit_code == 0
    assert {change.file for change in surgery.plan_compact(run).changes} == {
        "last.ckpt", "epoch=0-step=10.ckpt"
    }  # fmt: skip


def test_a_plan_counts_the_file_that_it_copies(tmp_path: Path) -> None:
    for step in (10, 20):
        lightning(tmp_path, step, torch.rand(100))
    words = ["rollback", "--to", "10", "-n", "-C", str(tmp_path)]
    shown = CliRunner().invoke(app, words).stdout
    assert "1 shard copied" in shown and "no shard copied" not in shown, shown
    assert cost([]) == "0 B written, no shard copied"
