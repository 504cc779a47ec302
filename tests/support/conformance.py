"""Laws that hold for every format: what a caller may count on, whatever the trainer.

Each law takes a run of at least one complete step that nobody else uses, and may change it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.pickles.tree import Object, Tensor
from ckptsurgeon.formats import FIELDS, Checkpoint, Part, Place, capabilities
from ckptsurgeon.formats.capabilities import Capability, NamesMoments, blobs
from ckptsurgeon.formats.detect import detect
from ckptsurgeon.formats.layout import CleansUp, HasHazards
from ckptsurgeon.formats.step_folders import number_of
from ckptsurgeon.formats.tensors.stretches import by_parameter
from ckptsurgeon.formats.tensors.strips import strips
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction.home import HOME

PROMISED = {"betas": tuple, "eps": float, "loss_scale": float, "consumed_samples": int}
"""Fields that the next step takes from one place, as a promise has them."""
EDITS: tuple[Mapping[str, Any], ...] = (
    {"set": {"eps": 1e-6}},
    {"set": {"lr": "0.5x"}},
    {"set": {"loss_scale": 256}},
    {"set": {"consumed_samples": 123}},
    {"reset": ["moments"]},
)


def it_is_recognized(root: Path) -> None:
    run = Run.open(root)
    assert run.format.recognizes(root)
    found = detect(root)
    assert found is not None and found.name == run.format.name


def steps_ascend_and_have_folders_and_files(root: Path) -> None:
    run = Run.open(root)
    steps = run.format.steps(root)
    assert steps and steps == sorted(set(steps))
    for step in steps:
        files = run.format.files(root, step)
        assert files == sorted(set(files)) and all(file.is_file() for file in files)
        assert run.format.directory(root, step).is_dir()
        entries = run.format.entries(root, step)
        assert entries and all(entry.exists() for entry in entries)
        for file in {*run.checkpoint(step).archives, *run.checkpoint(step).trees}:
            assert file in files


def entries_of_one_step_are_of_no_other(root: Path) -> None:
    run = Run.open(root)
    owners: dict[Path, int] = {}
    for step in run.format.steps(root):
        for entry in run.format.entries(root, step):
            assert owners.setdefault(entry, step) == step


def a_step_that_left_is_found_by_its_name(root: Path) -> None:
    run = Run.open(root)
    for step in run.format.steps(root):
        assert step in {number_of(entry.name) for entry in run.format.entries(root, step)}


def a_step_is_meant_by_each_of_its_names(root: Path) -> None:
    """Of its folder or files, and of a copy of it that a restart loads; the run's own is none."""
    run = Run.open(root)
    for step in run.format.steps(root):
        assert {run.step(str(entry)) for entry in run.format.entries(root, step)} <= {step}
    for pointer in run.format.pointer_files(root):
        named = run.format.pointed(pointer)
        if named in run.format.steps(root):
            assert run.step(str(pointer)) == named
    with pytest.raises(UsageError):
        run.step(str(root))


def a_step_without_a_shard_is_not_complete(root: Path) -> None:
    """What is complete is read; without any one shard it is not complete, or read all the same."""
    run = Run.open(root)
    step = run.format.steps(root)[-1]
    assert run.format.missing(root, step) == []
    for shard in sorted(run.checkpoint(step).archives):
        away = root.parent / "away"
        shard.rename(away)
        try:
            if step in run.format.steps(root) and not run.format.missing(root, step):
                Run.open(root).checkpoint(step).contradictions()
        finally:
            away.rename(shard)
    assert run.format.missing(root, step) == []


def places_are_in_files_and_read_as_their_value(root: Path) -> None:
    run, checkpoint = opened(root)
    files = run.format.files(root, checkpoint.step)
    for field in FIELDS:
        for place in checkpoint.locate(field):
            assert place.file in files, field
            joined = field == "scheduler"  # it may be flattened, one value for each key
            if place.path and not joined and not isinstance(place.value, (Tensor, Object)):
                assert checkpoint.value(place.file, place.path) == place.value, field


