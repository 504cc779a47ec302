"""Killed or refused by the disk at any call of a surgery that computes bytes as it stages them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.faults.inject import KILLED
from tests.faults.surgeries import scenarios
from tests.faults.sweep import faults, faults_in_recovery, reports
from tests.support.deepspeed_engine import Options, make, process_group

AVERAGE = {"average": {"last": 2}, "tensorboard": {"note": False}}
PRECISION = {"precision": {"to": "bf16"}, "tensorboard": {"note": False}}
Reader = Callable[[list[list[int]], Path], str | None]
"""Of a world, with what is right: what a trainer would find wrong."""


DENSITY = [pytest.param(18, id="thin"), pytest.param(1, id="dense", marks=pytest.mark.slow)]
"""`make test` tries every 18th of the calls that `make nightly` tries."""


@pytest.mark.parametrize("every", DENSITY)
@pytest.mark.long
def test_an_average_is_before_or_after(trained: Trained, every: int) -> None:
    """Weights and masters lie in two files: a load finds both old, both new, or no file to load."""
    original = trained(zero=1, dtype="bf16")
    after = _after(original, AVERAGE)
    states = [_state(original), _state(after)]
    assert states[0] != states[1] and all(states)
    apply, undo, _ = scenarios(original, AVERAGE, partial(_read, states))
    found = reports(
        (apply, faults, ("KILL",), (False,), 2 * every),
        (undo, faults, ("KILL",), (False,), 4 * every),
        (apply, faults, ("ENOSPC",), (False,), 9 * every),
        (apply, faults_in_recovery, ("KILL",), (False,), 40 * min(every, 6)),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    assert sum(report.points for report in found) >= 60 // every


@pytest.mark.slow
@pytest.mark.parametrize("every", DENSITY)
def test_another_precision_is_before_or_after(trained: Trained, every: int) -> None:
    """The shards get other names: an engine of either precision finds its own state, or no file to
    load; never the weights of one with the masters or the loss scaler of the other."""
    original = trained(zero=1, dtype="fp32")
    after = _after(original, PRECISION)
    before, then = _of_engines(original), _of_engines(after)
    assert [bool(state) for state in (*before, *then)] == [True, False, False, True]
    read = partial(_read_engines, [before[0], then[1]])
    apply, undo, _ = scenarios(original, PRECISION, read)
    found = reports(
        (apply, faults, ("KILL",), (False,), 3 * every),
        (undo, faults, ("KILL",), (False,), 4 * every),
        (apply, faults, ("ENOSPC",), (False,), 12 * every),
        (apply, faults_in_recovery, ("KILL",), (False,), 40 * min(every, 6)),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    assert sum(report.points for report in found) >= 40 // every


EVERY = [pytest.param(45, id="thin"), pytest.param(1, id="dense", marks=pytest.mark.slow)]
"""`make nightly` tries every call, `make test` every 45th."""


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.long
def test_a_transplant_is_before_or_after(trained: Trained, tmp_path: Path, every: int) -> None:
    """The step that `latest` names is the old one or the new one, whole; the event files, too."""
    source = trained(zero=1, dtype="bf16").rename(tmp_path / "source")
    original = trained(zero=2, dtype="bf16")
    for step in (4, 6, 8):
        shutil.rmtree(original / f"global_step{step}")
    for name, text in (("latest", "global_step2"), ("latest_checkpointed_iteration.txt", "2")):
        (original / name).write_text(text)
    recipe = {
        "transplant": {"source": str(source), "step": 8, "logs": True},
        "tensorboard": {"note": False},
    }  # fmt: skip
    _refuse_mixes(original, recipe, every)


@pytest.mark.formats
@pytest.mark.parametrize("every", EVERY)
def test_a_transplant_into_codes_is_before_or_after(tmp_path: Path, every: int) -> None:
    """Codes of 8 bits and their scales are in one file, as a mix of both would be numbers too."""
    plain = Options(model="wide")
    with process_group():
        make(tmp_path / "source", plain)
        make(tmp_path / "run", replace(plain, optimizer="adamw8bit"), 1)
    recipe = {"transplant": {"source": str(tmp_path / "source")}, "tensorboard": {"note": False}}
    _refuse_mixes(tmp_path / "run", recipe, every)


@pytest.mark.slow
@pytest.mark.parametrize("every", EVERY)
def test_a_transplant_of_experts_in_the_old_layout_is_before_or_after(
    tmp_path: Path, every: int
) -> None:
    """Two expert ranks of Megatron's legacy files become four, each with a file of its own."""
    from tests.support.legacy_experts import EXPERT, saved, spread

    for name, step, ranks in (("source", 20, 2), ("run", 1, 4)):
        saved(tmp_path / name, step, spread(step, 4, ranks, EXPERT))
    recipe = {"transplant": {"source": str(tmp_path / "source")}, "tensorboard": {"note": False}}
    _refuse_mixes(tmp_path / "run", recipe, every)


@pytest.mark.slow
@pytest.mark.parametrize("every", EVERY)
def test_a_reset_of_experts_in_the_old_layout_is_before_or_after(
    tmp_path: Path, every: int
) -> None:
    """Four expert ranks of Megatron's legacy files have all their moments or none, or one of them
    has no file to load."""
    from tests.support.legacy_experts import EXPERT, saved, spread

    saved(tmp_path / "run", 20, spread(20, 4, 4, EXPERT))
    recipe = {"reset": ["moments"], "tensorboard": {"note": False}}
    _refuse_mixes(tmp_path / "run", recipe, every, _read_ranks)


def _refuse_mixes(
    original: Path, recipe: dict[str, Any], every: int, read: Reader | None = None
) -> None:
    """Sweep a surgery and its undo: after each kill, full disk and recovery the step that `latest`
    names is that of before or of after, as `read` sees it."""
    states = [_named(original), _named(_after(original, recipe))]
    assert states[0] != states[1] and all(states)
    apply, undo, _ = scenarios(original, recipe, partial(read or _read_named, states))
    found = reports(
        (apply, faults, ("KILL",), (False,), every),
        (undo, faults, ("KILL",), (False,), 2 * every),
        (apply, faults, ("ENOSPC",), (False,), 4 * every),
        (apply, faults_in_recovery, ("KILL",), (False,), 20 * min(every, 15)),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    assert sum(report.points for report in found) >= 80 // every


def _named(root: Path) -> list[int]:
    """The CRCs of all tensors of the step that `latest` names, or Megatron's pointer, with its
    number."""
    if (root / "latest").exists():
        folder = root / (root / "latest").read_text()
    else:
        step = int((root / "latest_checkpointed_iteration.txt").read_text())
        folder = root / f"iter_{step:07d}"
    files = sorted(folder.rglob("*.pt"))
    records = [Archive.open(file).records for file in files]
    crcs = [r.crc for each in records for n, r in sorted(each.items()) if n.startswith("data/")]
    return [int(folder.name.rpartition("_")[2].removeprefix("step")), len(files), *crcs]


def _read_named(states: list[list[int]], world: Path) -> str | None:
    return None if _named(world / "run") in states else "latest names a step that is a mix"


def _read_ranks(states: list[list[int]], world: Path) -> str | None:
    """A step that lacks a file is loaded by no trainer."""
    try:
        found = _named(world / "run")
    except DamagedFile:
        return None
    mixed = found[1] == states[0][1] and found not in states
    return "some ranks have moments of one state, some of the other" if mixed else None


def _after(original: Path, recipe: dict[str, Any]) -> Path:
    """A copy of the run on which the surgery was done."""
    root = original.with_name("after")
    shutil.copytree(original, root, symlinks=True)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data(recipe)))
    return root


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
