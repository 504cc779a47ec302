"""Damaged and hostile files raise DamagedFile with path and byte offset, in little memory."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

from ckptsurgeon.errors import DamagedFile, SurgeryError
from ckptsurgeon.files.archives.append import Archive, render
from ckptsurgeon.files.pickles.reader import read_with_globals
from ckptsurgeon.files.pickles.scan import scan
from ckptsurgeon.files.pickles.splice import splice
from ckptsurgeon.plans.edits import ZEROS
from tests.support.torch_files import GROUPS, change, plain_shard, read, save

P = b"\x80\x02"
SHARED_KEY = P + b"}K\x01q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))

COLLISIONS = (
    P
    + b"}("
    + b"".join(
        b"\x8a\x0c" + (k * (2**61 - 1)).to_bytes(12, "little") + b"N" for k in range(1, 2000)
    )
    + b"u."
)

BAD_PICKLES = {
    "empty": (b"", 0),
    "no pickle": (b"not a pickle", 0),
    "protocol 1": (b"\x80\x01N.", 0),
    "protocol 99": (b"\x80\x63N.", 0),
    "cut in a string": (P + b"X\xff\0\0\0abc", 2),
    "cut in an index": (P + b"Nr\0\0", 3),
    "no STOP": (P + b"K\x01", 4),
    "string of 2^62 bytes": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.", 2),
    "bytes of 8 GB": (b"\x80\x04\x8e" + struct.pack("<Q", 8 << 30) + b"abc.", 2),
    "frame of 2^63": (b"\x80\x04\x95" + struct.pack("<Q", (1 << 63) - 1) + b"N.", 2),
    "integer of 1 MB": (P + b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".", 2),
    "negative integer length": (P + b"\x8b" + struct.pack("<i", -1) + b".", 2),
    "memo index 2^32 - 1": (P + b"Nr\xff\xff\xff\xff.", 3),
    "memo index 2^27": (P + b"Nr" + struct.pack("<I", 1 << 27) + b".", 3),
    "memo index set twice": (P + b"Nq\0q\0.", 5),
    "memo index not set": (P + b"h\x07.", 2),
    "nothing to reduce": (P + b"R.", 2),
    "no mark": (P + b"NNt.", 4),
    "a mark taken for a value": (P + b"N(\x86.", 4),
    "values left": (P + b"NN.", 4),
    "an open mark": (P + b"(N.", 4),
    "nested lists": (P + b"]" * 5000 + b"a" * 4999 + b".", 6002),
    "nested tuples": (P + b")" + b"\x85" * 5000 + b".", 1003),
    "a million marks": (P + b"(" * 1_000_000 + b".", 1002),
    "DUP": (P + b"N2\x86.", 3),
    "INST": (P + b"(ios\nsystem\n.", 3),
    "OBJ": (P + b"(cos\nsystem\no.", 14),
    "EXT1": (P + b"\x82\x01.", 2),
    "PERSID": (P + b"P../../etc/passwd\n.", 2),
    "NEXT_BUFFER": (b"\x80\x05\x97.", 2),
    "text PUT": (P + b"Np99999999999\n.", 3),
    "call of a result": (P + b"cos\nx\n)R)R.", 11),
    "call of a string": (P + b"X\x01\0\0\0a)R.", 9),
    "name of a global from numbers": (b"\x80\x04K\x01K\x02\x93.", 6),
    "name of a global without end": (P + b"c" + b"x" * 10_000, 2),
    "list as a key": (P + b"}]K\x01s.", 0),
    "odd dict": (P + b"}(K\x01u.", 6),
    "append to a dict": (P + b"}K\x01a.", 5),
    "state of a list": (P + b"]}b.", 4),
    "items of a shared list": (P + b"]q\0h\0K\x01a.", 9),
    "long tuple as a key": (P + b"}(" + b"K\x01" * 1001 + b"tK\x01s.", 2006),
    "tuple of 2^60 references as a key": (SHARED_KEY + b"K\x01s.", 0),
    "keys that collide": (COLLISIONS, 0),
    "bad UTF-8": (P + b"X\x01\0\0\0\xff.", 0),
    "storage of a dict": (P + b"}Q.", 0),
    "tensor without storage": (P + b"ctorch._utils\n_rebuild_tensor_v2\n(K\0K\0))\x89Nt R.", 0),
    "tensor with text as size": (
        P + b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        b"X\x01\0\0\x000X\x03\0\0\0cpuK\x04tQK\0X\x01\0\0\0a)\x89NtR.",
        0,
    ),
}


@pytest.mark.parametrize("name", BAD_PICKLES)
def test_bad_pickles_are_refused_where_they_go_wrong(name: str) -> None:
    data, offset = BAD_PICKLES[name]
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile) as error:
            read_with_globals(scan(data, where="shard.pt", base=1000))
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert error.value.path == "shard.pt" and str(error.value).startswith("shard.pt: byte ")
    if offset:
        assert error.value.offset == 1000 + offset


def test_mutated_pickles_raise_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(save(plain_shard(), tmp_path / "shard.pt")) as archive:
        good = archive.read("shard/data.pkl")
    chance = random.Random(0)
    refused = 0
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.choice([chance.randrange(256), *good[:99]])
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            read(bytes(data))
            splice(bytes(data), {(*GROUPS, 0, "lr"): 1.0})
        except DamagedFile:
            refused += 1
        except KeyError:
            pass  # a changed key
    assert refused > 500


# --- archives ------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save({"a": torch.arange(1000.0), "lr": 1.0}, tmp_path / "shard.pt")


def entries(data: bytes) -> dict[str, tuple[int, int]]:
    """Offsets of local header and central entry by name, as zipfile sees them."""
    found, at = {}, data.index(b"PK\1\2")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            found[info.filename.partition("/")[2]] = (info.header_offset, at)
            at = data.index(b"PK\1\2", at + 4) if info is not archive.infolist()[-1] else at
    return found


def patched(path: Path, *patches: tuple[int, bytes]) -> None:
    data = bytearray(path.read_bytes())
    for offset, new in patches:
        data[offset : offset + len(new)] = new
    path.write_bytes(data)


def refused(path: Path, what: str) -> None:
    with pytest.raises(DamagedFile, match=what) as error:
        archive = Archive.open(path)
        archive.storage(archive.tree()["a"])
        archive.payload("data/0")
    assert str(path) in str(error.value) and "byte" in str(error.value)


def test_a_file_of_any_shorter_length_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for size in [*range(0, 200, 7), *range(len(whole) - 200, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFile):
            Archive.open(path).tree()


def test_bytes_before_or_after_the_archive_are_refused(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 1000)
    refused(path, "no zip end record")
    path.write_bytes(b"PK\3\4" + b"x" * 96 + whole)
    refused(path, "locator points elsewhere|does not end here")
    path.write_bytes(b"x" * 100 + whole)
    refused(path, "no pickle of protocol")
    path.write_bytes(bytes(len(whole)))
    refused(path, "no pickle of protocol")


def test_a_flipped_bit_in_the_pickle_is_seen_by_its_crc(path: Path) -> None:
    patched(path, (path.read_bytes().index(b"lrq"), b"lx"))
    refused(path, "does not have its CRC")


def test_compressed_encrypted_or_renamed_records_are_refused(path: Path) -> None:
    whole = path.read_bytes()
    local, entry = entries(whole)["data/0"]
    for patches, what in (
        ([(entry + 10, b"\x08")], "compressed"),
        ([(entry + 10, b"\x08"), (local + 8, b"\x08")], "compressed"),
        ([(entry + 8, b"\x09"), (local + 6, b"\x09")], "encrypted"),
        ([(entry + 46 + 6, b"datA/0")], "no record 'data/0'"),
        ([(local + 30 + 6, b"datA/0")], "differ"),
        ([(local, b"XXXX")], "no local header"),
        ([(local + 28, b"\xff\xff")], "no room"),
    ):
        path.write_bytes(whole)
        patched(path, *patches)
        refused(path, what)


def test_sizes_and_offsets_that_lie_are_refused(path: Path) -> None:
    whole = path.read_bytes()
    local, entry = entries(whole)["data/0"]
    _, other = entries(whole)["version"]
    size = struct.pack("<I", 4004)
    for patches, what in (
        ([(entry + 20, size), (entry + 24, size)], "4004 bytes, not 1000 elements"),
        ([(entry + 20, b"\xfe\xff\xff\xff")], "ends after byte"),
        ([(entry + 42, b"\xf0\xff\xff\x7f")], "ends after byte"),
        ([(other + 42, struct.pack("<I", local))], "ends after byte"),
        ([(entry + 20, b"\xff\xff\xff\xff")], "lacks its zip64 sizes"),
        ([(len(whole) - 22 + 16, b"\0\0\0\0")], "end records disagree"),
        ([(len(whole) - 22 + 8, b"\1\0\1\0")], "end records disagree"),
        ([(len(whole) - 22 + 20, b"\1\0")], "comment"),
        ([(len(whole) - 98 + 24, b"\1")], "no zip64 end record"),
        ([(len(whole) - 98 + 24, b"\1\0\0\0\0\0\0\0\1")], "end records disagree"),
    ):
        path.write_bytes(whole)
        patched(path, *patches)
        refused(path, what)


@pytest.mark.parametrize("name", ["shard/data/0", "shard/DATA/0", "other/x", "shard/data/0\0", "x"])
def test_names_that_torch_might_read_otherwise_are_refused(path: Path, name: str) -> None:
    """torch bisects the names without regard to case, so of two it reads one by chance."""
    original = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    with zipfile.ZipFile(path, "w") as archive:
        for info in original.infolist():
            archive.writestr(info.filename, original.read(info))
        with pytest.warns(UserWarning) if name == "shard/data/0" else _nothing():
            info = zipfile.ZipInfo("shard/data/1")
            info.filename = name
            archive.writestr(info, b"other")
    refused(path, "same name|not where torch looks")


def _nothing() -> io.BytesIO:
    return io.BytesIO()


def test_a_tensor_larger_than_its_storage_is_refused(path: Path) -> None:
    data = path.read_bytes()
    numel = data.index(b"M\xe8\x03\x85")
    patched(path, (numel, b"M\xe9\x03"), (entries(data)["data.pkl"][1] + 16, b"\0\0\0\0"))
    _, crc = data.index(b"PK\7\x08"), b""
    patched(path, (data.index(b"PK\7\x08") + 4, b"\0\0\0\0" + crc))
    refused(path, "leaves the storage '0'")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DamagedFile, match="not a regular file"):
        Archive.open(tmp_path / "fifo")
    with pytest.raises(DamagedFile, match="not a regular file"):
        Archive.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        Archive.open(tmp_path / "absent")


def test_a_file_that_changes_between_two_reads_is_noticed(path: Path) -> None:
    archive = Archive.open(path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SurgeryError, match="changed while it was read"):
        archive.tree()


def test_wishes_that_cannot_be_met_are_refused_with_their_path(path: Path) -> None:
    for new, key, what in (
        (2.0, ("b",), "there is no"),
        (ZEROS, ("lr",), "not a tensor"),
        (2.0, ("a",), "can't become 2.0"),
        ("text", ("a",), "can't become 'text'"),
    ):
        with pytest.raises(SurgeryError, match=what):
            render(path, "shard.pt", [change(key, new)])
    save({"step": torch.tensor(1, dtype=torch.int8)}, path)
    with pytest.raises(SurgeryError, match="can't hold 1000"):
        render(path, "shard.pt", [change(("step",), 1000)])


def test_a_pickle_that_runs_code_is_rendered_without_running_it(tmp_path: Path) -> None:
    path, mark = save({"lr": 1.0}, tmp_path / "shard.pt"), tmp_path / "executed"
    original = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    bomb = P + b"}(X\x02\0\0\0lrG" + struct.pack(">d", 1.0) + b"X\x01\0\0\0xcposix\nsystem\n"
    text = f"touch {mark}".encode()
    bomb += b"X" + struct.pack("<I", len(text)) + text + b"\x85Ru."
    with zipfile.ZipFile(path, "w") as archive:
        for info in original.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            archive.writestr(info.filename, bomb if is_pickle else original.read(info))
    render(path, "shard.pt", [change(("lr",), 2.0)])
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()
