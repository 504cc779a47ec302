"""What was done can be undone, redone and undone again, on any page, whatever was trained since."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import differs, snapshot
from tests.support.tiny_run import LAMBDA_LR

MEMORY = Path("/dev/shm")
"""Where there is one, a file system on which fsync costs nothing."""
CONTENT = (
    "{optimizers: [[optimizer]], schedulers: [[scheduler]], fields: {iteration: [[iter_num]]}}"
)
PAGES: Mapping[str, tuple[str, str]] = {
    "one file, its step inside": (
        f'name: own\nnumber: [iter_num]\nfiles:\n  "ckpt.pt": {CONTENT}\n',
        "ckpt.pt",
    ),
    "files of any name, the step inside": (
        f'name: own\nnumber: [iter_num]\nfiles:\n  "at-*.pt": {CONTENT}\n',
        "at-{step}.pt",
    ),
    "folders of any name, the step inside": (
        'name: own\nnumber: {folder: "save-*", file: all.pt, keys: [iter_num]}\n'
        f'files:\n  "save-*/all.pt": {CONTENT}\n',
        "save-{step}/all.pt",
    ),
    "files, a pointer and a copy": (
        f'name: own\npointer: {{file: latest.txt, text: "{{step}}"}}\nlast: [last.pt]\n'
        f'files:\n  "ckpt_{{step}}.pt": {CONTENT}\n',
        "ckpt_{step}.pt",
    ),
    "folders and a pointer": (
        f'name: own\npointer: {{file: latest.txt, text: "{{step}}"}}\n'
        f'files:\n  "step-{{step}}/all.pt": {CONTENT}\n',
        "step-{step}/all.pt",
    ),
}


class Trainer:
    """Saves what a page describes, as torch.save does now or did until 1.6."""

    def __init__(self, root: Path, page: str, *, zipped: bool) -> None:
        self.root, self.zipped = root, zipped
        self.page, self.path = PAGES[page]
        root.mkdir()
        (root / "own.yaml").write_text(self.page)
        (root / "ckptsurgeon.yaml").write_text("format: own.yaml")

    def save(self, step: int) -> None:
        moments = {name: torch.full((3,), float(step)) for name in ("exp_avg", "exp_avg_sq")}
        group = {
            "lr": 1e-3, "initial_lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8,
            "weight_decay": 0.1, "amsgrad": False, "params": [0],
        }  # fmt: skip
        state = {
            "iter_num": step,
            "optimizer": {
                "state": {0: {"step": torch.tensor(float(step)), **moments}},
                "param_groups": [group],
            },
            "scheduler": {**LAMBDA_LR, "last_epoch": step, "_step_count": step + 1},
        }
        path = self.root / self.path.replace("{step}", str(step))
        path.parent.mkdir(exist_ok=True)
        torch.save(state, path, _use_new_zipfile_serialization=self.zipped)
        if "pointer:" in self.page:
            (self.root / "latest.txt").write_text(str(step))
        if "last:" in self.page:
            torch.save(state, self.root / "last.pt", _use_new_zipfile_serialization=self.zipped)

    def run(self) -> Run:
        return Run.open(self.root)


edits = st.sampled_from(
    [
        {"set": {"iteration": 4}},
        {"set": {"iteration": 40}},
        {"set": {"beta2": 0.9}},
        {"set": {"lr": 3e-4}},
        {"reset": ["moments"]},
        {"rollback": {"to": 4}},
        {"rollback": {"to": 4}, "set": {"beta2": 0.9}},
        {"rollback": {"to": 8}, "set": {"iteration": 3}},
        {"repair_latest": {}},
    ]
)
histories = st.lists(edits, min_size=1, max_size=3)


def contents(root: Path) -> dict[str, tuple[str, str]]:
    """All but times: what a trainer or an undo writes anew has its own."""
    return {name: item[:2] for name, item in snapshot(root).items()}


def done(trainer: Trainer, data: Mapping[str, Any]) -> Receipt | None:
    """The surgery, if it can be done here and does something."""
    run = trainer.run()
    before = snapshot(run.root)
    try:
        made = plan(run, from_data(data))
    except SurgeryError:
        assert snapshot(run.root) == before
        return None
    return None if made.empty else surgery.apply(run, made)


def back_and_forth(page: str, zipped: bool, history: list[dict[str, Any]], trained: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        trainer = Trainer(Path(folder) / "run", page, zipped=zipped)
        for step in (4, 8):
            trainer.save(step)
        start = snapshot(trainer.root)
        receipts = [item for data in history if (item := done(trainer, data)) is not None]
        if not receipts:
            return
        single = "ckpt.pt" in trainer.path
        trained = 0 if single else trained  # it would be written over what was edited
        for step in range(trained):
            trainer.save(100 + step)
        after = snapshot(trainer.root)
        for _ in range(2):
            for _ in receipts:
                surgery.apply(trainer.run(), surgery.plan_undo(trainer.run()))
            times = not trained
            assert differs(snapshot(trainer.root), start, times=times) is None
            for receipt in receipts:
                surgery.apply(trainer.run(), surgery.plan_redo(trainer.run(), receipt.id))
            assert differs(snapshot(trainer.root), after, times=times) is None
        trainer.save(200)
        again = contents(trainer.root)
        try:
            surgery.apply(trainer.run(), surgery.plan_undo(trainer.run()))
            surgery.apply(trainer.run(), surgery.plan_redo(trainer.run()))
        except SurgeryError:
            assert single or "last:" in trainer.page  # what was appended to was saved anew
        assert contents(trainer.root) == again


ONE = "one file, its step inside"
INSIDE = "folders of any name, the step inside"


LAW = given(st.sampled_from(list(PAGES)), st.booleans(), histories, st.integers(0, 2))
UNHURRIED: dict[str, Any] = {
    "deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None,
}  # fmt: skip


@example(ONE, True, [{"set": {"iteration": 4}}], 0)
@example(INSIDE, True, [{"rollback": {"to": 8}, "set": {"iteration": 3}}], 1)
@LAW
@settings(max_examples=3, **UNHURRIED)
def test_what_was_done_is_undone_and_redone(
    page: str, zipped: bool, history: list[dict[str, Any]], trained: int
) -> None:
    back_and_forth(page, zipped, history, trained)


@pytest.mark.slow
@LAW
@settings(max_examples=40, **UNHURRIED)
def test_what_was_done_is_undone_and_redone_at_length(
    page: str, zipped: bool, history: list[dict[str, Any]], trained: int
) -> None:
    back_and_forth(page, zipped, history, trained)
