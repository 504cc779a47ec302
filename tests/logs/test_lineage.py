"""Each known way in which logs overlap: no good point is lost and no stale one kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptsurgeon.logs.cut import truncate
from ckptsurgeon.logs.marks import Marks
from tests.support.training_log import (
    START,
    Job,
    all_points,
    apply,
    deepspeed_monitor,
    marks,
    samples,
    tf1,
    truth,
    write,
)

Parts = Sequence[tuple[Job, int]]


def cut(logs: Path, marks: Marks, **choices: object) -> tuple[list[str], int]:
    """Truncate as a user would, twice; the warnings, and how many files changed."""
    changes, warnings = truncate(logs, logs.parent, marks, keep_as="cut", **choices)  # type: ignore[arg-type]
    apply(changes, logs.parent)
    again, _ = truncate(logs, logs.parent, marks, keep_as="cut", **choices)  # type: ignore[arg-type]
    assert again == []
    return warnings, len(changes)


class Tr8:
    """The launches of the study, a tenth as long: a crash at 415, a torn end at 700, a rollback to
    621 that nobody cleaned, and a third branch from 300."""

    def __init__(self, **options: object) -> None:
        skew = options.pop("skew", {})
        assert isinstance(skew, dict)
        began = START
        self.jobs = []
        for first, last in ((1, 415), (401, 700), (622, 690), (301, 500)):
            job = Job(first, last, began, skew=skew.get(first, 0.0), **options)  # type: ignore[arg-type]
            self.jobs.append(job)
            began = job.wall(last) + 900
        self.jobs[1].torn = 30
        self.a, self.b, self.c, self.d = self.jobs


@pytest.fixture(scope="module")
def tr8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tr8]:
    directory = tmp_path_factory.mktemp("tr8")
    study = Tr8()
    for job in study.jobs:
        write(directory, job)
    return directory, study


@pytest.mark.long
def test_the_five_rollbacks_of_the_study(tr8: tuple[Path, Tr8], tmp_path: Path) -> None:
    directory, t = tr8
    cases: dict[str, tuple[int, Job, int, Parts]] = {
        "first rollback": (2, t.b, 621, [(t.a, 400), (t.b, 621)]),
        "second, not cleaned before": (3, t.b, 621, [(t.a, 400), (t.b, 621)]),
        "inside branch 2": (3, t.c, 650, [(t.a, 400), (t.b, 621), (t.c, 650)]),
        "newest of 3 branches": (4, t.d, 400, [(t.a, 300), (t.d, 400)]),
        "the old branch": (4, t.b, 450, [(t.a, 400), (t.b, 450)]),
        "before the crash overlap": (4, t.a, 410, [(t.a, 410)]),
    }
    for name, (files, saver, step, parts) in cases.items():
        logs = tmp_path / name / "tb"
        logs.mkdir(parents=True)
        for job in t.jobs[:files]:
            shutil.copy2(directory / job.name, logs)
        before = all_points(logs)
        cut(logs, marks(step, saver.wall(step) + 3))
        expected = truth(*parts)
        assert all_points(logs) == expected, name
        kept = [point for folder in logs.glob("cut*") for point in all_points(folder)]
        assert sorted(expected + kept) == before, name


def test_logs_alone_are_enough_when_one_branch_holds_the_step(
    tr8: tuple[Path, Tr8], tmp_path: Path
) -> None:
    directory, t = tr8
    for job in t.jobs[:2]:
        shutil.copy2(directory / job.name, tmp_path)
    cut(tmp_path, Marks(621))
    assert all_points(tmp_path) == truth((t.a, 400), (t.b, 621))


def test_logs_alone_are_refused_when_two_branches_hold_the_step(
    tr8: tuple[Path, Tr8],
) -> None:
    directory, t = tr8
    with pytest.raises(Exception, match="2 branches may hold step 450") as refusal:
        truncate(directory, directory, Marks(450), keep_as=None)
    assert t.d.name in str(refusal.value)
    assert "--branch" in " ".join(refusal.value.next)  # type: ignore[attr-defined]


def test_a_named_branch_settles_it(tr8: tuple[Path, Tr8], tmp_path: Path) -> None:
    directory, t = tr8
    for job, parts in ((t.b, [(t.a, 400), (t.b, 450)]), (t.d, [(t.a, 300), (t.d, 450)])):
        logs = tmp_path / job.name.replace("tfevents", "")
        shutil.copytree(directory, logs)
        cut(logs, Marks(450), branch=[job.name])
        assert all_points(logs) == truth(*parts)


@pytest.mark.parametrize("skewed", [1, 401, 622])
@pytest.mark.parametrize("hours", [-55, 55])
@pytest.mark.long
def test_a_writer_whose_clock_is_55_hours_off(tmp_path: Path, skewed: int, hours: int) -> None:
    t = Tr8(skew={skewed: hours * 3600.0}, evaluate=100)
    for job in t.jobs[:3]:
        write(tmp_path, job)
    warnings, _ = cut(tmp_path, marks(650, t.c.wall(650) + 3))
    assert all_points(tmp_path) == truth((t.a, 400), (t.b, 621), (t.c, 650))
    if hours > 0 or skewed > 1:  # else the order is right by either clock
        assert any("55.0 h" in line for line in warnings)


@pytest.mark.parametrize("step", [620, 615])
def test_every_tenth_iteration_is_logged(tmp_path: Path, step: int) -> None:
    t = Tr8(interval=10)
    for job in t.jobs[:3]:
        write(tmp_path, job)
    cut(tmp_path, marks(step, t.b.wall(step) + 3))
    assert all_points(tmp_path) == truth((t.a, 400), (t.b, step))


def test_deepspeeds_monitor_without_an_iteration_axis(tmp_path: Path) -> None:
    t = Tr8(logged=deepspeed_monitor)
    for job in t.jobs[:3]:
        write(tmp_path, job)
    cut(tmp_path, marks(650, t.c.wall(650) + 3))
    assert all_points(tmp_path) == truth((t.a, 400), (t.b, 621), (t.c, 650))


def test_deepspeeds_monitor_needs_the_samples(tmp_path: Path) -> None:
    write(tmp_path, Job(1, 5, START, logged=deepspeed_monitor))
    with pytest.raises(Exception, match="count samples, not iterations"):
        truncate(tmp_path, tmp_path, Marks(3), keep_as=None)


def test_tf1_events_with_several_values(tmp_path: Path) -> None:
    t = Tr8(logged=tf1, together=True)
    for job in t.jobs:
        write(tmp_path, job)
    cut(tmp_path, marks(450, t.b.wall(450) + 3))
    assert all_points(tmp_path) == truth((t.a, 400), (t.b, 450))


def test_monitor_and_megatron_in_files_of_their_own(tmp_path: Path) -> None:
    jobs = []
    for job in Tr8().jobs[:3]:
        other = Job(job.first, job.last, job.began + 2, logged=deepspeed_monitor)
        other.torn = 0
        write(tmp_path, job)
        write(tmp_path, other)
        jobs.append((job, other))
    (a, a2), (b, b2), (c, _) = jobs
    cut(tmp_path, marks(621, b.wall(621) + 3))
    assert all_points(tmp_path) == truth((a, 400), (a2, 400), (b, 621), (b2, 621))
    assert not (tmp_path / c.name).exists()


def test_skipped_iterations_leave_a_gap_that_is_no_error(tmp_path: Path) -> None:
    a = Job(1, 300, START, skipped=range(120, 160))
    b = Job(201, 260, a.wall(300) + 60, skipped=range(201, 230))
    write(tmp_path, a)
    write(tmp_path, b)
    cut(tmp_path, marks(250, b.wall(250) + 3))
    # 201 to 229 of the first launch can't be told from a crash overlap by anything in the logs.
    assert all_points(tmp_path) == truth((a, 229), (b, 250))


def test_logs_that_end_before_the_step_or_begin_after_it_are_named(tmp_path: Path) -> None:
    job = Job(11, 20, START)
    write(tmp_path, job)
    warnings, _ = cut(tmp_path, marks(100, job.wall(20) + 7200))
    assert any("the logs end at step 20: nothing in them is after step 100" in w for w in warnings)
    warnings, _ = cut(tmp_path, Marks(iteration=7))
    assert any("has only events after step 7: all of it is cut" in line for line in warnings)


def test_a_rollback_into_a_gap_that_the_cut_left(tmp_path: Path) -> None:
    a = Job(1, 300, START)
    write(tmp_path, a)
    cut(tmp_path, marks(200, a.wall(200) + 3))
    shutil.rmtree(tmp_path / "cut")
    b = Job(201, 290, a.wall(300) + 60, skipped=range(201, 230))
    c = Job(251, 270, b.wall(290) + 60)
    write(tmp_path, b)
    write(tmp_path, c)
    warnings, _ = cut(tmp_path, marks(260, c.wall(260) + 3))
    assert all_points(tmp_path) == truth((a, 200), (b, 250), (c, 260))
    assert any("no events from 201 to 229" in line for line in warnings)


def test_a_trainer_that_goes_back_inside_one_file(tmp_path: Path) -> None:
    a = Job(1, 80, START, evaluate=20)
    b = Job(41, 60, a.wall(80) + 60, evaluate=20)
    write(tmp_path, a)
    second = write(tmp_path, b)
    first = tmp_path / a.name
    first.write_bytes(first.read_bytes() + second.read_bytes())
    second.unlink()
    cut(tmp_path, marks(50, b.wall(50) + 3))
    assert all_points(tmp_path) == truth((a, 40), (b, 50))


def test_events_that_a_killed_job_lost(tmp_path: Path) -> None:
    a = Job(1, 95, START)  # was at 100 and saved it, but events 96 to 100 never reached the disk
    b = Job(101, 180, START + 5000)
    c = Job(101, 120, START + 9000)
    for job in (a, b, c):
        write(tmp_path, job)
    warnings, _ = cut(tmp_path, marks(100, a.wall(100) + 3))
    assert all_points(tmp_path) == truth((a, 95))
    assert any(f"no events from 96 to 100 after {a.name}" in line for line in warnings)


def test_counters_of_another_run_are_refused(tmp_path: Path) -> None:
    write(tmp_path, Job(1, 60, START))
    with pytest.raises(Exception, match="checkpoint counts 77 samples"):
        truncate(tmp_path, tmp_path, Marks(30, samples=77), keep_as=None)


def test_two_trainings_in_one_directory_are_refused(tmp_path: Path) -> None:
    write(tmp_path, Job(1, 60, START))
    write(tmp_path, Job(2, 61, START + 100))
    with pytest.raises(Exception, match="two trainings at the same time"):
        truncate(tmp_path, tmp_path, Marks(61), keep_as=None)


def test_a_tag_over_epochs_goes_by_its_position(tmp_path: Path) -> None:
    def logged(job: Job, iteration: int):  # type: ignore[no-untyped-def]
        yield "loss", iteration, 1 / iteration
        if iteration % 10 == 0:
            yield "epoch/accuracy", iteration // 10, 0.5

    a = Job(1, 100, START, logged=logged)
    write(tmp_path, a)
    warnings, _ = cut(tmp_path, marks(55))
    assert all_points(tmp_path) == truth((a, 55))
    assert any("epoch/accuracy" in line for line in warnings)


def test_nothing_after_the_step_changes_nothing(tmp_path: Path) -> None:
    a = Job(1, 60, START)
    write(tmp_path, a)
    assert truncate(tmp_path, tmp_path, marks(60), keep_as="x") == ([], [])
    assert samples(60) == marks(60).samples
