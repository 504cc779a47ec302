"""The native module and pure Python find, read, splice and refuse the same in any torch file."""

from __future__ import annotations

import collections
import io
import pickle
import random
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import chunked
from ckptsurgeon.errors import DamagedFile, SurgeryError
from ckptsurgeon.files import native
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.zip_directory import UNKNOWN, Records
from ckptsurgeon.files.archives.zip_tail import Columns, Moved, directory, local_header, redirected
from ckptsurgeon.files.pickles.reader import read_with_globals
from ckptsurgeon.files.pickles.scan import Scan, scan
from ckptsurgeon.files.pickles.splice import splice
from ckptsurgeon.files.pickles.tree import Tensor, tensors
from ckptsurgeon.plans.edits import Each
from ckptsurgeon.transaction import crc32
from tests.hostile.mutations import mutated
from tests.support.compiled import MADE, compiled, sources_in
from tests.support.torch_files import plain_shard, read, save, zero_shard

pytestmark = pytest.mark.skipif(native.shards is None, reason="the native module is not built")

SOURCES = Path(__file__).parents[2] / "csrc" / "shards"
PICKLES, ARCHIVES = 1500, 800


def tree() -> dict[str, Any]:
    """What torch.save writes in one way and in others: views, shapes, parameters, shared parts."""
    flat = torch.arange(64.0)
    return plain_shard(groups=4, numel=8) | {
        "many": [torch.ones(k % 5, 2) for k in range(12)],
        "deep": torch.ones(1, 2, 1, 2, 1),
        "views": [flat[8:16], flat.view(8, 8).t(), flat[:0]],
        "twice": [flat, flat],
        "kinds": [torch.ones(2, dtype=kind) for kind in (torch.bool, torch.int64, torch.float16)],
        "parameter": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "keys": {(1, (2, 3)): 1, 1 << 70: 2, frozenset((1, 2)): {3, 4}},
    }