def the_places_that_win_are_what_the_next_step_uses(root: Path) -> None:
    _, checkpoint = opened(root)
    promise = checkpoint.state().promise
    for field, kind in PROMISED.items():
        wins = [place.value for place in checkpoint.locate(field) if place.wins]
        if wins and promise.groups is None:
            assert kind(wins[0]) == getattr(promise, field), field
    rates = [place.value for place in checkpoint.locate("lr") if place.wins]
    if promise.lr is not None and rates and not checkpoint.locate("rewarm"):
        assert any(abs(promise.lr - rate) <= 1e-9 for rate in rates) or checkpoint.locate("max_lr")


def what_is_saved_does_not_contradict_itself(root: Path) -> None:
    run = Run.open(root)
    for step in run.steps():
        assert run.checkpoint(step).contradictions() == []
        assert run.format.strays(root, step) == []


def parts_lie_apart_in_tensors_of_the_step(root: Path) -> None:
    """No element is of two parameters, and no element of a parameter is twice in one file."""
    run, checkpoint = opened(root)
    parts = known(checkpoint)
    files = run.format.files(root, checkpoint.step)
    taken: dict[tuple[Path, Any], list[tuple[int, int]]] = {}
    for part in parts:
        assert part.place.file in files
        assert 0 <= part.start < part.end <= part.place.value.numel
        taken.setdefault((part.place.file, part.place.path), []).append((part.start, part.end))
        file, first, last = checkpoint.span(part.place, part.start, part.end)
        assert 0 <= first < last <= file.stat().st_size
    for spans in taken.values():
        assert apart(spans)
    for kinds in by_parameter(parts).values():
        for stretches in kinds.values():
            for file in {part.place.file for part in stretches}:
                mine = [part for part in stretches if part.place.file == file]
                assert apart([(p.first, p.first + p.end - p.start) for p in mine])


def parts_say_where_they_are_in_the_whole(root: Path) -> None:
    """Where the geometry is given: the box is inside the whole, and holds what its cut has."""
    _, checkpoint = opened(root)
    for part in known(checkpoint):
        if part.box is None:
            continue
        box = part.box
        assert len(box.whole) == len(box.offset) == len(box.size)
        ends = (at + size for at, size in zip(box.offset, box.size, strict=True))
        assert all(end <= whole for end, whole in zip(ends, box.whole, strict=True))
        assert part.first + part.end - part.start <= box.numel


def moments_by_parameter_are_all_that_are_located(root: Path) -> None:
    _, checkpoint = opened(root)
    able = NamesMoments.optional(checkpoint)
    for name in ("exp_avg", "exp_avg_sq"):
        try:
            found = able.fragments(name) if able is not None else []
        except SurgeryError as error:
            assert error.next
            continue
        if found:
            located = {(place.file, place.path) for place in checkpoint.locate(name)}
            assert {(part.place.file, part.place.path) for part in found} == located


def what_it_cannot_do_is_refused_in_one_wording(root: Path) -> None:
    _, checkpoint = opened(root)
    for kind in kinds():
        able = kind.optional(checkpoint)
        if able is None:
            with pytest.raises(SurgeryError, match=" does not say ") as error:
                kind.of(checkpoint)
            assert not kind.unsaid or error.value.next
        else:
            assert able is checkpoint


def pointers_that_are_written_are_read_back(root: Path) -> None:
    """By a rollback to each step: it is the newest, and what a restart finds."""
    for step in reversed(Run.open(root).steps()):
        run = Run.open(root)
        surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": step}})))
        now = Run.open(root)
        assert now.steps()[-1] == now.latest() == step
        for path, text in now.format.pointers(root, step).items():
            assert isinstance(text, Path) or now.format.pointed(path) == step
        assert {now.format.pointed(p) for p in now.format.pointer_files(root)} <= {step, None}


def what_will_be_is_what_is_read_after_it_was_applied(root: Path) -> None:
    """`after` the changes of a plan is the checkpoint that the disk then has."""
    done = 0
    for recipe in EDITS:
        run, checkpoint = opened(root)
        try:
            plan = surgery.plan(run, from_data(recipe))
        except (SurgeryError, UsageError):
            continue
        ahead = checkpoint.after(plan.changes, root)
        promise, fields = ahead.state().promise, {field: plain(ahead, field) for field in FIELDS}
        surgery.apply(run, plan)
        _, now = opened(root)
        assert promise == now.state().promise
        for field in FIELDS:
            assert fields[field] == plain(now, field), (recipe, field)
        done += 1
    assert done


