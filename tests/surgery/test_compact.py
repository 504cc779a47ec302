"""compact removes dead bytes and nothing else; hard-linked shards are replaced, not grown."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.compact import compact
from ckptsurgeon.plans.edits import Append, Replace
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.launch import first_line, launch
from tests.support.snapshot import snapshot
from tests.support.torch_files import load_shard, same, shards

QUIET = {"tensorboard": {"note": False}}


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    """A file system in memory counts the blocks of holes differently."""
    return on_disk


def operated(root: Path) -> Run:
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"set": {"lr": 5e-4}})))
    surgery.apply(run, plan(run, from_data({"reset": ["moments"], "set": {"beta1": 0.8}})))
    return run


def test_compact_keeps_every_value_and_drops_the_dead_bytes(trained: Trained) -> None:
    root = trained()
    before = {path.name: path.stat().st_size for path in shards(root)}
    run = operated(root)
    grown = snapshot(root)
    values = {path.name: load_shard(path) for path in shards(root)}
    promise = look.inspect(run).promise

    surgery.apply(run, surgery.plan_compact(run))

    for path in shards(root):
        assert path.stat().st_size <= before[path.name] + 64
        assert same(load_shard(path), values[path.name])
        assert same(load_shard(path, mmap=True), values[path.name])
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    assert look.inspect(run).promise == promise
    assert surgery.plan_compact(run).empty
    optimizer = shards(root)[1]
    assert optimizer.stat().st_blocks * 512 < before[optimizer.name] / 2  # zeros stay holes

    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == grown


def test_a_compacted_shard_can_be_operated_on_again(trained: Trained) -> None:
    root = trained()
    run = operated(root)
    surgery.apply(run, surgery.plan_compact(run))
    compacted = snapshot(root)
    wanted = plan(run, from_data({"set": {"beta2": 0.9, "lr": 1e-4}, **QUIET}))
    assert all(isinstance(edit, Append) for edit in wanted.edits)
    surgery.apply(run, wanted)
    assert '"betas": [0.8, 0.9]' in first_line(root)
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == compacted


def test_a_step_that_is_not_the_latest_is_compacted(trained: Trained) -> None:
    """The promise is that of the step, and not that of the latest one."""
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 4}, "reset": ["moments"]})))
    launch(f"--config={root / 'train.yaml'}", "train_iters=6")
    grown = snapshot(root)
    receipt = surgery.apply(run, surgery.plan_compact(run, 4))
    assert receipt.promise is not None and receipt.promise.step == 5
    assert surgery.plan_compact(run, 4).empty
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == grown


def test_a_run_without_dead_bytes_has_nothing_to_compact(trained: Trained) -> None:
    assert surgery.plan_compact(Run.open(trained(ranks=2))).empty


def test_a_file_over_4_gib_has_no_dead_bytes_until_it_is_edited(tmp_path: Path) -> None:
    """From there on torch's data descriptors have 24 bytes, whatever the size of the record."""
    path = tmp_path / "shard.pt"
    with torch.serialization.skip_data():
        tree = {"big": torch.empty((1 << 30) + 5), "small": torch.ones(3), "none": torch.empty(0)}
        torch.save(tree, path)
    archive = Archive.open(path)
    assert compact(archive, "shard.pt") is None
    assert max(record.offset for record in archive.records.values()) > 1 << 32
    ends = [record.offset for record in archive.records.values()]
    assert archive.directory is not None
    for name, end in zip(archive.records, [*ends[1:], archive.directory.offset], strict=True):
        record = archive.record(name)
        assert archive.payload(name) + record.size + archive.descriptor(name) == end


def test_a_hard_linked_backup_keeps_its_bytes(trained: Trained, tmp_path: Path) -> None:
    root = trained(ranks=2)
    backup = tmp_path / "backup"
    backup.mkdir()
    for path in shards(root):
        os.link(path, backup / path.name)
    before, kept = snapshot(root), snapshot(backup)
    run = Run.open(root)
    wanted = plan(run, from_data({"set": {"beta1": 0.5}, **QUIET}))
    edits = [edit for edit in wanted.edits if isinstance(edit, Replace)]
    # Both shards are replaced; the first is an empty file, which no reader takes, meanwhile.
    assert len(edits) == len(wanted.edits) == 3
    assert [edit.file for edit in edits] == [edits[0].file, edits[1].file, edits[0].file]
    assert edits[0].content is not None
    assert edits[0].content.size == 0
    surgery.apply(run, wanted)
    assert '"betas": [0.5, 0.95]' in first_line(root, ranks=2)
    assert snapshot(backup) == kept
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before
    assert snapshot(backup) == kept
