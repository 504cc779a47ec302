"""torch's schedulers among the values of a folder: a list of dicts is cut into values of its own.

So does torch.distributed.checkpoint with the parts of SequentialLR and the phases of OneCycleLR,
which prime-rl and NeMo RL save so."""

from __future__ import annotations

import collections
import string
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

from ckptsurgeon import Run, surgery
from ckptsurgeon.formats.dcp.scheduled import nested
from ckptsurgeon.formats.described.draft import draft
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report import draft_page
from tests.support.deepspeed_engine import PEAK, schedulers
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
UPDATES, MORE = 6, 8


def chained(optimizer: Any) -> Any:
    made = [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.MultiStepLR(optimizer, [9, 9])]
    return lr_scheduler.ChainedScheduler(made, optimizer)


def sequential(optimizer: Any) -> Any:
    made = [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.MultiStepLR(optimizer, [0, 1, 6])]
    return lr_scheduler.SequentialLR(optimizer, made, [3])


KINDS = {
    **schedulers(),
    "MultiStepLR-ahead": lambda o: lr_scheduler.MultiStepLR(o, [3, 8]),
    "ChainedScheduler": chained,
    "SequentialLR-milestones": sequential,
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-5, PEAK, 7, cycle_momentum=False),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
}


def parts(name: str, rate: Any = PEAK) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    own = rate.clone() if isinstance(rate, torch.Tensor) else rate  # a scheduler writes into it
    adam = torch.optim.AdamW(model.parameters(), lr=own)
    return model, adam, KINDS[name](adam)


def updated(model: torch.nn.Module, adam: Any, schedule: Any) -> float:
    """The rate of one update."""
    rate = float(adam.param_groups[0]["lr"])
    model(torch.ones(3, 4)).pow(2).sum().backward()
    adam.step()
    schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
    adam.zero_grad()
    return rate


def state_of(model: torch.nn.Module, adam: Any, schedule: Any) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(model, adam)
    return {"app": {"optim": optimizer, "scheduler": schedule.state_dict(), "step": UPDATES}}


def save(root: Path, name: str, rate: Any = PEAK) -> tuple[Path, tuple[Any, Any, Any]]:
    """One step, by the page that is drafted of it, and what trains."""
    made = parts(name, rate)
    for _ in range(UPDATES):
        updated(*made)
    dcp.save(state_of(*made), checkpoint_id=root / f"step_{UPDATES}", no_dist=True)
    page = root.with_suffix(".yaml")
    page.write_text(draft_page(draft(root)))
    (root / "ckptsurgeon.yaml").write_text(f"format: {page}\n")
    return root, made


def rates(root: Path, name: str, rate: Any = PEAK) -> list[float]:
    """Of the updates after a load."""
    model, adam, schedule = parts(name, rate)
    state = state_of(model, adam, schedule)
    dcp.load(state, checkpoint_id=root / f"step_{UPDATES}", no_dist=True)
    set_optimizer_state_dict(model, adam, state["app"]["optim"])
    schedule.load_state_dict(state["app"]["scheduler"])
    return [updated(model, adam, schedule) for _ in range(MORE)]


@pytest.mark.parametrize("name", schedulers())
def test_a_halved_lr_halves_every_rate_to_come(tmp_path: Path, name: str) -> None:
    root, _ = save(tmp_path / "run", name)
    before, plain = snapshot(root), rates(root, name)
    floor = {"min_lr": 5e-6} if name in ("CosineAnnealingLR", "SequentialLR") else {}
    plan = surgery.plan(Run.open(root), from_data({"set": {"lr": "0.5x", **floor}}))
    surgery.apply(Run.open(root), plan)
    assert plan.promise is not None
    assert rates(root, name) == pytest.approx([rate / 2 for rate in plain], rel=1e-9)
    assert plan.promise.lr == pytest.approx(plain[0] / 2, rel=1e-12)
    take_back(root, before)


TENSORS = sorted(set(schedulers()) - {"OneCycleLR", "OneCycleLR-linear"})


