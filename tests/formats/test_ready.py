"""What `ready` calls sound is sound, and what it repairs is loaded next: every format of the table,
with saves torn by a crash."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.guard.ready import decide
from ckptsurgeon.look.ready import shadows
from tests.formats.matrix import FORMATS
from tests.support import megatron_dist
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]

TORN = (
    "newest cut",
    "cut",
    "removed",
    "renamed",
    "pointer astray",
    "pointer removed",
    "pointer to the newest",
)
EXAMPLES = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def tear(root: Path, how: str, which: int) -> None:
    """Leave one file as a crash may leave it."""
    run = Run.open(root)
    pointers = [path for path in run.format.pointer_files(root) if path.is_file()]
    files = sorted({path for step in run.steps() for path in run.format.files(root, step)})
    of = pointers if how.startswith("pointer") else files
    if not of:
        return
    path = of[which % len(of)]
    if how == "newest cut":  # that of the step which the start loads
        there = [path for path in run.format.files(root, run.latest()) if path.is_file()]
        path, how = max(there, key=lambda path: path.stat().st_size, default=path), "cut"
    if not path.is_file():
        return  # it went before
    if how == "cut":
        os.truncate(path, path.stat().st_size * (which % 7) // 8)
    elif how in ("removed", "pointer removed"):
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name(f"{path.name}.tmp"))
    elif path.stat().st_size < 100 and not path.is_symlink():
        step = str(run.steps()[-1] if how.endswith("newest") else 7 * which)
        path.write_text(re.sub(r"\d+(?!.*\d)", step, path.read_text()))


def holds(root: Path, level: int) -> str:
    """The law; what became of the run."""
    try:
        run = Run.open(root)
    except (UsageError, SurgeryError):
        return "no run"
    before, named = snapshot(root), run.pointers()
    seen = decide(run, level)
    assert snapshot(root) == before
    if seen.ready:
        sound(root, seen.step, level)
        assert seen.path is not None and seen.path.exists()
        assert run.pointers() == named
        return "ready"
    try:
        repaired = decide(Run.open(root), level, repair=True)
    except SurgeryError:
        assert snapshot(root) == before
        return "refused"
    if repaired.receipt is None:
        assert not repaired.ready and snapshot(root) == before
        return "not ready"
    assert repaired.ready and repaired.step == seen.sound is not None
    sound(root, repaired.step, level)
    assert all(step is None or step >= seen.sound for step in named.values())
    assert decide(Run.open(root), level, repair=True).receipt is None
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before
    return "repaired"


def sound(root: Path, step: int | None, level: int) -> None:
    """The start loads `step`, and `verify` has nothing against it."""
    run = Run.open(root)
    assert run.latest() == step is not None
    assert look.verify(run, level=level).findings == ()
    assert shadows(run, step) == []


@pytest.mark.thinned(5)
@pytest.mark.parametrize("examples", [1, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_a_torn_run_is_not_ready_or_names_a_sound_step(
    run_of: Callable[[str], Path], tmp_path: Path, name: str, examples: int
) -> None:
    original = run_of(name)
    assert holds(Path(shutil.copytree(original, tmp_path / "whole", symlinks=True)), 2) == "ready"
    ends: list[str] = []

    @settings(EXAMPLES, max_examples=examples)
    @example([("newest cut", 0)], 2)
    @example([("removed", 3)], 2)
    @example([("removed", 96)], 0)
    @example([("removed", 1), ("newest cut", 0)], 0)
    @given(st.lists(st.tuples(st.sampled_from(TORN), st.integers(0, 200)), min_size=1, max_size=2),
           st.sampled_from((0, 2)))  # fmt: skip
    def law(torn: Any, level: int) -> None:
        root = Path(shutil.copytree(original, tmp_path / "run", symlinks=True))
        try:
            for how, which in torn:
                try:
                    tear(root, how, which)
                except SurgeryError:
                    break  # it is torn beyond being a run
            ends.append(holds(root, level))
        finally:
            shutil.rmtree(root)

    law()
    assert "repaired" in ends, ends


# --- what a trainer would load in place of the step that the pointers name -----------------------


def test_a_newer_checkpoint_of_another_tier_is_not_ready_and_stays(tmp_path: Path) -> None:
    """It may be the better one: a person says so."""
    flags: dict[str, Any] = {
        "non_persistent_ckpt_type": "local",
        "non_persistent_local_ckpt_dir": "local",
    }
    root = megatron_dist.save(tmp_path / "run", **flags)
    step = decide(Run.open(root), 2).step
    assert step is not None
    (root / "local/0").mkdir(parents=True)
    (root / f"local/0/iter_{step + 10:07d}_0_local.pt").write_bytes(b"state")
    before = snapshot(root)
    seen = decide(Run.open(root), 2, repair=True)
    assert not seen.ready and "local checkpoints up to" in seen.found[-1].what
    assert snapshot(root) == before


def test_a_higher_name_that_torchtitan_takes_for_a_step_is_not_ready(
    run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(run_of("torchtitan (DCP)"), tmp_path / "run"))
    shutil.copytree(root / "step-6", root / "old-step-9")
    seen = decide(Run.open(root), 2)
    assert not seen.ready and "rollback --to 6" in str(seen.next)


def test_a_higher_folder_that_the_trainer_would_resume_goes_to_the_attic(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (2, 4))
    (root / "checkpoint-9").mkdir()
    (root / "checkpoint-9/trainer_state.json").write_text("{")
    assert holds(root, 0) == holds(root, 2) == "repaired"
