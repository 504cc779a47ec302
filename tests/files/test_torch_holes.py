"""A shard that is replaced, not appended to, gets holes where its moments become zeros."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.append import render
from ckptsurgeon.plans.as_json import from_json, to_json
from ckptsurgeon.plans.edits import ZEROS, Change, Content, Hole, Replace
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.transaction import journal, receipts
from tests.support.torch_files import STATE, frozen, load, plain_shard, save

STAGED, KEPT = (f".ckptsurgeon/{folder}/0001/shard.pt" for folder in ("staging", "attic"))
NUMEL = 1 << 19
MOMENTS = [(*STATE, group, name) for group in (0, 1) for name in ("exp_avg", "exp_avg_sq")]
CHANGES = [Change("shard.pt", path[-1], "values", ZEROS, path) for path in MOMENTS]


def plan(root: Path, content: Content) -> Plan:
    edit = Replace(
        "shard.pt",
        ".ckptsurgeon/staging/0001/shard.pt",
        ".ckptsurgeon/attic/0001/shard.pt",
        content,
    )
    return Plan("0001", str(root), "reset", {}, tuple(CHANGES), (edit,), (), None)


@pytest.mark.parametrize("why", ["linked", "read-only", "strict", "legacy"])
@pytest.mark.long
def test_zeroed_moments_take_no_room_in_a_replaced_shard(tmp_path: Path, why: str) -> None:
    path = tmp_path / "shard.pt"
    save(plain_shard(numel=NUMEL), path, _use_new_zipfile_serialization=why != "legacy")
    before = load(path)
    if why == "linked":
        os.link(path, tmp_path / "other.pt")
    elif why == "read-only":
        path.chmod(0o444)
    content = render(path, "shard.pt", CHANGES, strict=why == "strict")
    assert isinstance(content, Content)
    zeros = sum(piece.size for piece in content.pieces if isinstance(piece, Hole))
    assert zeros == len(MOMENTS) * NUMEL * 4 == 8 << 20
    assert from_json(json.loads(json.dumps(content, default=to_json))) == content
    old = path.stat()
    journal.commit(tmp_path, plan(tmp_path, content))
    new = path.stat()
    assert new.st_ino != old.st_ino
    if old.st_blocks * 512 >= old.st_size:  # a file system that says what a file takes
        assert new.st_blocks * 512 < old.st_blocks * 512 - zeros + (1 << 20)
    for path_in_tree in MOMENTS:
        state = before
        for key in path_in_tree[:-1]:
            state = state[key]
        state[path_in_tree[-1]].zero_()
    assert frozen_small(load(path)) == frozen_small(before)


def frozen_small(tree: object) -> object:
    """As `frozen`, with a long tensor as the set of its bytes."""
    assert isinstance(tree, dict)
    states = tree["optimizer_state_dict"]["base_optimizer_state"]["state"]
    for state in states.values():
        for name, tensor in list(state.items()):
            state[name] = (tuple(tensor.shape), sorted(set(tensor.flatten().tolist()))[:9])
    return frozen(tree)


def test_a_hole_is_zeros_at_any_place_in_a_new_file(tmp_path: Path) -> None:
    source = bytes(range(256)) * 40
    (tmp_path / "shard.pt").write_bytes(source)
    pieces = (Hole(5), b"abc", Hole(10_000), b"", b"d", Hole(1 << 20), b"e" * 7, Hole(3_000_001))
    content = Content(pieces)
    journal.commit(tmp_path, plan(tmp_path, content))
    wanted = bytes(5) + b"abc" + bytes(10_000) + b"d" + bytes(1 << 20) + b"e" * 7
    assert (tmp_path / "shard.pt").read_bytes() == wanted + bytes(3_000_001)
    assert content.size == len(wanted) + 3_000_001
    journal.commit(tmp_path, undo(tmp_path))
    assert (tmp_path / "shard.pt").read_bytes() == source


def undo(root: Path) -> Plan:
    receipt = receipts.read(root)[0]
    return Plan("0002", str(root), "undo", {}, (), receipt.inverse, (), None, undoes="0001")


def test_a_hole_that_reads_back_as_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shard.pt").write_bytes(b"old")
    whole = disk.fsync_file

    def spoil(descriptor: int, path: Path) -> None:
        if path.name == "shard.pt":
            os.pwrite(descriptor, b"x", 3000)
        whole(descriptor, path)

    monkeypatch.setattr(disk, "fsync_file", spoil)
    with pytest.raises(SurgeryError, match="does not read back"):
        journal.commit(tmp_path, plan(tmp_path, Content((Hole(5000), b"end"))))
    assert (tmp_path / "shard.pt").read_bytes() == b"old"
