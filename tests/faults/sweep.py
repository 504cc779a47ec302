"""Sweeps: one fault at every call of a scenario, then the verdict, the reader and the recovery."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.faults.bugs import seeded
from tests.faults.inject import KILLED, Fault, Outcome, count_calls, exited, outcome
from tests.faults.world import Point, Report, Scenario, neither, restore, save, workplace
from tests.support.snapshot import differs, snapshot


class Stage:
    """A scenario made ready: its template, its states before and after, and its calls."""

    def __init__(self, scenario: Scenario, place: Path) -> None:
        self.scenario = scenario
        self.world = place / "world"
        self.world.mkdir()
        scenario.build(self.world)
        self.template = save(self.world)
        self.before = snapshot(self.world, own=True)
        self.calls = count_calls(lambda: scenario.act(self.world))
        self.after = snapshot(self.world, own=True)

    def reset(self) -> None:
        restore(self.template, self.world)

    def act(self, fault: Fault | None = None) -> Outcome:
        return outcome(lambda: self.scenario.act(self.world), fault)

    def recover(self, fault: Fault | None = None) -> Outcome:
        with exited():
            return outcome(lambda: self.scenario.recover(self.world), fault)

    def read(self) -> str | None:
        """What a trainer that starts now finds wrong."""
        return self.scenario.read(self.world)


Sweep = Callable[..., Iterator[Point]]


def reports(*jobs: tuple[Any, ...], bug: str = "") -> list[Report]:
    """`run` for each job, side by side in fresh interpreters: a sweep forks at every point, and a
    fork of a process that has imported torch takes twenty times as long."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return [job.result() for job in [pool.submit(run, *job, bug=bug) for job in jobs]]


def sound(found: Sequence[Report], at_least: int) -> None:
    """No point of these sweeps is a violation, and there are enough of them."""
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    points = sum(report.points for report in found)
    print(f"{points} points, no violation")
    assert points >= at_least, points


def run(scenario: Scenario, sweep: Sweep, *arguments: Any, bug: str = "") -> Report:
    """All points of one sweep over one scenario. With a seeded bug, only up to the first point
    that finds it; the states that it is judged by come from the code without the bug."""
    report = Report()
    with workplace() as place:
        stage = Stage(scenario, place)
        with seeded(bug) if bug else nullcontext():
            for point in sweep(stage, *arguments):
                report.note(point)
                if bug and report.violations:
                    break
    return report


def faults(
    stage: Stage, kinds: Sequence[str], sticky: Sequence[bool] = (False,), every: int = 1
) -> Iterator[Point]:
    """Each kind of fault at each call (or each `every`-th, from another one on for the next kind)
    of the scenario's command."""
    for number, (kind, stays) in enumerate(product(kinds, sticky)):
        for at in range(1 + number % every, len(stage.calls) + 1, every):
            call = stage.calls[at - 1]
            if kind == "SHORT" and not call.startswith(("write", "copy")):
                continue
            stage.reset()
            fault = Fault(kind, at, stays)
            ended = stage.act(fault)
            yield Point(f"{fault} ({call})", ended.code, stage.read() or verdict(stage, ended))


def faults_in_recovery(
    stage: Stage, kinds: Sequence[str], sticky: Sequence[bool] = (False,), every: int = 1
) -> Iterator[Point]:
    """Kill the command at each (or each `every`-th) call; put each kind of fault at each call of
    the recovery from that; then recover without faults."""
    for kill in range(1, len(stage.calls) + 1, every):
        stage.reset()
        stage.act(Fault("KILL", kill))
        killed = save(stage.world)
        calls = stage.recover().calls
        for kind, stays, at in product(kinds, sticky, range(1, calls + 1)):
            restore(killed, stage.world)
            fault = Fault(kind, at, stays)
            ended = stage.recover(fault)
            violation = stage.read()
            if ended.code not in (0, 5, 130, KILLED):
                violation = violation or ended.told
            where = f"killed at {kill} ({stage.calls[kill - 1]}), then {fault} in recover"
            yield Point(where, ended.code, violation or recovered(stage))


def recovered(stage: Stage) -> str | None:
    """Recover without faults: the world is as before or as after, and stays so."""
    ended = stage.recover()
    if ended.code != 0:
        return f"recover: exit {ended.code}: {ended.told}"
    found = snapshot(stage.world, own=True)
    violation = neither(found, stage.before, stage.after) or stage.read()
    if violation is None and differs(found, stage.before, times=False) is None:
        violation = differs(found, stage.before, times=True)
    if violation is not None:
        return f"after recover: {violation}"
    ended = stage.recover()
    if ended.code != 0 or snapshot(stage.world, own=True) != found:
        return f"a second recover: exit {ended.code} {ended.told}, or it changed something"
    return None


def verdict(stage: Stage, ended: Outcome) -> str | None:
    """Whether the exit code says what is on disk; recovers where it says that this is needed."""
    found = snapshot(stage.world, own=True)
    if ended.code == 0:
        return differs(found, stage.after, times=False)
    if ended.code in (1, 130):
        return differs(found, stage.before, times=True)
    if ended.code in (5, KILLED):
        return recovered(stage)
    return f"exit code {ended.code}: {ended.told}"