def a_reset_hides_no_weights_of_a_parameter(root: Path) -> None:
    """What is read side by side with moments of zeros is what was with those that were trained."""
    run, checkpoint = opened(root)
    trained = with_weights(checkpoint)
    try:
        plan = surgery.plan(run, from_data({"reset": ["moments"]}))
    except (SurgeryError, UsageError):
        return
    receipt = surgery.apply(run, plan)
    assert with_weights(opened(root)[1]) == trained
    surgery.apply(run, surgery.plan_undo(Run.open(root), receipt.id))


def what_left_has_no_name_of_a_step(root: Path) -> None:
    """Where a loader may look into the folders below its own, it finds no step in an attic."""
    run = Run.open(root)
    first, *later = run.format.steps(root)
    if not isinstance(run.format, CleansUp) or not later:
        return
    names = {e.name for step in later for e in run.format.entries(root, step)}
    receipt = surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": first}})))
    looked_for = {re.sub(r"\d+", "*", name) for name in names}
    assert not [path for name in looked_for for path in (root / HOME).rglob(name)]
    surgery.apply(run, surgery.plan_undo(Run.open(root), receipt.id))
    assert {*later} < {*Run.open(root).format.steps(root)}


def archives_inside_lie_in_files_of_the_step(root: Path) -> None:
    run, checkpoint = opened(root)
    files = run.format.files(root, checkpoint.step)
    for blob in blobs(checkpoint):
        assert blob.file in files
        assert 0 <= blob.start < blob.start + blob.length <= blob.file.stat().st_size


def what_its_trainer_saved_is_healthy(root: Path) -> None:
    """Doctor finds what the format itself warns of, and nothing else."""
    run = Run.open(root)
    warned = run.format.hazards(run.root) if isinstance(run.format, HasHazards) else []
    assert [finding.what for finding in diagnose(run)] == [hazard[0] for hazard in warned]


LAWS: tuple[Callable[[Path], None], ...] = (
    it_is_recognized,
    steps_ascend_and_have_folders_and_files,
    entries_of_one_step_are_of_no_other,
    a_step_that_left_is_found_by_its_name,
    a_step_is_meant_by_each_of_its_names,
    a_step_without_a_shard_is_not_complete,
    places_are_in_files_and_read_as_their_value,
    the_places_that_win_are_what_the_next_step_uses,
    what_is_saved_does_not_contradict_itself,
    parts_lie_apart_in_tensors_of_the_step,
    parts_say_where_they_are_in_the_whole,
    moments_by_parameter_are_all_that_are_located,
    what_it_cannot_do_is_refused_in_one_wording,
    archives_inside_lie_in_files_of_the_step,
    what_its_trainer_saved_is_healthy,
    a_reset_hides_no_weights_of_a_parameter,
    what_will_be_is_what_is_read_after_it_was_applied,
    pointers_that_are_written_are_read_back,
)
"""In this order: the last three change the run."""


def opened(root: Path) -> tuple[Run, Checkpoint]:
    """The run, read anew, and the step that it resumes at."""
    run = Run.open(root)
    return run, run.checkpoint(run.latest())


def known(checkpoint: Checkpoint) -> list[Part]:
    """What can be edited; none where that is refused, with a remedy."""
    try:
        return checkpoint.parts()
    except SurgeryError as error:
        assert error.next
        return []


def with_weights(checkpoint: Checkpoint) -> set[str]:
    """The parameters whose weights or masters lie in a strip."""
    kept = {"weights", "master"}
    return {strip.parameter for strip in strips(checkpoint) if kept & strip.tensors.keys()}


def apart(spans: list[tuple[int, int]]) -> bool:
    """Whether none of them overlap."""
    spans = sorted(spans)
    return all(one[1] <= other[0] for one, other in pairwise(spans))


def plain(checkpoint: Checkpoint, field: str) -> list[tuple[Any, ...]]:
    """The values of a field that are no tensors, by their places."""

    def shown(place: Place) -> Any:
        return "a tensor" if isinstance(place.value, Tensor) else place.value

    return [(place.file, place.path, shown(place)) for place in checkpoint.locate(field)]


def kinds() -> Iterator[type[Capability]]:
    """Every capability."""
    for _, kind in inspect.getmembers(capabilities, inspect.isclass):
        if issubclass(kind, Capability) and kind is not Capability:
            yield kind
