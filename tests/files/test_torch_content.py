"""Files that must not grow in place become new files in which storages stay where they were."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.append import Archive, render
from ckptsurgeon.plans.edits import ABSENT, ZEROS, Append, Content, Span
from tests.support.torch_files import (
    GROUPS,
    MODES,
    STATE,
    change,
    edited,
    frozen,
    load,
    plain_shard,
    save,
    zero_shard,
)  # fmt: skip

CHANGES = [
    change((*GROUPS, 0, "betas"), [0.8, 0.9]),
    change((*GROUPS, 0, "lr"), 3e-5),
    change((*GROUPS, 1, "initial_lr"), 3e-5, ABSENT),
    change((*STATE, 0, "step"), 0),
    change((*STATE, 0, "exp_avg"), ZEROS),
    change(("views", 1), ZEROS),
]


def edit_in_python(tree: Any) -> Any:
    optimizer = tree["optimizer_state_dict"]["base_optimizer_state"]
    optimizer["param_groups"][0] |= {"betas": (0.8, 0.9), "lr": 3e-5}
    optimizer["param_groups"][1]["initial_lr"] = 3e-5
    optimizer["state"][0]["step"].zero_()
    optimizer["state"][0]["exp_avg"].zero_()
    tree["views"][1].zero_()
    return tree


def test_links_read_only_files_and_strict_readers_get_a_new_file(tmp_path: Path) -> None:
    path = save(plain_shard(), tmp_path / "shard.pt")
    assert isinstance(render(path, "shard.pt", CHANGES), Append)
    assert isinstance(render(path, "shard.pt", CHANGES, strict=True), Content)
    (tmp_path / "link.pt").symlink_to(path)
    assert isinstance(render(tmp_path / "link.pt", "link.pt", CHANGES), Content)
    path.chmod(0o444)
    assert isinstance(render(path, "shard.pt", CHANGES), Content)
    path.chmod(0o644)
    os.link(path, tmp_path / "other.pt")
    assert isinstance(render(path, "shard.pt", CHANGES), Content)


@pytest.mark.parametrize(("mmap", "weights_only"), MODES)
def test_the_new_file_has_the_edits(tmp_path: Path, mmap: bool, weights_only: bool) -> None:
    path = save(plain_shard(), tmp_path / "shard.pt")
    expected = edit_in_python(load(path))
    edited(path, *CHANGES, strict=True)
    assert frozen(load(path, mmap, weights_only)) == frozen(expected)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_pickle_of_the_same_length_stays_in_its_place(tmp_path: Path) -> None:
    path = save(zero_shard(), tmp_path / "shard.pt")
    before = path.read_bytes()
    edited(path, change((*GROUPS, 0, "lr"), 3e-5), strict=True)
    after = path.read_bytes()
    assert len(after) == len(before)
    # eight bytes of the number, and twice four of the CRC
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 16
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_all_but_the_edits_are_spans_of_the_old_file(tmp_path: Path) -> None:
    path = save(plain_shard(numel=5000), tmp_path / "shard.pt")
    edit = render(path, "run/shard.pt", CHANGES[:3], strict=True)
    assert isinstance(edit, Content)
    spans = [piece for piece in edit.pieces if isinstance(piece, Span)]
    assert {span.file for span in spans} == {"run/shard.pt"}
    assert sum(span.end - span.start for span in spans) > path.stat().st_size * 0.9
    assert edit.mtime_ns is None


@pytest.mark.parametrize("strict", [True, False])
def test_readers_that_compute_where_storages_are_find_them(tmp_path: Path, strict: bool) -> None:
    """With storages moved, only `.format_version` 0 keeps torch from reading the old ones."""
    path = save(plain_shard(), tmp_path / "shard.pt")
    expected = edit_in_python(load(path))
    edited(path, *CHANGES, strict=strict)
    config.load.calculate_storage_offsets = True
    try:
        assert frozen(load(path, mmap=True)) == frozen(expected)
    finally:
        config.load.calculate_storage_offsets = False


def test_without_crcs_none_are_made_up(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save(plain_shard(), tmp_path / "shard.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    expected = edit_in_python(load(path))
    edited(path, *CHANGES, strict=True)
    assert frozen(load(path)) == frozen(expected)


# --- the format before torch 1.6 -----------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_legacy_format_is_read_and_edited(tmp_path: Path, protocol: int) -> None:
    options = {"_use_new_zipfile_serialization": False, "pickle_protocol": protocol}
    path = save(zero_shard(), tmp_path / "shard.pt", **options)
    archive = Archive.open(path)
    assert archive.directory is None
    assert archive.value(archive.tree()[STATE[0]][STATE[1]]["state"][0]["step"]) == 6.0
    expected = edit_in_python(load(path))
    edit = edited(path, *CHANGES)
    assert isinstance(edit, Content)
    assert frozen(load(path)) == frozen(expected)


def test_a_legacy_file_may_hold_a_module_and_a_large_pickle(tmp_path: Path) -> None:
    tree = {"names": [f"layer.{i}" for i in range(20_000)], "linear": torch.nn.Linear(2, 2)}
    path = save(tree, tmp_path / "shard.pt", _use_new_zipfile_serialization=False)
    edited(path, change(("names", 19_999), "last"))
    loaded = load(path)
    assert loaded["names"][-2:] == ["layer.19998", "last"]
    assert torch.equal(loaded["linear"].weight, tree["linear"].weight)


def test_a_legacy_file_that_is_cut_or_goes_on_is_refused(tmp_path: Path) -> None:
    path = save(plain_shard(), tmp_path / "shard.pt", _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for size in (0, 1, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFile, match=r"cut short|does not fit|it is empty"):
            Archive.open(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DamagedFile, match=rf"byte {len(whole)}: .*followed by 1 byte$"):
        Archive.open(path)
