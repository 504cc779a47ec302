"""An Append leaves every old byte, and torch loads what plain Python would have saved."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon.files.archives.append import Archive, render
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.plans.edits import ABSENT, ZEROS, Append
from tests.support.torch_files import (
    GROUPS,
    MODES,
    SCALER,
    STATE,
    apply,
    change,
    edited,
    frozen,
    load,
    plain_shard,
    save,
    zero_shard,
)  # fmt: skip


def assert_archive_is_sound(path: Path) -> None:
    """Python's zipfile and unzip check every CRC."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tqq", str(path)], check=True)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_only_the_edits_differ_in_a_zero_shard(tmp_path: Path, protocol: int) -> None:
    path = save(zero_shard(), tmp_path / "shard.pt", pickle_protocol=protocol)
    before, tree = path.read_bytes(), load(path)
    edit = edited(
        path,
        change((*GROUPS, 0, "lr"), 3e-5),
        change((*GROUPS, 1, "betas"), [0.9, 0.95]),
        change((*GROUPS, 0, "initial_lr"), 3e-5, ABSENT),
        change((*STATE, 0, "step"), 100),
        change((*STATE, 1, "exp_avg"), ZEROS),
        change((*SCALER, "cur_scale"), 1024),
        change(("optimizer_state_dict", "clip_grad"), 0.5),
        change(("args", "seed"), 4321),
        change(("args", "skip"), [1, 2], ABSENT),
    )
    assert isinstance(edit, Append) and edit.new_size == path.stat().st_size
    optimizer = tree["optimizer_state_dict"]["base_optimizer_state"]
    optimizer["param_groups"][0]["lr"] = optimizer["param_groups"][0]["initial_lr"] = 3e-5
    optimizer["param_groups"][1]["betas"] = (0.9, 0.95)
    optimizer["state"][0]["step"].fill_(100)
    optimizer["state"][1]["exp_avg"].zero_()
    tree["optimizer_state_dict"]["loss_scaler"].cur_scale = 1024.0
    tree["optimizer_state_dict"]["clip_grad"] = 0.5
    tree["args"].seed, tree["args"].skip = 4321, [1, 2]
    assert frozen(load(path)) == frozen(tree) == frozen(load(path, mmap=True))
    assert path.read_bytes()[: len(before)] == before
    assert_archive_is_sound(path)
    with path.open("r+b") as file:
        file.truncate(edit.old_size)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("mmap", "weights_only"), MODES)
