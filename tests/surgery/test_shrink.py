"""A bloated checkpoint shrinks, loads as before in DeepSpeed, and comes back bit for bit."""

from __future__ import annotations

import torch

from ckptsurgeon import Run, look, surgery
from tests.conftest import Trained
from tests.support.launch import first_line
from tests.support.snapshot import snapshot


def test_views_of_a_large_buffer_lose_what_they_do_not_use(trained: Trained) -> None:
    root = trained()
    path = root / "global_step8" / "mp_rank_00_model_states.pt"
    saved = torch.load(path, weights_only=False)
    promised = first_line(root)
    flat = torch.zeros(2_000_000)
    at = 100_000
    for name, tensor in saved["module"].items():  # as pt-checkpoint-shrink.py found them
        view = flat[at : at + tensor.numel()].view(tensor.shape)
        saved["module"][name] = view.copy_(tensor)
        at += tensor.numel()
    torch.save(saved, path)
    before, bloated = snapshot(root), path.stat().st_size

    run = Run.open(root)
    plan = surgery.plan_shrink(run)
    assert [change.file for change in plan.changes] == ["global_step8/mp_rank_00_model_states.pt"]
    surgery.apply(run, plan)
    assert path.stat().st_size < bloated / 10
    again = torch.load(path, weights_only=False)["module"]
    assert all(torch.equal(again[name], tensor) for name, tensor in saved["module"].items())
    assert look.verify(run, level=3).findings == ()
    assert first_line(root) == promised
    assert surgery.plan_shrink(run).empty

    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before
