"""Archives that lie about what is in them: rows 23 to 32, and what only torch would run."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import Trained
from tests.hostile.hostile_run import MODEL, OPTIM, call, everything, refused

Patch = Callable[[bytes], bytes]


def spots(data: bytes) -> dict[str, tuple[int, int]]:
    """Offsets of local header and central entry by name."""
    found, at = {}, data.index(b"PK\1\2")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            found[info.filename.partition("/")[2]] = (info.header_offset, at)
            at += 46 + sum(struct.unpack_from("<HHH", data, at + 28))
    return found


def poke(name: str, *patches: tuple[str, int, bytes]) -> Patch:
    """Bytes in the local header or in the central entry of one record."""

    def damage(data: bytes) -> bytes:
        local, entry = spots(data)[name]
        out = bytearray(data)
        for place, offset, new in patches:
            at = (local if place == "local" else entry) + offset
            out[at : at + len(new)] = new
        return bytes(out)

    return damage


def end(offset: int, new: bytes) -> Patch:
    return lambda data: (
        data[: len(data) - 22 + offset] + new + data[len(data) - 22 + offset + len(new) :]
    )


def rewritten(rename: Callable[[str], str], *more: tuple[str, bytes, int]) -> Patch:
    """The same records under other names, and `more` of them (name, bytes, method)."""

    def damage(data: bytes) -> bytes:
        original, out = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a name that is there twice is meant
            for info in original.infolist():
                new = zipfile.ZipInfo("x")
                new.filename = rename(info.filename)
                archive.writestr(new, original.read(info))
            for name, content, method in more:
                new = zipfile.ZipInfo("x")
                new.filename, new.compress_type = f"{OPTIM[:-3]}/{name}", method
                archive.writestr(new, content)
        return out.getvalue()

    return damage


def same(name: str) -> str:
    return name


BAD: dict[str, tuple[Patch, str]] = {
    "23 data/0 twice": (rewritten(same, ("data/0", b"other", 0)), "same name"),
    "23 data/0 twice but for the case": (rewritten(same, ("DATA/0", b"other", 0)), "same name"),
    "24 another local name": (poke("data.pkl", ("local", 30, b"X")), "differ"),
    "25 deflate over stored bytes": (poke("data/1", ("entry", 10, b"\x08")), "compressed"),
    "25 and in the local header": (
        poke("data/1", ("entry", 10, b"\x08"), ("local", 8, b"\x08")),
        "compressed",
    ),
    "26 a deflate bomb": (rewritten(same, ("data/99", bytes(64 << 20), 8)), "compressed"),
    "27 the encrypted bit": (poke("data/1", ("entry", 8, b"\x09")), "encrypted"),
    "27 entry count -1": (end(8, b"\xfe\xff\xfe\xff"), "end records disagree"),
    "27 a second end record": (lambda data: data + data[-22:], "locator|does not end here"),
    "28 overlapping records": (poke("data/1", ("entry", 42, b"\0\0\0\0")), "ends after byte"),
    "28 an offset past the end": (
        poke("data/1", ("entry", 42, b"\xf0\xff\xff\x7f")),
        "ends after byte",
    ),
    "28 a zip64 size that lies": (
        poke("data/1", ("entry", 20, b"\xff\xff\xff\xff")),
        "lacks its zip64",
    ),
    "28 a size that lies": (poke("data/1", ("entry", 20, b"\4\0\0\x70")), "compressed|ends after"),
    "29 100 bytes in front": (lambda data: b"PK\3\4" + b"x" * 96 + data, "locator|does not end"),
    "29 1,000 bytes behind": (lambda data: data + bytes(1000), "no zip end record"),
    "29 a wrong offset of the directory": (end(16, b"\1\0\0\0"), "end records disagree"),
    "30 ../x": (rewritten(same, ("../x", b"", 0)), "leaves its folder"),
    "30 data/../../x": (rewritten(same, ("data/../../x", b"", 0)), "leaves its folder"),
    "30 a folder that climbs": (rewritten(lambda n: "../" + n.partition("/")[2]), "leaves its"),
    "30 absolute": (rewritten(lambda n: "/" + n.partition("/")[2]), "leaves its folder"),
    "30 a backslash": (rewritten(same, ("..\\x", b"", 0)), "leaves its folder"),
    "30 NUL": (rewritten(same, ("data/0\0", b"", 0)), "same name"),
    "30 two folders": (
        rewritten(lambda n: n if "data/" in n or "pkl" in n else "y/x"),
        "not where torch looks",
    ),
    "31 half-saved": (lambda data: data[: len(data) // 2], "cut short"),
    "31 no bytes": (lambda data: b"", "no pickle|cut short|read"),
    "31 all zeros": (lambda data: bytes(len(data)), "no pickle"),
    "a TorchScript program": (rewritten(same, ("constants.pkl", b"", 0)), "TorchScript"),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_with_file_and_byte(trained: Trained, name: str) -> None:
    root = trained()
    shard = root / "global_step8" / OPTIM
    damage, says = BAD[name]
    shard.write_bytes(damage(shard.read_bytes()))
    for words in (["show", 8], ["set", "eps=1e-6"]):
        said = refused(root, *words, offset=True)
        assert OPTIM in said
        assert re.search(says, said), said


def test_another_name_in_the_header_of_a_tensor_is_seen_before_it_is_reset(
    trained: Trained,
) -> None:
    """Row 24: only the headers of records that a command reads are read."""
    root = trained()
    shard = root / "global_step8" / OPTIM
    shard.write_bytes(poke("data/0", ("local", 30, b"X"))(shard.read_bytes()))
    refused(root, "reset", "moments", says="differ", offset=True)


def legacy(shard: Path) -> bytes:
    tree = torch.load(shard, weights_only=False)
    torch.save(tree, shard, _use_new_zipfile_serialization=False)
    return shard.read_bytes()


def test_a_legacy_file_has_exactly_its_length(trained: Trained) -> None:
    """Row 32."""
    root = trained()
    shard = root / "global_step8" / OPTIM
    whole = legacy(shard)
    status, _, said = call("set", "eps=1e-6", "-C", root, "--dry-run")
    assert status == 0, said
    for bad in (whole + bytes(1000), whole[:-1], whole[: len(whole) // 2]):
        shard.write_bytes(bad)
        refused(root, "show", 8, offset=True)
        refused(root, "set", "eps=1e-6", says=OPTIM, offset=True)


def test_code_in_the_header_of_a_legacy_file_is_refused(trained: Trained) -> None:
    """torch reads the four pickles around the object with the plain unpickler."""
    root = trained()
    shard = root / "global_step8" / OPTIM
    whole = legacy(shard)
    code = b"cposix\nsystem\nX\x0c\0\0\0touch CANARY\x85R0"
    shard.write_bytes(whole[:2] + code + whole[2:])
    refused(root, "show", 8, says="a header pickle names posix.system", offset=True)
    assert not Path("CANARY").exists()


def member(name: str, content: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def also_a_tar(whole: bytes) -> bytes:
    """A legacy file whose third pickle, about the system, is a string that makes the file a tar
    archive, too, with the members of torch's oldest format, whose object is {"lr": 666.0}."""
    stream, ends = io.BytesIO(whole), []
    for _ in range(3):
        for _ in pickletools.genops(stream):
            pass
        ends.append(stream.tell())
    info, rest = ends[1], whole[ends[2] :]
    none, number = pickle.dumps([], 2), pickle.dumps(0, 2)
    members = member("storages", number + none) + member("tensors", number)
    members += member("pickle", pickle.dumps({"lr": 666.0}, 2)) + bytes(2 * tarfile.BLOCKSIZE)
    start = info + 7
    head = bytearray(tarfile.TarInfo("x" * 90).tobuf(tarfile.USTAR_FORMAT))
    length = tarfile.BLOCKSIZE + len(members) - start
    head[:start] = whole[:info] + b"\x80\3B" + struct.pack("<I", length)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + members + b"." + rest


def test_a_legacy_file_that_torch_takes_for_a_tar_archive_is_refused(trained: Trained) -> None:
    """torch asks `tarfile` first: it would unpickle what the surgeon has never looked at."""
    root = trained()
    shard = root / "global_step8" / OPTIM
    whole = legacy(shard)
    shard.write_bytes(also_a_tar(whole))
    assert torch.load(shard, weights_only=False) == {"lr": 666.0}
    refused(root, "show", 8, says="for a tar archive", offset=True)
    refused(root, "set", "eps=1e-6", says="for a tar archive", offset=True)


def test_a_damaged_step_does_not_stand_in_the_way_of_a_rollback_to_another(
    trained: Trained,
) -> None:
    root = trained()
    (root / "global_step8" / OPTIM).write_bytes(b"PK\3\4")
    (root / "global_step8" / MODEL).write_bytes(b"")
    before = everything(root)
    assert call("rollback", "--to", 6, "-C", root, "--yes")[0] == 0
    assert call("undo", "-C", root, "--yes")[0] == 0
    after = everything(root)
    assert {n for n in before if "global_step" in n} <= set(after)
