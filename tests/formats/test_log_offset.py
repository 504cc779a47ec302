"""Logs that call the first update 0, or may do so: whether a rollback cuts the point that has the
number of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Plan, Run, surgery
from ckptsurgeon.errors import UsageError
from ckptsurgeon.recipe.file import from_data
from tests.support.event_logs import write_log
from tests.support.own_runs import BEGAN, left, saved
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

PAGE = """name: own
files:
  "ckpt-{step}.pt": {optimizers: [[optimizer]]}
"""
UPDATE, SAVE = 10.0, 0.5
"""Seconds of an update, and of a save."""


@dataclass(frozen=True)
class Row:
    number: int
    after: int
    """The updates up to the one that it tells of."""
    wall: float
    start: int


@dataclass(frozen=True)
class Loop:
    """A loop that calls its first update `first`, logs every `each`-th number, saves after every
    `every`-th update, `saves` times, and makes `more` updates then. It may evaluate `before` the
    first one, which is logged at 0, log after it saves, log the time, have been started again from
    the save `resumed`, and be copied since."""

    first: int
    every: int = 6
    saves: int = 4
    more: int = 0
    each: int = 1
    before: bool = False
    late: bool = False
    timed: bool = True
    resumed: int = 0
    copied: bool = False

    def trained(self) -> Iterator[Row | tuple[int, float]]:
        """Its rows, and its saves: each with the updates before it and the time."""
        moment, last = BEGAN, self.every * self.saves + self.more
        if self.before:
            yield Row(0, 0, moment, 0)
        again = self.every * self.resumed
        starts = [(0, again + self.more), (again, last)] if again else [(0, last)]
        for start, (begin, end) in enumerate(starts):
            for after in range(begin + 1, end + 1):
                moment += UPDATE
                number = after - 1 + self.first
                row = [Row(number, after, moment, start)] * (number % self.each == 0)
                if after % self.every == 0:
                    moment += SAVE
                    row = [Row(number, after, moment, start)] if row and self.late else row
                    yield from row if not self.late else ()
                    yield after, moment
                    yield from row if self.late else ()
                else:
                    yield from row

    def rows(self) -> list[Row]:
        return [each for each in self.trained() if isinstance(each, Row)]

    def leading_to(self, step: int) -> list[Row]:
        """The rows of the history of a step: the first start counts up to where it was left."""
        again = self.every * self.resumed
        limits = (step, again) if not again or step <= again else (again, step)
        if not again or step <= again:
            return [row for row in self.rows() if row.start == 0 and row.after <= step]
        return [row for row in self.rows() if row.after <= limits[row.start]]

    def write(self, root: Path) -> Path:
        """What it leaves."""
        times = {each[0]: each[1] for each in self.trained() if isinstance(each, tuple)}
        if self.copied:
            times = dict.fromkeys(times, BEGAN + 1e6)
        saved(root, {step: step for step in times}, PAGE, times=times)
        log = root / "metrics.csv"
        lines = [f"{row.number},2.5" + f",{row.wall}" * self.timed for row in self.rows()]
        head = "step,loss" + ",time" * self.timed
        log.write_text("".join(f"{line}\n" for line in [head, *lines]))
        return log


def doubtful(plan: Plan) -> bool:
    """Whether the plan says that it does not know of the point."""
    assert plan.promise is not None
    note = plan.promise.not_known.get("logs", "")
    assert not note or ("may be" in note or "not known whether the point" in note), note
    return bool(note)


def provable(told: Loop) -> bool:
    """Whether something in the run proves how it counts: the order of points and saves, where the
    next point is an update later; a start after what was saved; its end, where it was not killed.
    """
    ordered = told.timed and not told.copied and not (told.first == 1 and told.late and told.before)
    started = told.resumed and told.each == 1 and told.more and told.first == 1
    ended = told.first == 0 and told.each == 1 and not told.more
    return bool(ordered or started or ended or (told.first == 1 and not told.before))


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@example(Loop(0), 1)
@example(Loop(0, more=3, timed=False), 1)
@example(Loop(0, more=3, timed=False, resumed=2), 2)
@example(Loop(1, before=True, late=True), 1)
@example(Loop(1, before=True, timed=False), 1)
@example(Loop(0, more=3, each=2), 2)
@given(
    told=st.builds(
        lambda first, every, saves, more, each, before, late, timed, resumed, copied: Loop(
            first, every, saves, more % every, each, before and first == 1, late, timed,
            resumed % saves, copied,
        ),
        st.sampled_from([0, 1]),
        st.integers(6, 30),
        st.integers(2, 5),
        st.integers(0, 29),
        st.sampled_from([1, 1, 2, 3]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.integers(0, 4),
        st.booleans(),
    ),
    back=st.integers(0, 4),
)  # fmt: skip
def test_a_point_of_the_future_is_cut_or_named_and_none_of_the_past_is_cut(
    tmp_path_factory: pytest.TempPathFactory, told: Loop, back: int
) -> None:
    """Whatever the loop calls its first update, and whatever proves it."""
    starts = [[row.number for row in told.rows() if row.start == start] for start in (0, 1)]
    assume(not starts[1] or starts[0][-1] != starts[1][0])  # of one number: no start is seen
    step = told.every * (1 + back % told.saves)
    log = told.write(tmp_path_factory.mktemp("run") / "run")
    plan = surgery.plan(Run.open(log.parent), from_data({"rollback": {"to": step}}))
    surgery.apply(Run.open(log.parent), plan)
    here, history = left(log), [row.number for row in told.leading_to(step)]
    if doubtful(plan):
        assert not provable(told)
        future = [row.number for row in told.rows() if row.after > step]
        assert here == ([*history, step] if step in future and told.first == 0 else history)
    else:
        assert here == history


@pytest.mark.parametrize("more", [0, 3])
def test_an_evaluation_at_each_start_is_no_count_from_0(tmp_path: Path, more: int) -> None:
    """The loop calls its first update 1, and evaluates before it, and again where it goes on from a
    save, at the number of that."""
    root = tmp_path / "run"
    saved(root, {n: n for n in (6, 12, 18, 24)}, PAGE)
    log = root / "metrics.csv"
    numbers = [*range(15), *range(12, 25 + more)]
    log.write_text("step,loss\n" + "".join(f"{n},2.5\n" for n in numbers))
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 18}}))
    surgery.apply(Run.open(root), plan)
    assert left(log)[-1] == 18 and doubtful(plan)


@pytest.mark.parametrize("said", [-1, 0, None])
def test_the_settings_say_it_where_nothing_proves_it(tmp_path: Path, said: int | None) -> None:
    told = Loop(0, more=3, timed=False)
    log = told.write(tmp_path / "run")
    if said is not None:
        with (log.parent / "ckptsurgeon.yaml").open("a") as file:
            file.write(f"log_offset: {said}\n")
    before = snapshot(log.parent)
    plan = operate(log.parent, {"rollback": {"to": 12}})
    assert left(log) == list(range(12 if said == -1 else 13))
    assert doubtful(plan) is (said is None)
    assert said is not None or any("log_offset" in each for each in plan.warnings)
    take_back(log.parent, before)


def test_event_files_say_it_by_their_times(tmp_path: Path) -> None:
    """Point n is written n + 1 seconds after the start, and step n saved between n and n + 1."""
    root = tmp_path / "run"
    steps = [6, 12, 18, 24]
    saved(root, {n: n for n in steps}, PAGE, times={n: BEGAN + n + 0.1 for n in steps})
    write_log(root / "logs", [2.0] * 26, first=0, tag="criterion", wall=BEGAN + 1.01)
    before = snapshot(root)
    plan = operate(root, {"rollback": {"to": 12}})
    assert not doubtful(plan) and plan.promise is not None
    assert "tensorboard" not in plan.promise.not_known
    assert any("to step 11" in getattr(change, "note", "") for change in plan.changes)
    take_back(root, before)


def test_a_wrong_offset_is_refused(tmp_path: Path) -> None:
    log = Loop(0).write(tmp_path / "run")
    (log.parent / "ckptsurgeon.yaml").write_text("format: own.yaml\nlog_offset: one\n")
    with pytest.raises(UsageError, match="`log_offset` is not a whole number"):
        Run.open(log.parent)
