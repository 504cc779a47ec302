"""On a server's file system, far away: what waits overlaps, and no surgery is done by half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

import pytest

from bench.process import python
from ckptsurgeon import Run, apply, plan, plan_undo
from ckptsurgeon.cli.usage import from_system
from ckptsurgeon.disk import mount as mounts
from ckptsurgeon.recipe.file import from_data
from tests.faults.inject import KILLED
from tests.faults.sweep import Stage, faults, faults_in_recovery, reports, sound, verdict
from tests.faults.toy import IN_THREADS, ROLLBACK, SCENARIOS, SET_LR, UNDO, UNDO_SET
from tests.faults.world import Scenario
from tests.network.slow_server import Mount, lacking, mounted
from tests.support.snapshot import walk
from tests.transaction.written_over import refused_whenever_written_over

pytestmark = [pytest.mark.network, pytest.mark.skipif(bool(lacking()), reason=lacking())]

AT_MOST = 0.15
"""Of all calls: so many round trips may be waited for. They are counted and not timed, so that a
busy machine finds as many as an idle one (`slow.c`, lockstep)."""
STEPS = 60
EVERY = (23, 41, 67, 131)
"""Python opens a file again as long as EINTR ends the call, so each is more calls than that takes.
"""
FOLDERS = 4
"""At most, of a toy run, in which names change."""
SURGERY = {"rollback": {"to": 95000}, "set": {"lr": 3e-5}, "reset": ["moments"]}
T = TypeVar("T")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    with mounted(tmp_path_factory.mktemp("network")) as mount:
        yield mount


@pytest.fixture
def far(server: Mount, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """The mount, on which the worlds of the sweeps are."""
    monkeypatch.setenv("FAULTS_IN", str(server.here))
    return server


def sizes(root: Path) -> dict[str, int]:
    """The size of each file of a run: to read terabytes of holes takes long."""
    return {name: info.st_size for name, info in walk(root, own=False) if S_ISREG(info.st_mode)}


@contextmanager
def waits(server: Mount) -> Iterator[Callable[[str, Callable[[], T]], T]]:
    """What calls a function and counts. All that are called inside wait for few round trips."""
    turns = calls = 0

    def counted(name: str, act: Callable[[], T]) -> T:
        nonlocal turns, calls
        before = server["turns"], server["calls"]
        made = act()
        new = server["turns"] - before[0], server["calls"] - before[1]
        turns, calls = turns + new[0], calls + new[1]
        print(f"{name}: {new[1]:,} calls in {new[0]:,} turns, {new[0] / new[1]:.3f}")
        return made

    server["lockstep"] = 1
    try:
        yield counted
    finally:
        server["lockstep"] = 0
    assert 0 < turns <= AT_MOST * calls


def test_the_mount_is_known_as_a_networks(server: Mount) -> None:
    assert mounts.threads(server.here) == mounts.NETWORK_THREADS


def test_what_waits_for_the_server_overlaps(server: Mount) -> None:
    """BLOOM's 720 files of a step: a rollback with new values, and its undo."""
    python("bench.layout", "bloom", server.there / "bloom", 12)
    root, before = server.here / "bloom", sizes(server.there / "bloom")
    with waits(server) as counted:
        wanted = counted("plan", lambda: plan(Run.open(root), from_data(SURGERY)))
        counted("apply", lambda: apply(Run.open(root), wanted))
    with waits(server) as counted:
        back = counted("plan the undo", lambda: plan_undo(Run.open(root)))
        counted("undo", lambda: apply(Run.open(root), back))
    assert sizes(server.there / "bloom") == before


def test_what_status_asks_of_each_step_overlaps(server: Mount) -> None:
    """The names of the folders are known: of those in one folder the kernel asks libfuse one after
    the other."""
    python("bench.layout", "three", server.there / "steps", STEPS)
    run = Run.open(server.here / "steps")
    for step in run.steps():
        run.directory(step).stat()
    with waits(server) as counted:
        found = counted("conditions", lambda: run.conditions.of_each(run.steps()))
    assert [*found.values()] == ["complete"] * STEPS


@pytest.mark.parametrize("undo", [False, True], ids=["surgery", "undo"])
def test_a_shard_that_somebody_writes_to_within_the_second_is_refused(
    server: Mount, undo: bool
) -> None:
    folder = server.here / f"written over {undo}"
    folder.mkdir()
    refused_whenever_written_over(folder, undo)


def test_kill_at_every_call(far: Mount) -> None:
    found = reports(*((scenario, faults, ("KILL",)) for scenario in SCENARIOS))
    sound(found, 300)
    for report in found:  # a folder gets its time back only where a second has passed since
        assert set(report.codes) <= {KILLED, 0}, report.codes
        assert report.codes[KILLED] >= report.points - FOLDERS, report.codes


def test_the_servers_errors_at_every_call(far: Mount) -> None:
    kinds = ("ESTALE", "EIO", "EINTR", "ENOSPC", "SHORT")
    found = reports(
        *((scenario, faults, kinds, (False, True), 5) for scenario in (ROLLBACK, UNDO)),
        *((scenario, faults, kinds, (False, True), 5) for scenario in (SET_LR, UNDO_SET)),
        (IN_THREADS, faults, ("KILL", "ESTALE"), (False,), 3),
    )
    sound(found, 300)


def test_a_recovery_that_is_cut_off(far: Mount) -> None:
    kinds = ("KILL", "ESTALE")
    found = reports(
        *((scenario, faults_in_recovery, kinds, (False,), 40) for scenario in SCENARIOS)
    )
    sound(found, 200)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_a_link_that_ends_with_an_io_error_is_a_copy(
    server: Mount, scenario: Scenario, tmp_path: Path
) -> None:
    """As in a mount of rclone, which has no hard links and no other word for it."""
    place = server.here / tmp_path.name
    place.mkdir()
    stage = Stage(scenario, place)
    stage.reset()
    server["nolinks"] = 1
    try:
        ended = stage.act()
        with pytest.raises(OSError, match="Input/output error"):
            (place / "second").hardlink_to(stage.world / "run/latest")
    finally:
        server["nolinks"] = 0
    assert ended.code == 0
    assert verdict(stage, ended) is None


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_a_server_that_fails_now_and_then(
    server: Mount, scenario: Scenario, tmp_path: Path
) -> None:
    """Any call may fail, those that only read too: the exit code says what is on disk. Each Nth
    call fails, for each N in EVERY, and every second one of N is once the first."""

    def act(world: Path) -> None:
        try:
            scenario.act(world)
        except OSError as error:  # where it reads; `main` makes of it what is said then
            raise from_system(error) from error

    place = server.here / tmp_path.name
    place.mkdir()
    stage, codes = Stage(replace(scenario, act=act), place), []
    for every, before in ((each, before) for each in EVERY for before in range(0, each, 2)):
        stage.reset()
        server["calls"] = before
        with server.failing(every):
            ended = stage.act()
        assert verdict(stage, ended) is None, f"each {every}th, {before} before"
        codes.append(ended.code)
    assert len(set(codes)) > 1, codes
