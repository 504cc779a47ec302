"""Names that count saves or epochs, as Accelerate's own do, beside logs that count updates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, surgery
from ckptsurgeon.guard.proposal import proposal
from ckptsurgeon.look import advise
from ckptsurgeon.look.listen import listen
from ckptsurgeon.look.logged import own
from ckptsurgeon.recipe.file import from_data
from tests.support.event_logs import spiked, write_log
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

BEGAN = 1.7e9
"""When update 0 was made; each takes a second."""


def saved(root: Path, updates: dict[int, int], each: int = 1) -> Path:
    """What `save_state` wrote under each number after so many updates, at one for `each` second."""
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(1, 2)).sum().backward()
    adam.step()
    for number, count in updates.items():
        folder = root / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        for state in adam.state.values():
            state["step"].fill_(count)
        torch.save({}, folder / "random_states_0.pkl")
        torch.save(layer.state_dict(), folder / "pytorch_model.bin")
        torch.save(adam.state_dict(), folder / "optimizer.bin")
        for file in folder.iterdir():
            os.utime(file, (BEGAN + count * each,) * 2)
    return root


def rows(folder: Path, last: int) -> Path:
    """A table with a point at each step up to `last`."""
    file = folder / "metrics.csv"
    file.write_text("step,loss\n" + "".join(f"{n},{1 / n}\n" for n in range(1, last + 1)))
    return file


def test_logs_of_updates_are_not_cut_at_the_number_of_a_save(tmp_path: Path) -> None:
    root = saved(tmp_path / "run", {0: 10, 1: 20, 2: 30, 3: 40})
    log = rows(root, 44)
    before, text = snapshot(root), log.read_text()
    plan = operate(root, {"rollback": {"to": 1}})
    assert plan.promise is not None
    note = plan.promise.not_known["logs"]
    assert note in plan.warnings and log.read_text() == text
    assert note.startswith("not cut: metrics.csv (up to 44): not known what its numbers count")
    assert "step 3 is the newest, after 40 updates" in note
    assert "truncate-logs --after 20 is for a log that counts updates" in note
    with_log = snapshot(root)
    operate(root, {"logs": {"after": 20}})
    assert log.read_text().splitlines()[-1].startswith("20,")
    take_back(root, with_log)
    take_back(root, before)


@pytest.mark.long
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@example(every=4, number=2, named="saves", logged="updates")
@example(every=4, number=2, named="saves", logged="saves")
@example(every=4, number=2, named="updates", logged="updates")
@example(every=4, number=2, named="batches", logged="batches")
@given(
    every=st.integers(3, 50),
    number=st.integers(1, 4),
    named=st.sampled_from(["saves", "updates", "batches"]),
    logged=st.sampled_from(["saves", "updates", "batches"]),
)
def test_a_log_is_cut_at_a_number_that_it_counts(
    tmp_path_factory: pytest.TempPathFactory, every: int, number: int, named: str, logged: str
) -> None:
    """Where it counts another thing it is named and left as it is; never is more cut than what came
    after the step."""
    size = {"saves": 1 / every, "updates": 1, "batches": 4}
    root = tmp_path_factory.mktemp("run") / "run"
    saved(root, {int(k * every * size[named]): k * every for k in range(1, 6)})
    to = int(number * every * size[named])
    last = int(6 * every * size[logged])
    log = rows(root, last)
    plan = operate(root, {"rollback": {"to": to}})
    kept = len(log.read_text().splitlines()) - 1
    assert plan.promise is not None
    assert ("logs" in plan.promise.not_known) is (named != logged)
    assert kept == (last if named != logged else to)


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(("first", "by"), [(21, "updates"), (2, "saves")])
def test_a_trainer_is_held_to_its_promise_by_updates_as_by_saves(
    tmp_path: Path, first: int, by: str, reset: bool, wrong: bool
) -> None:
    """What a line counts is no mismatch; a rate that was not set is one."""
    root = saved(tmp_path / "run", {0: 10, 1: 20, 2: 30, 3: 40})
    recipe = {"rollback": {"to": 1}, "set": {"lr": 5e-4}, "tensorboard": {"truncate": False}}
    operate(root, {**recipe, "reset": ["moments"]} if reset else recipe)
    log = tmp_path / "out.log"
    rate = 1e-3 if wrong else 5e-4
    log.write_text("".join(f"step: {first + n} | loss: 2.5 | lr: {rate:.3e}\n" for n in range(3)))
    compared = listen(Run.open(root), log=log)
    assert compared.has_rates
    assert bool(compared.differs) is wrong, (by, compared.differs)


@pytest.mark.long
def test_what_is_advised_lies_before_the_first_sign_by_its_updates(tmp_path: Path) -> None:
    root = saved(tmp_path / "run", {0: 100, 1: 200, 2: 300, 3: 400})
    write_log(root / "logs", spiked(400, 250), tag="train/loss", wall=BEGAN)
    run = Run.open(root)
    told = advise.advise(own(run, {}), run)
    assert told.verdict == "diverged" and told.back_to == 1
    assert [(item.step, item.at) for item in told.candidates] == [(1, 200), (0, 100)]
    assert told.candidates[0].distance.steps == 200
    proposals = [proposal(run, remedy) for remedy in told.remedies]
    taken = [each for each in proposals if each.recipe is not None]
    assert {"lower the lr", "reset the moments, re-warm"} <= {each.remedy.name for each in taken}
    before = snapshot(root)
    for each in taken:
        surgery.apply(run, surgery.plan(run, from_data(each.recipe or {})))
        after = Run.open(root)
        assert after.latest() == 1 and own(after, {}).kept["loss"].steps[-1] == 200
        take_back(root, before)


@pytest.mark.long
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@example({30, 150}, False)
@given(overflowed=st.sets(st.integers(1, 240), max_size=12), copied=st.booleans())
def test_advice_cuts_at_the_number_that_the_log_counts(
    tmp_path_factory: pytest.TempPathFactory, overflowed: set[int], copied: bool
) -> None:
    """Updates that overflowed are in the log, and not among those of the optimizer. In a copy,
    whose times say nothing, the logs are left to the rollback, which names them."""
    made = {0: 100, 1: 200, 2: 300, 3: 400}
    root = tmp_path_factory.mktemp("run") / "run"
    saved(root, {n: k - sum(each <= k for each in overflowed) for n, k in made.items()})
    for number, updates in made.items():
        for file in (root / f"checkpoint_{number}").iterdir():
            os.utime(file, (BEGAN + (1e6 if copied else updates),) * 2)
    write_log(root / "logs", spiked(400, 250), tag="train/loss", wall=BEGAN)
    run = Run.open(root)
    told = advise.advise(own(run, {}), run)
    assert told.verdict == "diverged" and told.back_to == 1 and told.remedies
    for remedy in told.remedies:
        for recipe in (remedy.recipe, *remedy.others):
            assert recipe.get("logs") == (None if copied else {"after": 200})


def test_a_save_after_the_first_sign_is_none_though_batches_are_logged(tmp_path: Path) -> None:
    """Two batches to an update: 150 updates are 300 batches, which the times of both say."""
    root = saved(tmp_path / "run", {0: 50, 1: 100, 2: 150}, each=2)
    write_log(root / "logs", spiked(400, 250), tag="train/loss", wall=BEGAN)
    run = Run.open(root)
    assert advise.advise(own(run, {}), run).back_to == 1
