"""The inert tree holds what torch would load, without the classes, and nothing of it ever runs."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.pickles.reader import read_with_globals
from ckptsurgeon.files.pickles.scan import scan
from ckptsurgeon.files.pickles.tree import Global, Object, Tensor, get, tensors
from ckptsurgeon.formats.fields.known_globals import unknown
from tests.support import enums_by_name
from tests.support.torch_files import (
    GROUPS,
    SCALER,
    STATE,
    load,
    plain_shard,
    read,
    save,
    zero_shard,
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_zero_shard_without_its_classes(tmp_path: Path, protocol: int, legacy: bool) -> None:
    path = save(
        zero_shard(),
        tmp_path / "shard.pt",
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=not legacy,
    )
    archive = Archive.open(path)
    tree = archive.tree()
    assert get(tree, (*GROUPS, 1, "betas")) == (0.9, 0.999)
    assert get(tree, (*GROUPS, -1, "lr")) == 1e-4
    scaler = get(tree, SCALER)
    assert isinstance(scaler, Object)
    assert scaler.cls == Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
    assert get(tree, (*SCALER, "cur_scale")) == 65536.0
    assert repr(get(tree, (*SCALER, "dtype"))) == "torch.float16"
    stage = get(tree, ("optimizer_state_dict", "zero_stage"))
    _, call = ZeroStageEnum.optimizer_states.__reduce_ex__(2)[:2]  # by value, or by name
    assert stage.cls.name == "ZeroStageEnum" and stage.args == call[-1:]
    fragment = get(tree, ("optimizer_state_dict", "param_slice_mappings", 0, "w"))
    assert fragment.cls.name == "fragment_address" and fragment.args == (64, 0)
    assert get(tree, ("args", "itself", "itself", "seed")) == 1234
    assert tree["shapes"] == (3, 5)
    assert get(tree, ("counts", "a")) == 1
    assert get(tree, ("module", "_metadata", "v", "version")) == 1
    assert get(tree, ("rng_python", 1, 0)) == zero_shard()["rng_python"][1][0]
    assert get(tree, (*STATE, 0, "exp_avg")).numel == 64
    assert archive.value(get(tree, (*STATE, 1, "step"))) == 6.0
    assert tree["parameter"].size == (2,)


def test_tensors_say_where_their_elements_are(tmp_path: Path) -> None:
    path = save(plain_shard(), tmp_path / "shard.pt")
    tree, loaded = Archive.open(path).tree(), load(path)
    found = dict(tensors(tree))
    assert len(found) == 2 * 3 + 2 + 2
    for key_path, tensor in found.items():
        real = get(loaded, key_path)
        assert tensor.dtype == str(real.dtype).removeprefix("torch.")
        assert tensor.size == tuple(real.shape) and tensor.stride == real.stride()
        assert tensor.offset == real.storage_offset()
        assert tensor.storage_numel == real.untyped_storage().nbytes() // real.element_size()
    assert tree["views"][0].storage == tree["views"][1].storage
    assert tree["views"][1].offset == 40


def test_dtypes_without_a_storage_class(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(3, dtype=torch.uint16)}, tmp_path / "shard.pt")
    assert Archive.open(path).tree()["a"] == Tensor("uint16", "0", 3, 0, (3,), (1,))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back_equal(protocol: int) -> None:
    inside = [1, 2.5, None, True, "ü", 2**80, -(2**31), (4, (5,), ())]
    value: Any = {"x": OrderedDict([("b", inside), (3, inside)]), "big": list(range(2000))}
    if protocol > 3:  # before, sets and bytes are written as calls
        value |= {"set": {1}, "frozen": frozenset({2}), "bytes": b"bytes"}
    assert read(pickle.dumps(value, protocol)) == value
    counts = read(pickle.dumps(defaultdict(list, a=[1]), protocol))
    assert isinstance(counts, Object) and counts.items == {"a": [1]}


def test_a_missing_path_is_named_up_to_where_it_ends() -> None:
    tree = read(pickle.dumps({"a": [{"b": 1}], "o": OrderedDict()}, 2))
    for path in (("x", "y"), ("a", 3), ("a", 0, "c"), ("a", "b"), ("a", 0, "b", "c"), ("o", "p")):
        with pytest.raises(KeyError) as error:
            get(tree, path)
        assert error.value.args[0] == path[: len(error.value.args[0])]
    assert get(tree, ()) is tree


class Bomb:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_would_run_is_only_named(tmp_path: Path, protocol: int) -> None:
    import os

    mark = tmp_path / "executed"
    data = pickle.dumps({"lr": 1.0, "bomb": Bomb(os.system, f"touch {mark}")}, protocol)
    tree = read(data)
    assert repr(tree["bomb"].cls) == "posix.system" and tree["lr"] == 1.0
    data = pickle.dumps(Bomb(eval, f"open({str(mark)!r}, 'w')"), protocol)
    assert read(data).args == (f"open({str(mark)!r}, 'w')",)
    assert not mark.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_member_of_an_enum_by_its_name(protocol: int) -> None:
    stage = ZeroStageEnum.weights
    data = enums_by_name.dumped({"stage": stage, "pair": (stage, ZeroStageEnum.disabled)}, protocol)
    assert pickle.loads(data) == {"stage": stage, "pair": (stage, ZeroStageEnum.disabled)}
    tree, names = read_with_globals(scan(data))
    assert tree["stage"].args == ("weights",) and tree["pair"][1].args == ("disabled",)
    cls = f"{ZeroStageEnum.__module__}.ZeroStageEnum"
    assert names == {cls, f"{cls}.weights", f"{cls}.disabled"}
    assert unknown(names) == []


@pytest.mark.parametrize("name", ["CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope"])
def test_what_megatrons_arguments_hold_is_known(name: str) -> None:
    cls = f"megatron.core.transformer.enums.{name}"
    assert unknown({cls, f"{cls}.attn"}) == []


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"lr": 1.0, "f": getattr}, "builtins.getattr"),
        ({getattr: 1}, "builtins.getattr"),
        ([(1, {2: defaultdict(getattr)})], "builtins.getattr"),
        ({"x": Bomb(getattr, "text", "upper")}, "builtins.getattr"),
        ({"x": Bomb(getattr, ZeroStageEnum, "weights", 1)}, "builtins.getattr"),
        (Bomb(getattr, logging.Logger, "makeRecord"), "logging.Logger.makeRecord"),
        (
            Bomb(getattr, torch.UntypedStorage, "from_file"),
            "torch.storage.UntypedStorage.from_file",
        ),
        (
            Bomb(getattr, ZeroStageEnum, "__init_subclass__"),
            "deepspeed.runtime.zero.config.ZeroStageEnum.__init_subclass__",
        ),
    ],
)
def test_no_other_use_of_getattr_is_known(value: Any, name: str, protocol: int) -> None:
    _, names = read_with_globals(scan(pickle.dumps(value, protocol)))
    assert name in unknown(names)


def test_a_file_cannot_change_the_reader() -> None:
    """BUILD on a global sets attributes of what it stands for: the placeholder refuses."""
    ordered = b"ccollections\nOrderedDict\n"
    for state in (b"}X\x01\0\0\0aK\x01s", b"N}X\x07\0\0\0__new__K\x01s\x86"):
        with pytest.raises(DamagedFile, match="can't hold it"):
            read(b"\x80\x02" + ordered + state + b"b.")
        call = b"ctorch._utils\n_rebuild_parameter\n" + ordered + b"\x85R"  # gives its argument
        with pytest.raises(DamagedFile, match="makes no sense"):
            read(b"\x80\x02" + call + state + b"b.")
    assert read(pickle.dumps(OrderedDict(a=1), 2)) == {"a": 1}


def test_importing_the_readers_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from ckptsurgeon.files.archives import append; "
        "bad = {'torch', 'numpy', 'deepspeed', 'zipfile'} & set(sys.modules); sys.exit(len(bad))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
