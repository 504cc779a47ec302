"""Sweeps: one fault at every call of a scenario, then the verdict, the reader and the recovery."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from tests.faults.inject import KILLED, Fault, Outcome, count_calls, exited, outcome
from tests.faults.world import Report, Scenario, copy, differs, neither, snapshot, workplace


class Stage:
    """A scenario made ready: its template, its states before and after, and its calls."""

    def __init__(self, scenario: Scenario, place: Path) -> None:
        self.scenario = scenario
        self.template, self.world = place / "template", place / "world"
        self.template.mkdir()
        scenario.build(self.template)
        self.reset()
        self.before = snapshot(self.world)
        self.calls = count_calls(lambda: scenario.act(self.world))
        self.after = snapshot(self.world)

    def reset(self) -> None:
        copy(self.template, self.world)

    def act(self, fault: Fault | None = None) -> Outcome:
        return outcome(lambda: self.scenario.act(self.world), fault)

    def recover(self, fault: Fault | None = None) -> Outcome:
        with exited():
            return outcome(lambda: self.scenario.recover(self.world), fault)

    def read(self) -> str | None:
        """What a trainer that starts now finds wrong."""
        return self.scenario.read(self.world)


def sweep(
    scenario: Scenario, kinds: Sequence[str], sticky: Sequence[bool] = (False,), every: int = 1
) -> Report:
    """Each kind of fault at each call (or each `every`-th) of the scenario's command."""
    report = Report(scenario.name)
    with workplace() as place:
        stage = Stage(scenario, place)
        for kind, stays in product(kinds, sticky):
            for at in range(1, len(stage.calls) + 1, every):
                call = stage.calls[at - 1]
                if kind == "SHORT" and not call.startswith(("write", "copy")):
                    continue
                stage.reset()
                fault = Fault(kind, at, stays)
                ended = stage.act(fault)
                violation = stage.read() or _verdict(stage, ended)
                report.note(f"{fault} ({call}), exit {ended.code}", ended.code, violation)
    return report


def sweep_recovery(
    scenario: Scenario, kinds: Sequence[str], sticky: Sequence[bool] = (False,), every: int = 1
) -> Report:
    """Kill the command at each (or each `every`-th) call; put each kind of fault at each call of
    the recovery from that; then recover without faults."""
    report = Report(f"recovery of {scenario.name}")
    with workplace() as place:
        stage = Stage(scenario, place)
        for kill in range(1, len(stage.calls) + 1, every):
            stage.reset()
            stage.act(Fault("KILL", kill))
            killed = place / "killed"
            copy(stage.world, killed)
            calls = stage.recover().calls
            for kind, stays, at in product(kinds, sticky, range(1, calls + 1)):
                copy(killed, stage.world)
                fault = Fault(kind, at, stays)
                ended = stage.recover(fault)
                violation = stage.read()
                if ended.code in (0, 5, 130, KILLED):
                    violation = violation or recovered(stage)
                else:
                    violation = violation or f"exit {ended.code}: {ended.told}"
                point = f"killed at {kill}, {fault}, exit {ended.code}"
                report.note(point, ended.code, violation)
    return report


def recovered(stage: Stage) -> str | None:
    """Recover without faults: the world is as before or as after, and stays so."""
    ended = stage.recover()
    if ended.code != 0:
        return f"recover: exit {ended.code}: {ended.told}"
    found = snapshot(stage.world)
    violation = neither(found, stage.before, stage.after) or stage.read()
    if violation is None and differs(found, stage.before, times=False) is None:
        violation = differs(found, stage.before, times=True)
    if violation is not None:
        return f"after recover: {violation}"
    ended = stage.recover()
    if ended.code != 0 or snapshot(stage.world) != found:
        return f"a second recover: exit {ended.code} {ended.told}, or it changed something"
    return None


def _verdict(stage: Stage, ended: Outcome) -> str | None:
    """Whether the exit code says what is on disk; recovers where it says that this is needed."""
    found = snapshot(stage.world)
    if ended.code == 0:
        return differs(found, stage.after, times=False)
    if ended.code in (1, 130):
        return differs(found, stage.before, times=True)
    if ended.code in (5, KILLED):
        return recovered(stage)
    return f"exit code {ended.code}: {ended.told}"
