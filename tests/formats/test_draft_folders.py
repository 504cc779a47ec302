"""A step with a second folder of values, in the page that is drafted of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckptsurgeon import Run
from ckptsurgeon.formats.described.draft import draft
from ckptsurgeon.report import draft_page
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.distributed")


@pytest.mark.parametrize("further", ["optimizer", "weights", "weights and counters"])
def test_the_page_is_read_and_a_step_goes_whole(tmp_path: Path, further: str) -> None:
    """As DINOv3's `5_keep` beside `5`, and the critic beside an actor."""
    root, layer = tmp_path / "run", torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(layer.parameters())
    for step in (2, 4, 6):
        layer(torch.ones(1, 2)).sum().backward()
        adam.step()
        state = {"optimizer": get_optimizer_state_dict(layer, adam), "iteration": step}
        dcp.save(state, checkpoint_id=root / f"ckpt/{step}", no_dist=True)
        beside = {"model": layer.state_dict()} if "weights" in further else state
        beside |= {"iteration": step} if "counters" in further else {}
        dcp.save(beside, checkpoint_id=root / f"ckpt/{step}_keep", no_dist=True)
    page = tmp_path / "own.yaml"
    page.write_text(draft_page(draft(root)))
    (root / "ckptsurgeon.yaml").write_text(f"format: {page}\n")
    before = snapshot(root)
    assert Run.open(root).steps() == [2, 4, 6]
    operate(root, {"rollback": {"to": 2}, "set": {"beta2": 0.9}})
    assert sorted(path.name for path in (root / "ckpt").iterdir()) == ["2", "2_keep"]
    take_back(root, before)
