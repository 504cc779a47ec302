"""Pickles that no trainer saves: each with what its refusal says."""

from __future__ import annotations

import re
import struct

from tests.hostile.hostile_run import (
    Damage,
    entry,
    first,
    instead,
    text,
)

P = b"\x80\x02"
TOUCH = text("touch CANARY") + b"\x85"
CODE: dict[str, tuple[Damage, str]] = {
    "1 os.system by REDUCE": (first(b"cposix\nsystem\n" + TOUCH + b"R"), "posix.system"),
    "2 eval by REDUCE and BUILD": (
        entry(b"c__builtin__\neval\n" + text("open('CANARY','w')") + b"\x85R}b"),
        "__builtin__.eval",
    ),
    "3 STACK_GLOBAL from the memo": (
        entry(
            text("posix") + b"r\xe8\3\0\0" + text("system") + b"r\xe9\3\0\0" + b"00"
            b"j\xe8\3\0\0j\xe9\3\0\0\x93" + TOUCH + b"R"
        ),
        "posix.system",
    ),
    "a class of the user's own": (
        entry(b"cmytrainer.state\nState\n)\x81"),
        "mytrainer.state.State",
    ),
    "a module that ends in a known class": (
        entry(b"cevil\nDynamicLossScaler\n)\x81"),
        "evil.DynamicLossScaler",
    ),
    "torch's own loader": (entry(b"ctorch.hub\nload\n" + TOUCH + b"R"), "torch.hub.load"),
    "NEWOBJ": (entry(b"csubprocess\nPopen\n" + TOUCH + b"\x81"), "subprocess.Popen"),
}
SHORT = struct.Struct("<I").pack


def nan_rate(data: bytes) -> bytes:
    """With another lr in the param groups."""
    nan = struct.pack(">d", float("nan"))
    return re.sub(rb"(X\x02\0\0\0lrq.)G.{8}", rb"\1G" + nan, data, flags=re.S)


REFUSED: dict[str, tuple[Damage, str]] = {
    "4 a computed callable": (
        first(b"c__builtin__\ngetattr\ncposix\n__dict__\n" + text("x") + b"\x86R)R"),
        "not a named global",
    ),
    "5 INST": (first(b"(ios\nsystem\n"), "opcode 0x69"),
    "5 OBJ": (first(b"(cos\nsystem\no"), "opcode 0x6f"),
    "5 EXT1": (first(b"\x82\x01"), "opcode 0x82"),
    "5 PERSID": (first(b"P../../etc/passwd\n"), "opcode 0x50"),
    "5 NEXT_BUFFER": (first(b"\x97", protocol=5), "opcode 0x97"),
    "6 code, then garbage": (
        lambda data: P + b"cposix\nsystem\n" + TOUCH + b"R0" + b"\xff" * 99,
        "opcode 0xff",
    ),
    "7 memo index 2^27": (first(b"Nr\xff\xff\xff\x07"), "memo index"),
    "7 memo index 2^32": (first(b"Nr\xff\xff\xff\xff"), "memo index"),
    "8 a string of 2^62 bytes": (
        first(b"\x8d" + struct.pack("<Q", 1 << 62), protocol=4),
        "does not fit",
    ),
    "8 bytes of 8 GB": (first(b"\x8e" + struct.pack("<Q", 8 << 30), protocol=4), "does not fit"),
    "9 an integer of 1 MB": (first(b"\x8b" + SHORT(1 << 20) + b"\x7f" * (1 << 20)), "an integer"),
    "9 an integer of a million digits": (first(b"I" + b"7" * 1_000_000 + b"\n"), "opcode 0x49"),
    "10 a million nested lists": (first(b"]" * 10**6 + b"a" * (10**6 - 1)), "1000 levels"),
    "10 100,000 nested tuples": (first(b")" + b"\x85" * 10**5), "1000 levels"),
    "13 three million marks": (first(b"(" * 3_000_000), "1000 marks"),
    "13 three million DUPs": (first(b"N" + b"2" * 3_000_000), "opcode 0x32"),
    "13 three million values": (first(b"N" + b"N0" * 3_000_000), "the pickle has more than 266"),
    "14 a string cut short": (lambda data: P + b"X\xff\0\0\0abc", "does not fit"),
    "14 no STOP": (lambda data: data[:-1], "cut short"),
    "14 stack underflow": (first(b"R"), "lacks its values"),
    "14 GET of what is not there": (first(b"j\xf0\x0f\0\0"), "is not set"),
    "14 empty": (instead(b""), "it is empty"),
    "14 no dict": (instead(P + b"N."), "is not understood here"),
    "18 a storage that climbs": (
        lambda data: re.sub(rb"X\x01\0\0\0[0-9](q|r)", text("../../etc/passwd") + rb"\1", data),
        "etc/passwd",
    ),
    "19 protocol 99": (lambda data: b"\x80\x63" + data[2:], "protocol 2 to 5"),
    "19 a frame of 2^63": (
        lambda data: b"\x80\x04\x95" + struct.pack("<Q", (1 << 63) - 1) + data[2:],
        "a frame of",
    ),
}
