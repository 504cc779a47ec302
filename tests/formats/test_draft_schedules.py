"""A scheduler that nobody here knows, in the files of a trainer that a drafted page describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.described.draft import draft
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report import draft_page

NAMES = ["lr_scheduler", "scheduler", "sched", "lr_schedulers", "scheduler_state_dict"]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    name=st.sampled_from(NAMES),
    state=st.dictionaries(
        st.sampled_from(["event_index", "cycle_size", "start_value", "warmup", "t", "lr_max"]),
        st.one_of(st.integers(0, 99), st.floats(0, 1)),
        min_size=1,
    ),
    inside=st.booleans(),
    inner=st.sampled_from([{}, {"param_name": "lr", "event_index": 3}]),
)
@example("lr_scheduler", {"event_index": 4, "start_value": 0.1}, False, {"param_name": "lr"})
def test_a_rate_is_never_set_beside_a_scheduler_that_nobody_knows(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    state: dict[str, Any],
    inside: bool,
    inner: dict[str, Any],
) -> None:
    """As ignite's, which set the rate anew at each update: it is refused, and not promised."""
    root = tmp_path_factory.mktemp("run")
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    adam.step()
    whole: Any = {**state, **inner}
    for step in (2, 4):
        saved = {"optimizer": adam.state_dict(), name: [whole] if inside else whole}
        torch.save(saved, root / f"ckpt_{step}.pt")
    page = root.with_name(f"{root.name}.yaml")
    page.write_text(draft_page(draft(root)))
    run = Run.open(root, str(page))
    with pytest.raises(SurgeryError, match="what the saved scheduler makes of an lr is not known"):
        surgery.plan(run, from_data({"set": {"lr": 1e-4}}))
    promise = surgery.plan(run, from_data({"rollback": {"to": 2}})).promise
    assert promise is not None and "no class that is known here" in promise.not_known["lr"]


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.distributed")
@pytest.mark.parametrize("name", NAMES)
def test_nor_where_it_lies_among_the_values_of_a_folder(tmp_path: Path, name: str) -> None:
    """As Megatron's own, which NeMo Automodel saves: nothing of it is called last_epoch."""
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(layer.parameters())
    root = tmp_path / "run"
    for step in (2, 4):
        layer(torch.ones(1, 2)).sum().backward()
        adam.step()
        scheduler = {"num_steps": step, "max_lr": 1e-3, "style": "cosine"}
        state = {"optim": get_optimizer_state_dict(layer, adam), name: scheduler}
        model = {"noise_scheduler.betas": torch.ones(2), **layer.state_dict()}
        whole = {"app": {**state, "model": model}}
        dcp.save(whole, checkpoint_id=root / f"step_{step}", no_dist=True)
    page = tmp_path / "own.yaml"
    page.write_text(draft_page(draft(root)))
    assert draft(root).page["files"]["step_{step}"]["schedulers"] == [["app", name]]
    run = Run.open(root, str(page))
    with pytest.raises(SurgeryError, match="what the saved scheduler makes of an lr is not known"):
        surgery.plan(run, from_data({"set": {"lr": 1e-4}}))