@pytest.mark.parametrize("crc", [True, False])
def test_all_modes_of_torch_load_read_the_edit(
    tmp_path: Path, mmap: bool, weights_only: bool, crc: bool
) -> None:
    torch.serialization.set_crc32_options(crc)
    try:
        path = save(plain_shard(), tmp_path / "shard.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    tree = load(path)
    edited(
        path,
        change((*GROUPS, 0, "betas"), (0.8, 0.9)),
        change((*GROUPS, 0, "lr"), 1),
        change((*STATE, 0, "exp_avg_sq"), ZEROS),
        change((*STATE, 1, "step"), 0),
        change(("views", 0), ZEROS),
        change(("names", 299), "other"),
        change(("empty", "key"), None, ABSENT),
    )
    optimizer = tree["optimizer_state_dict"]["base_optimizer_state"]
    optimizer["param_groups"][0] |= {"betas": (0.8, 0.9), "lr": 1.0}
    optimizer["state"][0]["exp_avg_sq"].zero_()
    optimizer["state"][1]["step"].zero_()
    tree["views"][0].zero_()
    tree["names"][299] = "other"
    tree["empty"]["key"] = None
    assert frozen(load(path, mmap, weights_only)) == frozen(tree)
    with zipfile.ZipFile(path) as archive:
        kept = [name for name in archive.namelist() if archive.getinfo(name).CRC == 0]
        assert bool(kept) is not crc  # "not computed" stays, what is new has its CRC
        for name in set(archive.namelist()) - set(kept):
            archive.read(name)


def test_generations_pile_up_and_each_comes_back_by_truncation(tmp_path: Path) -> None:
    path = save(plain_shard(), tmp_path / "shard.pt")
    states = [path.read_bytes()]
    for i in range(12):
        edit = edited(
            path, change((*GROUPS, 0, "lr"), i / 7), change((*STATE, i % 2, "step"), float(i))
        )
        assert isinstance(edit, Append) and edit.old_size == len(states[-1])
        assert load(path)["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0][
            "lr"
        ] == (i / 7)
        assert_archive_is_sound(path)
        assert path.read_bytes().startswith(states[-1])
        states.append(path.read_bytes())
    for state in reversed(states):
        with path.open("r+b") as file:
            file.truncate(len(state))
        assert path.read_bytes() == state
        load(path)


def test_a_path_through_the_tree_gives_what_was_set(tmp_path: Path) -> None:
    path = save(zero_shard(), tmp_path / "shard.pt")
    edited(path, change((*STATE, 0, "step"), 41), change((*SCALER, "cur_iter"), 9))
    archive = Archive.open(path)
    assert archive.value(get(archive.tree(), (*STATE, 0, "step"))) == 41.0
    assert get(archive.tree(), (*SCALER, "cur_iter")) == 9
    assert get(archive.tree(), ("args", "itself", "seed")) == 1234


def test_storage_keys_and_the_folder_may_be_any_string(tmp_path: Path) -> None:
    source = save({"a": torch.arange(3.0), "lr": 1.0}, tmp_path / "source.pt")
    key, long_key = b"X\x01\0\0\x000", b"X\x0f\0\0\x00 94859690382544"
    path = tmp_path / "shard.pt"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                assert data.count(key) == 1
                data = data.replace(key, long_key)
            name = name.replace("source", "any folder ü").replace("/0", "/ 94859690382544")
            new.writestr(name, data)
    assert load(path)["a"][2] == 2
    edited(path, change(("a",), ZEROS), change(("lr",), 2.0))
    assert load(path)["a"].tolist() == [0, 0, 0] and load(path)["lr"] == 2.0
    assert_archive_is_sound(path)


def test_numbers_keep_the_dtype_of_their_tensor(tmp_path: Path) -> None:
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    ]  # fmt: skip
    path = save({str(dtype): torch.ones((), dtype=dtype) for dtype in dtypes}, tmp_path / "s.pt")
    wanted: dict[str, Any] = {str(dtype): 6 for dtype in dtypes} | {"torch.bool": False}
    edited(path, *(change((name,), value) for name, value in wanted.items()))
    loaded = load(path)
    archive = Archive.open(path)
    for dtype in dtypes:
        assert loaded[str(dtype)].dtype == dtype and loaded[str(dtype)].item() == wanted[str(dtype)]
        assert archive.value(archive.tree()[str(dtype)]) == wanted[str(dtype)]


def test_nothing_is_written_by_rendering(tmp_path: Path) -> None:
    path = save(plain_shard(), tmp_path / "shard.pt")
    before, status = path.read_bytes(), path.stat()
    edit = render(path, "shard.pt", [change((*GROUPS, 0, "lr"), 3e-5)])
    assert path.read_bytes() == before and path.stat().st_mtime_ns == status.st_mtime_ns
    assert isinstance(edit, Append) and edit.mtime_ns == status.st_mtime_ns
    assert [p.name for p in tmp_path.iterdir()] == ["shard.pt"]
    apply(path, edit)


def test_new_payloads_are_aligned_as_torch_aligns_them(tmp_path: Path) -> None:
    path = save(plain_shard(numel=5000), tmp_path / "a name of its own.pt")
    edited(
        path,
        change((*GROUPS, 0, "lr"), 3e-5),
        change((*STATE, 0, "exp_avg"), ZEROS),
        change((*STATE, 1, "step"), 1),
    )
    archive = Archive.open(path)
    assert all(archive.payload(name) % 64 == 0 for name in archive.records)
