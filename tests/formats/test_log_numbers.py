"""A trainer of somebody's own, whose log may count what its steps do not: what a rollback cuts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Plan, Run, surgery
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.look import advise
from ckptsurgeon.look.logged import own
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork
from tests.support.event_logs import spiked, write_log
from tests.support.own_runs import BEGAN, left, saved
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

PAGE = """name: own
files:
  "ckpt-{step}.pt": {optimizers: [[optimizer]]FIELDS}
"""
COUNTED = ", fields: {iteration: [[updates]]}"
LOGGED = "logged: [logged]\n"


@dataclass(frozen=True)
class History:
    """`saves` saves, one every `every` updates, and `more` updates after them, of which an epoch
    has `epoch`; each is of `batches` micro-batches. A point is logged at every `each`-th of what is
    `logged`, and steps are `named` by another count, or the same."""

    named: str
    logged: str
    known: str = "optimizer"
    saves: int = 4
    every: int = 6
    epoch: int = 6
    batches: int = 4
    more: int = 0
    each: int = 1

    def count(self, what: str, updates: int) -> int:
        """What a trainer that counts so says after so many updates."""
        return {
            "saves": updates // self.every,
            "updates": updates,
            "epochs": updates // self.epoch,
            "micro-batches": updates * self.batches,
            "samples": updates * self.batches * 8,
        }[what]

    def steps(self) -> dict[int, int]:
        """The number of each step, and the updates that it is after."""
        after = [self.every * k for k in range(1, self.saves + 1)]
        return {self.count(self.named, updates): updates for updates in after}

    def points(self) -> dict[int, int]:
        """The numbers of the log, and the last update that each tells of."""
        end = self.every * self.saves + self.more
        found: dict[int, int] = {}
        for updates in range(1, end + 1):
            before = self.count(self.logged, updates - 1)
            for number in range(before + 1, self.count(self.logged, updates) + 1):
                if number % self.each == 0:
                    found[number] = updates
        return found


def trained(root: Path, told: History, points: Sequence[int] | None = None) -> Path:
    """What such a trainer leaves, and a log in it."""
    page = PAGE.replace("FIELDS", COUNTED if told.known == "counter" else "")
    if told.known == "logged":
        page += LOGGED
    count = partial(told.count, told.logged)
    saved(root, told.steps(), page, adam=told.known == "optimizer", logged=count)
    numbers = told.points() if points is None else points
    log = root / "metrics.csv"
    log.write_text("step,loss\n" + "".join(f"{number},2.5\n" for number in numbers))
    return log


def named(plan: Plan) -> bool:
    """Whether the plan says of the log, everywhere, that it is not cut."""
    assert plan.promise is not None
    note = plan.promise.not_known.get("logs", "")
    if note:
        assert note in plan.warnings and "metrics.csv" in note
        assert "not known what its numbers count" in note
    return bool(note)


COUNTS = ["updates", "micro-batches", "samples", "epochs", "saves"]


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@example(History("epochs", "updates"), 0)
@example(History("epochs", "updates", "counter"), 1)
@example(History("epochs", "epochs", "nothing", more=5), 1)
@example(History("updates", "micro-batches", batches=2), 2)
@example(History("updates", "micro-batches", saves=1, batches=2, each=3), 0)
@example(History("updates", "epochs", epoch=24), 1)
@example(History("saves", "epochs", epoch=12), 2)
@example(History("updates", "micro-batches", "logged", saves=1, batches=2), 0)
@example(History("updates", "micro-batches", "logged", batches=2, more=5), 0)
@given(
    told=st.builds(
        lambda named, logged, known, saves, every, longer, batches, more, each: History(
            named, logged, known, saves, every, every * longer, batches, more % every, each
        ),
        st.sampled_from(["updates", "epochs", "saves"]),
        st.sampled_from(COUNTS),
        st.sampled_from(["optimizer", "counter", "nothing", "logged"]),
        st.integers(1, 6),
        st.integers(2, 40),
        st.integers(1, 3),
        st.sampled_from([2, 3, 8]),
        st.integers(0, 39),
        st.sampled_from([1, 2, 10]),
    ),
    back=st.integers(0, 5),
)
def test_no_point_from_before_the_step_is_cut_and_none_from_after_it_stays_unnamed(
    tmp_path_factory: pytest.TempPathFactory, told: History, back: int
) -> None:
    """Whatever steps and log count; and a log that counts as the steps do is cut, or one of which
    the page says what it counts."""
    steps, points = told.steps(), told.points()
    assume(len(steps) == told.saves)  # an epoch has no two
    assume(told.each == 1 or 2 * told.each <= told.every)
    number, updates = list(steps.items())[back % len(steps)]
    log = trained(tmp_path_factory.mktemp("run") / "run", told)
    before = log.read_bytes()
    plan = surgery.plan(Run.open(log.parent), from_data({"rollback": {"to": number}}))
    surgery.apply(Run.open(log.parent), plan)
    if named(plan):
        assert log.read_bytes() == before
        assert told.known != "logged"
        same = all(told.count(told.logged, after) == step for step, after in steps.items())
        assert not same or told.saves == 1
        return
    assert left(log) == [point for point, of in points.items() if of <= updates]


@pytest.mark.parametrize("known", ["optimizer", "counter", "nothing"])
def test_epochs_beside_a_log_of_updates(tmp_path: Path, known: str) -> None:
    """A page that names `iteration` says where the log is cut; without it the plan says what is not
    known, and what cuts it."""
    log = trained(tmp_path / "run", History("epochs", "updates", known, more=3))
    before = snapshot(log.parent)
    plan = operate(log.parent, {"rollback": {"to": 2}})
    if known == "counter":
        assert not named(plan) and left(log) == list(range(1, 13))
    else:
        assert named(plan) and left(log) == list(range(1, 28))
    said = " ".join(plan.warnings)
    assert ("truncate-logs --after 12" in said) is (known == "optimizer")
    take_back(log.parent, before)


@settings(max_examples=10, deadline=None)
@given(
    logged=st.sampled_from(["updates", "the steps"]),
    lost=st.integers(1, 9),
    early=st.integers(30, 70),
    back=st.integers(0, 2),
)
def test_each_command_that_is_named_cuts_the_log_that_it_is_for(
    tmp_path_factory: pytest.TempPathFactory, logged: str, lost: int, early: int, back: int
) -> None:
    """Where the log ended early, and the optimizer leaves out some updates before each step."""
    steps = {step: step - lost * step // 40 for step in (40, 80, 120, 160)}
    root = tmp_path_factory.mktemp("run") / "run"
    saved(root, steps, PAGE.replace("FIELDS", ""))
    numbers = [steps[160] if logged == "updates" else 160, list(steps)[back]]
    end, step = numbers[0] - early, numbers[1]
    log = root / "metrics.csv"
    log.write_text("step,loss\n" + "".join(f"{number},2.5\n" for number in range(1, end)))
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": step}}))
    assume(named(plan))
    cuts = " ".join(plan.warnings)
    wanted = step if logged == "the steps" else steps[step]
    found = re.search(
        rf"--after (\d+) (?:is )?for (?:a log|one) that counts (?:what )?{logged}", cuts
    )
    assert found and int(found[1]) == wanted, cuts
    assume(wanted < end - 1)
    cut = surgery.plan(Run.open(root), from_data({"logs": {"after": int(found[1])}}))
    surgery.apply(Run.open(root), cut)
    assert left(log)[-1] == wanted


@pytest.mark.parametrize("known", ["optimizer", "counter"])
def test_a_fork_brings_no_log_whose_numbers_are_not_known(tmp_path: Path, known: str) -> None:
    log = trained(tmp_path / "run", History("epochs", "updates", known))
    recipe = from_data({"logs": {"of": str(log.parent)}})
    made = fork(Run.open(log.parent), 2, tmp_path / "branch", recipe, "copy")
    said = [each for each in made.warnings if "not carried: metrics.csv" in each]
    assert len(said) == (known == "optimizer")
    branch = tmp_path / "branch" / "metrics.csv"
    assert branch.exists() is (known == "counter")
    assert known == "optimizer" or left(branch) == list(range(1, 13))


def test_a_note_is_at_the_cut_or_nowhere(tmp_path: Path) -> None:
    """In event files that count updates, the number of an epoch is long before the step."""
    root = trained(tmp_path / "run", History("epochs", "updates")).parent
    write_log(root / "logs", [2.0] * 24, tag="criterion")
    operate(root, {"rollback": {"to": 2}})
    assert not [*root.rglob("*tfevents*.ckptsurgeon")]
    operate(root, {"logs": {"after": 12}})
    (note,) = root.rglob("*tfevents*.ckptsurgeon")
    assert {*event_file.scan(note).steps} <= {0, 12}


@pytest.mark.parametrize("optimizers", [1, 2])
def test_lightning_counts_the_updates_of_each_optimizer(tmp_path: Path, optimizers: int) -> None:
    """And logs batches, of which each has one of each: those of two are not cut at twice."""
    root = tmp_path / "run"
    root.mkdir()
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(1, 2)).sum().backward()
    adam.step()
    for batches in (10, 20, 30):
        for state in adam.state.values():
            state["step"].fill_(batches)
        held = {
            "pytorch-lightning_version": "2.6.6",
            "global_step": batches * optimizers,
            "state_dict": layer.state_dict(),
            "optimizer_states": [adam.state_dict()] * optimizers,
            "lr_schedulers": [],
        }
        torch.save(held, root / f"at-{batches}.ckpt")
    log = root / "metrics.csv"
    log.write_text("step,loss\n" + "".join(f"{number},2.5\n" for number in range(30)))
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 20 * optimizers}}))
    surgery.apply(Run.open(root), plan)
    assert named(plan) is (optimizers == 2)
    assert left(log) == list(range(20 if optimizers == 1 else 30))


def test_a_step_of_no_number_cuts_nothing(tmp_path: Path) -> None:
    """`torch:PATH=` calls it 0: every point came after that."""
    log = trained(tmp_path / "run", History("updates", "updates", saves=1, every=50))
    run = Run.open(log.parent, format="torch:ckpt-50.pt=optimizer")
    plan = surgery.plan(run, from_data({"rollback": {"to": 0}}))
    assert named(plan) and not [c for c in plan.changes if c.file == log.name]


@pytest.mark.long
@pytest.mark.parametrize("known", ["optimizer", "counter", "nothing"])
def test_advice_goes_back_to_before_the_first_sign_or_nowhere(tmp_path: Path, known: str) -> None:
    """Epochs of 60 updates, and a loss that leaves its course at update 250, after epoch 4. The
    times of the saves say it where nothing else does."""
    told = History("epochs", "updates", known, saves=6, every=60, epoch=60)
    trained(tmp_path / "run", told, points=[])
    write_log(tmp_path / "run" / "logs", spiked(400, 250), tag="train/loss", wall=BEGAN)
    run = Run.open(tmp_path / "run")
    judged = advise.advise(own(run, {}), run)
    assert judged.verdict == "diverged"
    assert judged.back_to in (3, 4)
    assert all(item.at == 60 * item.step for item in judged.candidates)
    for file in (tmp_path / "run").glob("*.pt"):
        os.utime(file, (BEGAN + 1e6,) * 2)  # as of a copy
    judged = advise.advise(own(run, {}), run)
    assert judged.back_to in ((None,) if known == "nothing" else (3, 4))
    assert any("not known what" in note for note in judged.curves.notes) is (known == "nothing")


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("summary.csv", "epoch,train_loss\n0,3.5\n1,3.0\n", "epochs, up to 1"),
        (
            "metrics.json",
            '{"iteration": 19, "total_loss": 2}\n{"iteration": 39}\n',
            "steps, up to 39",
        ),
        ("log.jsonl", '{"step": 1, "a": 2}\n{"step": 2}\n', "steps, up to 2"),
        ("config.json", '{\n "step": 1,\n "steps": 2\n}\n', ""),
        ("answers.csv", "question,answer\n1,2\n2,3\n", ""),
        ("result.json", '{"step": 500, "accuracy": 0.5}\n', ""),
    ],
)
def test_a_file_that_may_be_a_log_is_named(
    tmp_path: Path, name: str, text: str, counts: str
) -> None:
    """And stays as it is, until the settings name it."""
    root = trained(tmp_path / "run", History("epochs", "epochs")).parent
    (root / name).write_text(text)
    plan = operate(root, {"rollback": {"to": 2}})
    said = [each for each in plan.warnings if each.startswith(f"{name} stays as it is")]
    assert len(said) == bool(counts) and all(counts in each for each in said)
    assert (root / name).read_text() == text
    told = advise.judge(own(Run.open(root), {}))
    assert told.verdict == "unknown"


@pytest.mark.parametrize("named", ["epochs", "updates"])
def test_lines_that_count_epochs_are_cut_where_steps_are_epochs(tmp_path: Path, named: str) -> None:
    """As timm's summary.csv, and a log of JSON lines; beside steps that count updates they stay."""
    root = trained(tmp_path / "run", History(named, named)).parent
    (root / "ckptsurgeon.yaml").write_text("format: own.yaml\nlogs: [summary.csv, log.txt]\n")
    table, lines = root / "summary.csv", root / "log.txt"
    table.write_text("epoch,train_loss\n" + "".join(f"{n},2.5\n" for n in range(1, 5)))
    lines.write_text("".join(f'{{"train_loss": 2.5, "epoch": {n}}}\n' for n in range(1, 5)))
    before = snapshot(root)
    epochs = named == "epochs"
    plan = operate(root, {"rollback": {"to": 2 if epochs else 12}})
    assert left(table) == [1, 2, 3, 4][: 2 if epochs else None]
    assert lines.read_text().count("epoch") == (2 if epochs else 4)
    assert plan.promise is not None
    note = plan.promise.not_known.get("logs", "")
    assert ("summary.csv (up to 4)" in note and "log.txt" in note) is not epochs
    take_back(root, before)


def test_advise_says_which_log_has_no_loss_that_is_known(tmp_path: Path) -> None:
    """And of which names, with an option that works."""
    root = trained(tmp_path / "run", History("epochs", "epochs")).parent
    (root / "metrics.csv").write_text("step,objective\n1,3.0\n2,2.5\n")
    (root / "log.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 2}\n')
    run = Run.open(root)
    told = advise.judge(own(run, {}))
    assert "metrics.csv: no loss is known in it; it has objective; --log FILE" in told.reason
    assert any("log.jsonl may be a log" in note for note in told.curves.notes)
    assert len(own(run, {"loss": "objective"}).kept["loss"]) == 2
    write_log(root / "events", [3.0, 2.0], tag="criterion")
    assert "it has criterion; --tag loss=NAME" in advise.judge(own(run, {})).reason
    assert len(own(run, {"loss": "criterion"}).kept["loss"]) == 2