def data_pkl(saved: Any) -> bytes:
    file = io.BytesIO()
    torch.save(saved, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def seeds() -> list[bytes]:
    shared = ["x", (1, 2), {"y": [1.5, None]}]
    plain = collections.OrderedDict(a=shared, b=shared, c={True, False}, d=b"z" * 300, e=-(1 << 80))
    return [data_pkl(tree()), *(pickle.dumps(plain, protocol) for protocol in (2, 3, 4, 5))]


def without(patch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    with patch.context() as inner:
        inner.setattr(native, "shards", None)
        return outcome(call)


def outcome(call: Callable[[], Any]) -> Any:
    """What it gives, or that it refuses."""
    try:
        return call()
    except DamagedFile:
        return DamagedFile
    except SurgeryError:
        return SurgeryError
    except KeyError:
        return KeyError


def places(found: Scan) -> dict[str, Any]:
    """Everything that a scan tells, asked for one by one."""
    offsets = range(len(found.data))
    told = {
        name: {at: list(getattr(found, name)[at]) for at in offsets if at in getattr(found, name)}
        for name in ("parts", "grown", "built")
    }
    return told | {
        "memo": {index: found.memo[index] for index in offsets if index in found.memo},
        "alias": {at: found.alias[at] for at in offsets if at in found.alias},
        "puts": list(found.puts),
        "gets": list(found.gets),
        "rest": (found.root, found.stop, found.frames, found.gaps, found.protocol),
    }


@pytest.mark.parametrize("number", range(5))
@pytest.mark.long
def test_a_scan_finds_the_same_places(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    good = seeds()[number]
    chance = random.Random(number)
    accepted = left = 0
    for data in (good, *(mutated(good, chance) for _ in range(PICKLES // 5))):
        found = outcome(lambda data=data: scan(data))
        python = without(monkeypatch, lambda data=data: scan(data, whole=True))
        assert (found is DamagedFile) == (python is DamagedFile), data
        if found is not DamagedFile:
            accepted += 1
            left += found.native is None
            assert places(found) == places(python), data
    assert accepted > 20 and left < accepted / 10
    assert scan(good).native is not None


def test_every_tree_is_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    for good in seeds():
        for data in (good, *(mutated(good, chance) for _ in range(PICKLES // 5))):
            call: Callable[[], Any] = lambda data=data: repr(read_with_globals(scan(data)))  # noqa: E731
            assert outcome(call) == without(monkeypatch, call), data


def test_most_tensors_are_found() -> None:
    data = data_pkl(tree())
    found = scan(data)
    short, made = found.native.shortened({"FloatStorage": "float32"}, Tensor)
    assert len(made) > 15 and len(short) < len(data) - 40 * len(made)
    assert {tensor.dtype for tensor in made} == {"float32"}
    known = [tensor for _, tensor in tensors(read(data))]
    assert all(tensor in known for tensor in made)


@pytest.mark.parametrize("odd", [b"K\x000]q\0(", b"]\x94("])
def test_nothing_is_left_out_of_an_odd_pickle(odd: bytes) -> None:
    """A popped value, a memo that counts."""
    data = data_pkl([torch.ones(2), torch.ones(2)])
    plain, marred = scan(data), scan(data.replace(b"]q\0(", odd))
    assert len(plain.native.shortened({"FloatStorage": "float32"}, Tensor)[1]) == 1
    assert not marred.native.shortened({"FloatStorage": "float32"}, Tensor)[1]


def test_splices_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    base = ("optimizer_state_dict", "base_optimizer_state")
    edits = {
        (*base, "param_groups", 0, "lr"): 1.0,
        (*base, "param_groups", 1, "betas"): (0.5, 0.6),
        ("twice",): None,
        ("module", "new"): [1, 2],
    }
    good = seeds()[0]
    for data in (good, *(mutated(good, chance) for _ in range(PICKLES // 10))):
        call: Callable[[], Any] = lambda data=data: splice(data, edits, delete=[("many", 3)])  # noqa: E731
        assert outcome(call) == without(monkeypatch, call), data


def test_every_directory_is_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tree(), tmp_path / "shard.pt")
    good = path.read_bytes()
    directory = good.index(b"PK\1\2")
    chance = random.Random(5)
    accepted = 0

    def told() -> Any:
        archive = Archive.open(path)
        names = list(archive.records)
        return archive.folder, [archive.records[name] for name in names], archive.tree() is None

    for number in range(ARCHIVES):
        bad = good[:directory] + mutated(good[directory:], chance) if number else good
        path.write_bytes(bad)
        found, python = outcome(told), without(monkeypatch, told)
        assert found == python, bad[directory:]
        accepted += found is not DamagedFile
    assert accepted > ARCHIVES / 20


def test_numbers_are_fetched_as_they_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {f"p{k}": torch.tensor(k, dtype=torch.int32) for k in range(40)}
    path = save(steps | zero_shard(), tmp_path / "shard.pt")
    good = path.read_bytes()
    chance = random.Random(11)

    def told(fetch: bool) -> Any:
        archive = Archive.open(path)
        wanted = [tensor for _, tensor in tensors(archive.tree()) if tensor.numel == 1]
        with archive.reading():
            if fetch:
                outcome(lambda: archive.values(wanted))  # keeps those that it could read
            return [outcome(lambda t=tensor: archive.value(t)) for tensor in wanted]

    assert sorted(outcome(lambda: told(True)))[-40:] == sorted(outcome(lambda: told(False)))[-40:]
    for _ in range(100):
        bad = bytearray(good)
        at = bad.index(b"PK\3\4", chance.randrange(len(bad) // 2))  # a local header
        bad[at + chance.randrange(120)] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        alone = without(monkeypatch, lambda: told(False))
        assert outcome(lambda: told(True)) == alone


def test_a_changed_file_is_no_longer_read(tmp_path: Path) -> None:
    path = save({"step": torch.tensor(1.0)}, tmp_path / "shard.pt")
    archive = Archive.open(path)
    step = archive.tree()["step"]
    save({"step": torch.tensor(2.0), "more": 1}, path)
    with pytest.raises(SurgeryError, match="changed while it was read"), archive.reading():
        archive.values([step])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("count", [1500, pytest.param(60_000, marks=pytest.mark.slow)])
def test_no_mutation_reads_outside_its_buffer(tmp_path: Path, count: int) -> None:
    """The fuzz target under the address and undefined-behaviour sanitizers, on mutated bytes."""
    flags = ["-std=c++17", "-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    program = compiled(["g++", *flags, "-DMUTATE", "fuzz.cpp"], sources_in(SOURCES)) / MADE
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    archive = save({"a": torch.ones(2), "b": 1}, tmp_path / "shard.pt").read_bytes()
    small = data_pkl({"a": [torch.ones(2), torch.ones(2)], "b": torch.ones(2)})
    for protocol in (2, 4):
        chunked.make(tmp_path / str(protocol), 1, 2, protocol)
    chunks = [path.read_bytes() for path in tmp_path.glob("*/step-*/.metadata")]
    parts = [*seeds()[1:], small, *chunks, archive[archive.index(b"PK\1\2") : -98]]
    for number, part in enumerate(parts):
        (corpus / str(number)).write_bytes(part)
    done = subprocess.run(
        [str(program), str(count), *map(str, sorted(corpus.iterdir()))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"{count} mutations" in done.stdout


def numbered() -> list[tuple[Any, int]]:
    """Dicts of dicts with numbers, and how many of their keys the native module finds."""
    shared = {"step": 7, "x": 1}
    plain: dict[Any, Any] = {k: {"step": 70_000 + k, "x": [k]} for k in range(300)}
    return [
        (plain, 300),
        ({k: {"step": float(k)} for k in range(5)}, 5),
        ({"a.b": {"x": 0, "step": -3}, "c": {"step": 1 << 40}, 7: {"step": 255}}, 2),
        ({0: shared, 1: shared, 2: {"step": 1}}, 2),
        ({0: {"step": None}, 1: {"other": 1}, 2: 5, 3: {"step": 1}}, 1),
        ({(1, 2): {"step": 1}}, 0),
        ({"é": {"step": 1}}, 0),
        (collections.OrderedDict({0: {"step": 1}}), 0),
    ]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("number", range(8))
def test_each_of_many_numbers_is_spliced_as_one_by_one(number: int, protocol: int) -> None:
    states, plain = numbered()[number]
    data = pickle.dumps({"state": states, "end": 1}, protocol)
    found = scan(data)
    holder = found.grown[found.made(found.root)][0][1][2]
    assert len(found.native.numbers(holder, "step") or ()) == plain
    keys = [key for key in states if isinstance(key, (int, str))]
    keys = [key for key in keys if isinstance(states[key], dict) and "step" in states[key]]
    if number == 3:
        keys = keys[::2]  # both lead to one dict
    if not keys:
        return
    for value in (0, 2.5, 1 << 50):
        together = splice(data, {("state", Each(tuple(keys)), "step"): value, ("end",): 2})
        single: dict[Any, Any] = {("state", key, "step"): value for key in keys}
        assert together == splice(data, {**single, ("end",): 2})
    with pytest.raises(SurgeryError, match="overlap"):
        splice(data, {("state", Each(tuple(keys)), "step"): 0}, delete=[("state", keys[0])])
    with pytest.raises(SurgeryError, match="overlap"):
        again = ("state", Each((keys[0], keys[0])), "step")
        splice(data, {again: 0})


def test_a_key_that_is_missing_is_one_by_one_too() -> None:
    data = pickle.dumps({"state": {0: {"step": 1}, 1: {"x": 1}}}, 2)
    assert pickle.loads(splice(data, {("state", Each((0, 1)), "step"): 3})) == {
        "state": {0: {"step": 3}, 1: {"x": 1, "step": 3}}
    }
    with pytest.raises(KeyError):
        splice(data, {("state", Each((0, 2)), "step"): 3})


@pytest.mark.parametrize("start", [0, 1, 63, 1000, 1 << 20, (1 << 32) - 5000])
def test_blank_records_and_their_directory_are_those_of_python(tmp_path: Path, start: int) -> None:
    tree = {f"t{k}": torch.ones(2 + 37 * k) for k in range(60)}
    old = Archive.open(save(tree, tmp_path / "shard.pt")).directory
    assert old is not None and isinstance(old.records, Records)
    sizes = {name: 8 + 300 * k for k, name in enumerate(old.records) if name.startswith("data/")}
    crcs = [crc32.of_zeros(size) for size in sizes.values()]
    made = old.records.blanks([*sizes], [*sizes.values()], crcs, start, 4096)
    if start > 1 << 31:
        assert made is None
        return
    assert made is not None
    data, spans, offsets, end = made
    parts, at = [], start
    for (name, size), crc, offset in zip(sizes.items(), crcs, offsets, strict=True):
        assert offset == at
        header = local_header(old.folder, name, crc, size, at)
        parts.append((at, header if size >= 4096 else header + bytes(size)))
        at += len(header) + size
    assert at == end and b"".join(part for _, part in parts) == data
    assert sum(stop - begin for begin, stop in spans) == len(data)
    assert {begin for begin, _ in spans} <= set(offsets)
    moved = Columns([*sizes], offsets, [*sizes.values()], crcs)
    rows = zip(*moved, strict=True)
    whole = directory(old, [Moved(old.records[name], *rest) for name, *rest in rows])
    assert redirected(old, moved) == whole == old.records.redirected(*moved)
    assert old.records.redirected(["data/0", "data/0"], [1, 2], [3, 4], [5, 6]) is None
    assert old.records.redirected(["data/0"], [1 << 33], [3], [5]) is None
    known, unknown = (Tensor("float32", key, 1, 0, (1,), (1,)) for key in ("0", "none"))
    sums = old.records.sums([known, unknown])
    record = old.records["data/0"]
    assert sums == ([record.size, UNKNOWN], [record.crc, UNKNOWN])
