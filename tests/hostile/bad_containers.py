"""Archives that lie about what is in them: each with what its refusal says."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable

from tests.hostile.hostile_run import OPTIM

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
    "31 no bytes": (lambda data: b"", "it is empty"),
    "31 all zeros": (lambda data: bytes(len(data)), "no pickle"),
    "a TorchScript program": (rewritten(same, ("constants.pkl", b"", 0)), "TorchScript"),
}
