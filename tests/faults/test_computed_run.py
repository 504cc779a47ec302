"""Killed or refused by the disk at any call of a surgery that computes bytes as it stages them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.faults.inject import KILLED
from tests.faults.sweep import faults, faults_in_recovery, reports
from tests.faults.world import Scenario

AVERAGE = from_data({"average": {"last": 2}, "tensorboard": {"note": False}})
PRECISION = from_data({"precision": {"to": "bf16"}, "tensorboard": {"note": False}})
KEYS = ("single_partition_of_fp32_groups", "module")


def test_an_average_is_before_or_after(trained: Trained) -> None:
    """Weights and masters lie in two files: a load finds both old, both new, or no file to load."""
    original = trained(zero=1, dtype="bf16")
    after = original.with_name("after")
    shutil.copytree(original, after, symlinks=True)
    surgery.apply(Run.open(after), plan(Run.open(after), AVERAGE))
    states = [_state(original), _state(after)]
    assert states[0] != states[1] and all(states)
    recover = partial(_in_run, surgery.recover)
    read = partial(_read, states)
    apply = Scenario("apply", partial(_build, original), partial(_in_run, _average), recover, read)
    undo = Scenario("undo", partial(_build, after), partial(_in_run, _undo), recover, read)
    found = reports(
        (apply, faults, ("KILL",), (False,), 2),
        (undo, faults, ("KILL",), (False,), 4),
        (apply, faults, ("ENOSPC",), (False,), 9),
        (apply, faults_in_recovery, ("KILL",), (False,), 40),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    assert sum(report.points for report in found) >= 60


def test_another_precision_is_before_or_after(trained: Trained) -> None:
    """The shards get other names: an engine of either precision finds its own state, or no file to
    load; never the weights of one with the masters or the loss scaler of the other."""
    original = trained(zero=1, dtype="fp32")
    after = original.with_name("after")
    shutil.copytree(original, after, symlinks=True)
    surgery.apply(Run.open(after), plan(Run.open(after), PRECISION))
    before, then = _of_engines(original), _of_engines(after)
    assert [bool(state) for state in (*before, *then)] == [True, False, False, True]
    recover = partial(_in_run, surgery.recover)
    read = partial(_read_engines, [before[0], then[1]])
    apply = Scenario("apply", partial(_build, original), partial(_in_run, _to_bf16), recover, read)
    undo = Scenario("undo", partial(_build, after), partial(_in_run, _undo), recover, read)
    found = reports(
        (apply, faults, ("KILL",), (False,), 3),
        (undo, faults, ("KILL",), (False,), 4),
        (apply, faults, ("ENOSPC",), (False,), 12),
        (apply, faults_in_recovery, ("KILL",), (False,), 40),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    assert sum(report.points for report in found) >= 40


def _of_engines(root: Path) -> list[list[int] | None]:
    """What engines of fp32 and of bf16 load of step 8, by the CRCs; None where a file lacks."""
    states: list[list[int] | None] = []
    for prefix in ("", "bf16_"):
        names = ("mp_rank_00_model_states.pt", f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt")
        files = [root / "global_step8" / name for name in names]
        try:
            opened = [Archive.open(file) for file in files]
        except (DamagedFile, FileNotFoundError):
            states.append(None)
        else:
            records = [archive.records for archive in opened]
            states.append([each[name].crc for each in records for name in sorted(each)])
    return states


def _read_engines(states: list[list[int] | None], world: Path) -> str | None:
    found = _of_engines(world / "run")
    wrong = [name for name, one, own in zip(("fp32", "bf16"), found, states, strict=True)
             if one not in (None, own)]  # fmt: skip
    return f"an engine of {wrong[0]} loads a mix" if wrong else None


def _build(original: Path, world: Path) -> None:
    shutil.copytree(original, world / "run", symlinks=True)


def _in_run(act: object, world: Path) -> None:
    assert callable(act)
    act(Run.open(world / "run"))


def _average(run: Run) -> None:
    surgery.apply(run, plan(run, AVERAGE), jobs=1)


def _to_bf16(run: Run) -> None:
    surgery.apply(run, plan(run, PRECISION), jobs=1)


def _undo(run: Run) -> None:
    surgery.apply(run, surgery.plan_undo(run), jobs=1)


def _state(root: Path) -> list[int]:
    """The CRCs of all tensors of step 8, file by file."""
    out = []
    for file in sorted((root / "global_step8").glob("*.pt")):
        records = Archive.open(file).records
        out += [record.crc for name, record in sorted(records.items()) if name.startswith("data/")]
    return out


def _read(states: list[list[int]], world: Path) -> str | None:
    try:
        found = _state(world / "run")
    except DamagedFile:
        return None
    return None if found in states else "weights of one state, masters of the other"
