"""Hostile pickles in a real shard: nothing runs or is written; the file and the byte are named."""

from __future__ import annotations

import pickle
import re
import struct
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.hostile.hostile_run import (
    MODEL,
    OPTIM,
    Damage,
    call,
    entry,
    first,
    harmless,
    instead,
    refused,
    text,
    with_pickle,
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
    "13 three million values": (first(b"N" + b"N0" * 3_000_000), "2000000 opcodes"),
    "14 a string cut short": (lambda data: P + b"X\xff\0\0\0abc", "does not fit"),
    "14 no STOP": (lambda data: data[:-1], "cut short"),
    "14 stack underflow": (first(b"R"), "lacks its values"),
    "14 GET of what is not there": (first(b"j\xf0\x0f\0\0"), "is not set"),
    "14 empty": (instead(b""), "cut short"),
    "14 no dict": (instead(P + b"N."), "no trainer saves"),
    "16 lr is NaN": (
        lambda data: re.sub(
            rb"(X\x02\0\0\0lrq.)G.{8}", rb"\1G" + struct.pack(">d", float("nan")), data, flags=re.S
        ),
        "lr is nan",
    ),
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

RANKS = {
    "-1": b"J\xff\xff\xff\xff",
    "2^40": b"\x8a\x06\0\0\0\0\0\1",
    "text": text("many"),
    "true": b"\x88",
}


def check(root: Path, file: str, says: str) -> None:
    for words in (["show", 8], ["set", "eps=1e-6"], ["rollback", "--to", 8, "--set", "eps=1e-6"]):
        said = refused(root, *words, says=says)
        assert file in said
        assert ": byte " in said or "no trainer saves" in said, said


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_file_and_byte(trained: Trained, name: str) -> None:
    root = trained()
    damage, says = REFUSED[name]
    with_pickle(root / "global_step8" / OPTIM, damage)
    check(root, OPTIM, says)


@pytest.mark.parametrize("name", CODE)
def test_code_is_named_by_show_and_not_written(
    trained: Trained, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained()
    damage, says = CODE[name]
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    with_pickle(root / "global_step8" / OPTIM, damage)
    out = harmless(root, "show", 8)
    assert re.search(rf"{OPTIM} names\s+{re.escape(says)}", out), out
    for words in (["set", "eps=1e-6"], ["repair-latest"], ["reset", "moments"]):
        if words[0] != "repair-latest":
            assert says in refused(root, *words, says="--allow-global")
    (root / "latest").write_text("global_step6")
    refused(root, "repair-latest", "--to", 8, says=says)
    (root / "latest").write_text("global_step8")
    done = call("set", "eps=1e-6", "-C", root, "--yes", "--allow-global", says)
    assert done[0] == 0, done
    assert says in done[1]
    assert call("undo", "-C", root, "--yes")[0] == 0
    assert not list((tmp_path / "cwd").iterdir())


@pytest.mark.parametrize("name", RANKS)
def test_a_world_size_that_is_none_is_refused(trained: Trained, name: str) -> None:
    root = trained()
    place = re.compile(re.escape(text("dp_world_size")) + rb"r.{4}K\x01", re.DOTALL)

    def damage(data: bytes) -> bytes:
        return place.sub(lambda match: match[0][:-2] + RANKS[name], data)

    with_pickle(root / "global_step8" / MODEL, damage)
    check(root, MODEL, "ranks is")


BOMB = (
    b"]r\xe8\3\0\0"
    + b"".join(
        b"0]r" + SHORT(1001 + i) + (b"j" + SHORT(1000 + i) + b"a") * 2 for i in range(40)
    )
)  # fmt: skip
"""40 lists of two references to the list before: a walk that goes through both never ends."""


SAFE: dict[str, Damage] = {
    "11 a memo bomb": entry(BOMB),
    "12 a list that contains itself": entry(b"]r\xe8\3\0\0j\xe8\3\0\0a"),
    "12 a dict that contains itself": entry(b"}r\xe8\3\0\0K\1j\xe8\3\0\0s"),
}


@pytest.mark.parametrize("name", SAFE)
def test_it_is_read_without_a_walk_that_does_not_end(trained: Trained, name: str) -> None:
    root = trained()
    for file in (OPTIM, MODEL):
        with_pickle(root / "global_step8" / file, SAFE[name])
    harmless(root, "show", 8)
    for words in (["set", "eps=1e-6"], ["reset", "moments"]):
        harmless(root, *words, "--dry-run")


@pytest.mark.parametrize("field", ["lr_scheduler", "skip_train_iteration_range", "iteration"])
def test_a_bomb_in_a_field_that_is_read_is_refused(trained: Trained, field: str) -> None:
    root = trained()
    with_pickle(root / "global_step8" / MODEL, lambda data: data[:-1] + text(field) + BOMB + b"s.")
    check(root, MODEL, "is of type list")


def test_a_bomb_in_a_param_group_is_refused(trained: Trained) -> None:
    root = trained()
    place = re.compile(rb"(X\x03\0\0\0epsq.)G.{8}", re.DOTALL)
    filler = b"N0" * 1000  # memo indices lie below the number of bytes before them
    with_pickle(
        root / "global_step8" / OPTIM,
        lambda data: place.sub(lambda m: m[1] + filler + BOMB, data, count=1),
    )
    check(root, OPTIM, "eps is of type list")


def test_a_key_that_is_there_twice_is_not_set(trained: Trained) -> None:
    """Row 15: the last one is what a trainer reads."""
    root = trained()
    place = re.compile(rb"(X\x03\0\0\0epsq.)(G.{8})", re.DOTALL)
    with_pickle(
        root / "global_step8" / OPTIM,
        lambda data: place.sub(lambda m: m[0] + text("eps") + m[2], data, count=1),
    )
    harmless(root, "show", 8)
    refused(root, "set", "eps=1e-6", says="is twice in one dict", offset=True)


def test_a_tensor_of_2_to_the_50_is_not_reset(trained: Trained) -> None:
    """Row 17: it would be filled with zeros beyond its storage."""
    root = trained()
    place = re.compile(rb"(QK\0)M..(\x85)", re.DOTALL)
    huge = rb"\1" + b"\x8a\x07" + (1 << 50).to_bytes(7, "little") + rb"\2"
    with_pickle(root / "global_step8" / OPTIM, lambda data: place.sub(huge, data))
    refused(root, "reset", "moments", says="leaves the storage", offset=True)


def test_the_canary_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(P + b"cposix\nsystem\n" + TOUCH + b"R.")
    assert (tmp_path / "CANARY").exists()
