"""With `logs` a transplant brings the curves of the source up to its step, and takes them back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ckptsurgeon import Plan, Run, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.event_logs import LOSS, write_log
from tests.support.launch import launch
from tests.support.snapshot import exact_snapshot, snapshot

QUIET = {"tensorboard": {"note": False}}


def pair(trained: Trained, folder: Path) -> tuple[Path, Path]:
    """A run that is filled, whose one step is 2, and the source, which has also 4, 6 and 8."""
    source = trained(zero=1).rename(folder / "source")
    run = trained(zero=2)
    for step in (4, 6, 8):
        shutil.rmtree(run / f"global_step{step}")
    for name, text in (("latest", "global_step2"), ("latest_checkpointed_iteration.txt", "2")):
        (run / name).write_text(text)
    return run, source


def carried_out(root: Path, recipe: dict[str, Any]) -> Plan:
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    return made


def filled(run: Path, source: Path, step: int, note: bool = False) -> Plan:
    more = {} if note else QUIET
    return carried_out(
        run, {"transplant": {"source": str(source), "step": step, "logs": True}, **more}
    )


def events(root: Path) -> dict[str, bytes]:
    """Every event file outside the attic, by its path."""
    files = [file for file in root.rglob("*tfevents*") if ".ckptsurgeon" not in file.parts]
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


def curve(folder: Path) -> list[tuple[int, float]]:
    """The loss as TensorBoard shows it."""
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    return [(event.step, event.tensor_proto.float_val[0]) for event in found.Tensors(LOSS)]


@pytest.mark.parametrize("step", [2, 4, 8])
def test_the_events_are_those_that_a_rollback_of_the_source_leaves(
    trained: Trained, tmp_path: Path, step: int
) -> None:
    """Byte for byte; the run's own are gone, and an undo brings them back."""
    run, source = pair(trained, tmp_path)
    back = Path(shutil.copytree(source, tmp_path / "back", symlinks=True))
    if step < 8:
        carried_out(back, {"rollback": {"to": step}, "tensorboard": {"keep": False, "note": False}})
    before, untouched, own = snapshot(run), exact_snapshot(source), events(run)
    filled(run, source, step)
    assert exact_snapshot(source) == untouched
    assert events(run) == events(back) != own
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert events(run) == events(back)


def test_the_curve_goes_on_where_that_of_the_source_was(trained: Trained, tmp_path: Path) -> None:
    run, source = pair(trained, tmp_path)
    (folder,) = {file.parent for file in source.rglob("*tfevents*")}
    known = curve(folder)
    filled(run, source, 6, note=True)
    launch(f"--config={run / 'train.yaml'}", f"save={run}", "train_iters=8", "zero_stage=2")
    shown = curve(run / folder.relative_to(source))
    assert [step for step, _ in shown] == list(range(1, 9))
    assert shown[:6] == known[:6]


def test_each_folder_of_the_source_gets_its_own(trained: Trained, tmp_path: Path) -> None:
    """And a later rollback cuts all of them, though no trainer wrote in one."""
    run, source = pair(trained, tmp_path)
    (folder,) = {file.parent.relative_to(source) for file in source.rglob("*tfevents*")}
    write_log(source / folder / "eval", [3.0, 2.0, 1.0, 0.5], at=[2, 4, 6, 8], tag="eval")
    made = filled(run, source, 6)
    assert not [text for text in made.warnings if "log" in text or "event" in text]
    found = EventAccumulator(str(run / folder / "eval")).Reload()
    assert [event.step for event in found.Scalars("eval")] == [2, 4, 6]
    assert {str(Path(name).parent) for name in events(run)} == {str(folder), f"{folder}/eval"}
    assert len(Run.open(run).logs.folders()) == 2
    assert filled(run, source, 6).edits  # once more: its event files are there already
    assert len(events(run)) == 2


def test_a_source_without_events_takes_none_away(trained: Trained, tmp_path: Path) -> None:
    run, source = pair(trained, tmp_path)
    for file in source.rglob("*tfevents*"):
        file.unlink()
    own = events(run)
    made = filled(run, source, 6)
    assert any("no logs are copied" in text for text in made.warnings)
    assert events(run) == own


def test_damaged_events_of_the_source_are_refused(trained: Trained, tmp_path: Path) -> None:
    run, source = pair(trained, tmp_path)
    (file,) = source.rglob("*tfevents*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    before = exact_snapshot(run)
    with pytest.raises(SurgeryError, match=file.name):
        filled(run, source, 6)
    assert exact_snapshot(run) == before


def test_another_change_of_the_event_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="change the event files"):
        from_data({"transplant": {"source": "old", "logs": True}, "tensorboard": {"after": 3}})
    from_data({"transplant": {"source": "old"}, "tensorboard": {"after": 3}})