@pytest.mark.parametrize("name", TENSORS)
def test_rates_that_are_tensors_are_halved(tmp_path: Path, name: str) -> None:
    """Each is a value of its own then."""
    rate = torch.tensor(PEAK)
    root, _ = save(tmp_path / "run", name, rate)
    before, plain = snapshot(root), rates(root, name, rate)
    floor = {"min_lr": 5e-6} if name in ("CosineAnnealingLR", "SequentialLR") else {}
    plan = surgery.plan(Run.open(root), from_data({"set": {"lr": "0.5x", **floor}}))
    surgery.apply(Run.open(root), plan)
    assert plan.promise is not None
    after = rates(root, name, rate)
    assert after == pytest.approx([rate / 2 for rate in plain], rel=2e-6)
    assert plan.promise.lr == after[0]
    take_back(root, before)


def loaded(root: Path, name: str, *, alone: bool) -> tuple[Any, Any, Any]:
    """What a resume has: with torch's states filled in place, or made of the folder `alone`."""
    model, adam, schedule = parts(name)
    state, step = state_of(model, adam, schedule), root / f"step_{UPDATES}"
    dcp.load(state, checkpoint_id=step, no_dist=True)
    if alone:
        dcp_to_torch_save(step, root.with_suffix(".pt"))
        state["app"]["scheduler"] = torch.load(root.with_suffix(".pt"))["app"]["scheduler"]
    set_optimizer_state_dict(model, adam, state["app"]["optim"])
    schedule.load_state_dict(state["app"]["scheduler"])
    return model, adam, schedule


@pytest.mark.parametrize("name", KINDS)
def test_what_torch_loads_otherwise_than_it_was_is_noted(tmp_path: Path, name: str) -> None:
    """By a class whose rates differ after a load, or that can't be saved again; what the note says
    to do helps."""
    root, made = save(tmp_path / "run", name)
    live = [updated(*made) for _ in range(MORE)]
    plan = surgery.plan(Run.open(root), from_data({"reset": ["moments"]}))
    told = [line.rpartition(", set ")[2] for line in plan.warnings if "milestones" in line]
    wrong = False
    for alone in (False, True):
        resumed = loaded(root, name, alone=alone)
        same = [updated(*resumed) for _ in range(MORE)] == pytest.approx(live)
        assert same or alone
        wrong |= not same or not saves(tmp_path / f"again-{alone}", resumed)
        resumed = loaded(root, name, alone=alone)
        last = resumed[2]._schedulers[-1] if name == "ChainedScheduler" else resumed[2]
        for line in told:
            exec(line, {"scheduler": last, "collections": collections})
        assert [updated(*resumed) for _ in range(MORE)] == pytest.approx(live)
        assert saves(tmp_path / f"then-{alone}", resumed)
    assert bool(told) == wrong


def saves(folder: Path, made: tuple[Any, Any, Any]) -> bool:
    try:
        dcp.save(state_of(*made), checkpoint_id=folder, no_dist=True)
    except dcp.CheckpointException as error:
        assert "duplicated flatten key" in str(error)
        return False
    return True


KEYS = st.text(string.ascii_lowercase + "_", min_size=1, max_size=6)
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.integers(), st.booleans(), st.text(max_size=3), st.lists(st.integers(), max_size=3)
)


PARTS = st.dictionaries(KEYS, LEAVES, min_size=1, max_size=3)
STATES = st.dictionaries(
    KEYS, st.one_of(LEAVES, PARTS, st.lists(PARTS, min_size=1, max_size=3)), max_size=4
)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(state=STATES)
@example(state={"_schedulers": [{"a": 1}] * 11, "_milestones": [3]})
def test_what_torch_took_apart_is_put_together(state: dict[str, Any]) -> None:
    flat, _ = flatten_state_dict(state)
    assert nested(dict(reversed(flat.items()))) == state


@pytest.mark.parametrize("values", [{"a": 1, "a.b": 2}, {".".join("a" * 40): 1}])
def test_names_that_no_class_saves_stay_as_they_are(values: dict[str, Any]) -> None:
    assert nested(values) == values
