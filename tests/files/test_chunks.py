"""A `.metadata` of many chunks: read in columns as it is read one by one, and edited by tensor."""

from __future__ import annotations

import pickle
import random
import time
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from bench import chunked
from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import dcp_metadata, native
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.chunks import Table
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.recipe.file import from_data
from tests.hostile.mutations import mutated
from tests.support import enums_by_name
from tests.support.dcp_tables import (
    RANKS,
    TENSORS,
    as_any_pickle,
    generally,
    metadata,
    natively,
    needs_native,
    told,
)
from tests.support.dcp_trainers import torchtitan
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

MUTATIONS = 1000
RECIPE: dict[str, Any] = {"set": {"beta2": 0.99}, "reset": ["moments"]}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """torch warns that no process group is there, which `no_dist` asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    chunked.make(tmp_path / "run", TENSORS, RANKS)
    return tmp_path / "run"


@needs_native
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_both_readers_say_the_same(tmp_path: Path, protocol: int) -> None:
    chunked.make(tmp_path, TENSORS, RANKS, protocol)
    found = natively(metadata(tmp_path))
    assert found is not None and told(found) == generally(metadata(tmp_path))
    name = "optimizer.state.layers.1.attention.wq.weight.exp_avg"
    assert found.items[name].shapes().keys() == {1, 2} or len(found.items[name].shapes()) == 2
    assert found.items[name][4].offset == (16, 0)
    assert (found.items[name].whole, found.items[name].shape(4)) == (("float32", (19, 8)), (3, 8))


@needs_native
def test_both_readers_say_the_same_of_what_torch_saved(tmp_path: Path) -> None:
    for path in sorted(torchtitan(tmp_path).glob("step-*/.metadata")):
        found = natively(path)
        assert found is not None and told(found) == generally(path)


def by_name(data: bytes) -> bytes:
    """With members of enums as Python 3.11.2 saves them."""
    return enums_by_name.dumped(pickle.loads(data), 4)


@needs_native
def test_both_readers_say_the_same_of_members_by_name(root: Path) -> None:
    path = metadata(root)
    path.write_bytes(by_name(path.read_bytes()))
    found = natively(path)
    assert found is not None and told(found) == generally(path)
    assert any("MEM_FORMAT" in name for name in found.globals)
    assert not any("getattr" in name for name in found.globals)


@needs_native
@pytest.mark.parametrize("saved", [bytes, by_name])
def test_what_the_native_reader_accepts_the_general_one_reads_alike(
    root: Path, saved: Callable[[bytes], bytes]
) -> None:
    """And it never accepts what the general one refuses."""
    path, chance = metadata(root), random.Random(29)
    good, accepted = saved(path.read_bytes()), 0
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(good, chance))
        found = natively(path)
        if found is not None:
            accepted += 1
            assert told(found) == generally(path), path.read_bytes()
    assert accepted > MUTATIONS / 20


@pytest.mark.parametrize("by", [natively, as_any_pickle])
@pytest.mark.parametrize("protocol", [2, 4])
def test_torch_reads_the_rows_where_they_were_moved(
    tmp_path: Path, by: Callable[[Path], Table | None], protocol: int
) -> None:
    chunked.make(tmp_path, TENSORS, RANKS, protocol)
    path = metadata(tmp_path)
    table = by(path)
    if table is None:
        pytest.skip("the native module is not built")
    chance = random.Random(protocol)
    chosen = array("I", (chance.choice((0, 0, 1, 2)) for _ in table.file))
    places = [(7, 9), (1 << 40, 70_000)]
    before: Metadata = pickle.loads(path.read_bytes())
    data = path.read_bytes()
    for round in (1, 2):  # what was moved is moved again
        kept, pieces = table.moved(chosen, places, "__ckptsurgeon_1.distcp")
        data = data[:kept] + b"".join(pieces)
        path.write_bytes(data)
        after: Metadata = pickle.loads(data)
        assert list(after.storage_data) == list(before.storage_data)
        assert after.state_dict_metadata == before.state_dict_metadata
        rows = {
            (name, item.offset): item.number for name in table.names for item in table.items[name]
        }
        for index, info in after.storage_data.items():
            offset = None if index.offset is None else tuple(index.offset)
            number = chosen[rows[index.fqn, offset]]
            got = (info.relative_path, info.offset, info.length)
            was = before.storage_data[index]
            old = (was.relative_path, was.offset, was.length)
            assert got == (("__ckptsurgeon_1.distcp", *places[number - 1]) if number else old)
        places = [(1, 2), (3, 4)]
        table = by(path)
        assert table is not None, round


def test_a_reset_is_one_change_for_each_tensor(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(root)
    opened: list[str] = []
    plain_open = Archive.open

    def counted(path: Path, *words: Any) -> Archive:
        opened.append(path.name)
        return plain_open(path, *words)

    monkeypatch.setattr(Archive, "open", counted)
    plan = surgery.plan(Run.open(root), from_data(RECIPE))
    moments = [c for c in plan.changes if isinstance(c, Change) and c.field.startswith("exp_avg")]
    assert [change.chunks for change in moments] == [RANKS] * 2 * TENSORS
    assert len(plan.changes) == 4 * TENSORS  # with betas and step
    of_chunks = [name for name in opened if name.endswith("_1.distcp")]
    assert len(of_chunks) == 2 * len(moments) < RANKS * len(moments)

    operate(root, RECIPE)
    receipt = root / ".ckptsurgeon" / "receipts" / "0001" / "receipt.json"
    assert receipt.read_text().count('"chunks"') == len(moments)
    state = {
        f"{prefix}layers.{k}.attention.wq.weight{suffix}": torch.ones(4 * RANKS - 1, 8)
        for k in range(TENSORS)
        for prefix, suffix in (("", ""), ("optimizer.state.", ".exp_avg_sq"))
    }
    dcp.load(state, checkpoint_id=metadata(root).parent, no_dist=True)
    for k, (name, tensor) in enumerate(state.items()):
        if "exp_avg" in name:
            assert not tensor.any()
        else:
            assert torch.equal(tensor[4:8], torch.full((4, 8), 2 + 3 * (k // 2) / 8))
    take_back(root, before)


@pytest.mark.parametrize("params", [None, "scale"])
def test_the_moments_of_a_number_are_reset(tmp_path: Path, params: str | None) -> None:
    """A parameter of one element, with one axis and with none."""
    saved: dict[str, Any] = {"train_state.step": 3}
    for name, tensor in {"scale.a": torch.rand(1) + 1, "scale.b": torch.tensor(2.0)}.items():
        saved[name] = tensor
        saved |= {f"optimizer.state.{name}.{m}": tensor + 1 for m in ("exp_avg", "exp_avg_sq")}
        saved[f"optimizer.state.{name}.step"] = torch.tensor(3.0)
        saved |= {f"optimizer.param_groups.{name}.{k}": v for k, v in chunked.GROUP.items()}
    dcp.save(saved, checkpoint_id=tmp_path / "step-3", no_dist=True)
    before = snapshot(tmp_path)
    operate(tmp_path, {"reset": ["moments"], **({"moments": {"params": params}} if params else {})})
    tensors = {name: torch.ones_like(v) for name, v in saved.items() if torch.is_tensor(v)}
    dcp.load(tensors, checkpoint_id=tmp_path / "step-3", no_dist=True)
    for name, found in tensors.items():
        cleared = "exp_avg" in name or (name.endswith("step") and not params)
        assert torch.equal(found, torch.zeros_like(found) if cleared else saved[name]), name
    take_back(tmp_path, before)


def test_the_plan_counts_the_chunks(root: Path) -> None:
    from ckptsurgeon.report.changes import changes

    plan = surgery.plan(Run.open(root), from_data(RECIPE))
    notes = {row.label: row.note for row in changes(plan.changes)}
    assert notes["exp_avg"] == f"{TENSORS} places in 1 shard, {TENSORS * RANKS} chunks"
    assert notes["betas"] == f"{TENSORS} places in 1 shard"


def test_chunks_that_are_not_what_metadata_says_are_read_one_by_one(root: Path) -> None:
    """A reset follows the archives: torch cuts out of them what `.metadata` says."""
    name = "optimizer.state.layers.0.attention.wq.weight.exp_avg"
    path = metadata(root)
    saved: Metadata = pickle.loads(path.read_bytes())
    tensor = saved.state_dict_metadata[name]
    for chunk in tensor.chunks:
        chunk.sizes = torch.Size([2, 8])
    path.write_bytes(pickle.dumps(saved))
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(RECIPE)))
    found = Saved.open(path.parent)
    assert [tree.size for tree in found.value(name)] == [(4, 8)] * (RANKS - 1) + [(3, 8)]
    assert found.is_zero(name)


@needs_native
def test_a_long_pickle_is_read_where_it_is_plain(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = metadata(root)
    monkeypatch.setattr(dcp_metadata, "MAX_BYTES", 1000)
    assert len(dcp_metadata.read(path).names) == 3 * TENSORS + 12 * TENSORS + 1
    path.write_bytes(path.read_bytes().replace(b"fqn", b"FQN"))
    with pytest.raises(SurgeryError, match="more than 1000, and is not of the plain form"):
        dcp_metadata.read(path)
    monkeypatch.setattr(native, "shards", None)
    with pytest.raises(SurgeryError, match="more than 1000"):
        dcp_metadata.read(path)
    monkeypatch.setattr(dcp_metadata, "MOST", 2000)
    with pytest.raises(SurgeryError, match="more than 2000"):
        dcp_metadata.read(path)


INDEX = b"cm\nI\n)\x81}(X\x03\x00\x00\x00fqnX\x01\x00\x00\x00aub"
INFO = (
    b"cm\nS\n)\x81}(X\x0d\x00\x00\x00relative_pathX\x01\x00\x00\x00fX\x06\x00\x00\x00offsetK\x01"
    b"X\x06\x00\x00\x00lengthK\x01ub"
)


@needs_native
@pytest.mark.parametrize(
    "hostile",
    [
        b"}" * 200_000,  # a deep stack
        b"(" * 200_000,
        b"]q\x00" + b"h\x00" * 200_000,
        b"\x85".join([b"K\x01"] + [b""] * 5000),  # nested tuples
        b"}(" + INDEX + b"q\x01" + INFO + b"q\x02" + b"h\x01h\x02" * 100_000 + b"u",
        b"".join(b"K\x01K\x01(I" for _ in range(10)),
        b"".join(b"J%bJ%b\x860" % (k.to_bytes(4, "little"), b"\0" * 4) for k in range(90_000)),
        b"".join(b"Nr" + k.to_bytes(4, "little") for k in range(9)),
        b"".join(b"N\x94" for _ in range(9)) + b"".join(b"h\x07" for _ in range(70_000)),
    ],
)
def test_a_hostile_pickle_is_refused_in_proportion(hostile: bytes) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = b"\x80\x04" + hostile + b"."
    limits = {
        "depth": dcp_metadata.MAX_DEPTH,
        "integer": dcp_metadata.MAX_INTEGER,
        "name": dcp_metadata.MAX_NAME,
    }
    assert native.shards.chunks(data, **limits) is None
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < 16 * len(data) + (32 << 20)


@needs_native
def test_time_grows_with_the_chunks(tmp_path: Path) -> None:
    """Eight times as many take less than sixteen times as long, best of three."""
    times = []
    for ranks in (50, 400):
        chunked.make(tmp_path / str(ranks), 10, ranks)
        data = metadata(tmp_path / str(ranks))
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            natively(data)
            best = min(best, time.process_time() - began)
        times.append(best)
    assert times[1] < 16 * times[0]
