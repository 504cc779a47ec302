"""A run whose newest step was torn by a crash, and its repair by `ready`, as scenarios."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptsurgeon import Run, surgery
from ckptsurgeon.guard.ready import decide
from tests.faults.world import Scenario
from tests.support.tiny_run import GROUP, make_run, write_torch_file

ADAM = {"state": {0: {"step": 1.0}}, "param_groups": [{**GROUP, "params": [0]}]}
STEPS = (2, 4, 6)


def make(root: Path, steps: Sequence[int] = STEPS) -> Path:
    """A run of DeepSpeed with one shard a step and a pointer to the last."""
    model = {"dp_world_size": 1, "mp_world_size": 1, "optimizer": ADAM, "module": {}}
    for step in steps:
        folder = root / f"global_step{step}"
        folder.mkdir(parents=True)
        write_torch_file(folder / "mp_rank_00_model_states.pt", {**model, "global_steps": step})
    (root / "latest").write_text(f"global_step{steps[-1]}")
    return root


def _torn(world: Path) -> None:
    make(world / "run")
    os.truncate(world / "run/global_step6/mp_rank_00_model_states.pt", 60)


def _torn_without_pointer(world: Path) -> None:
    make_run(world / "run", STEPS)
    os.truncate(world / "run/checkpoint-6/optimizer.pt", 60)


def _repair(world: Path) -> None:
    assert decide(Run.open(world / "run"), 2, repair=True).ready


def _read(world: Path) -> str | None:
    """No step is lost, and none is loaded that neither side names."""
    run = world / "run"
    kept = sorted(run.rglob("global_step*/*.pt")) + sorted(run.rglob("checkpoint-*/optimizer.pt"))
    if len(kept) != len(STEPS):
        return f"{len(STEPS)} steps were saved, and {kept} are there"
    text = (run / "latest").read_text() if (run / "latest").exists() else "global_step4"
    return None if text in ("global_step4", "global_step6") else f"latest names {text}"


def _recover(world: Path) -> None:
    surgery.recover(Run.open(world / "run"))


TORN = Scenario("repair of a pointer", _torn, _repair, _recover, _read)
ASIDE = Scenario("repair without a pointer", _torn_without_pointer, _repair, _recover, _read)
