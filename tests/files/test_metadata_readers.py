"""Both readers of `.metadata` refuse the same, and no shape costs more than torch's longest."""

from __future__ import annotations

import json
import pickletools
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import chunked
from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.safetensors import SafetensorsFile
from ckptsurgeon.files.pickles.tree import axes
from tests.support.dcp_tables import (
    RANKS,
    TENSORS,
    as_any_pickle,
    generally,
    metadata,
    natively,
    needs_native,
    outcome,
    told,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    chunked.make(tmp_path / "run", TENSORS, RANKS)
    return tmp_path / "run"


ODD = (
    b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"\x8a\x08" + b"\0" * 7 + b"\x80", b"\x8a\x09" + b"\xff" * 8 + b"\0", b"\x8a\x00", b"N",
    b"\x88", b")", b"]", b"}", b"X\x03\0\0\0abc", b"X\x03\0\0\0\xed\xa0\x80",
)  # fmt: skip
"""Values that may stand where another stood: numbers at the ends of their ranges among them."""


def rebuilt(data: bytes, chance: random.Random) -> bytes:
    """The pickle with one or two of its opcodes left out, doubled, moved or replaced."""
    starts = [position for _, _, position in pickletools.genops(data)]
    words = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(chance.choice((1, 1, 2))):
        i = chance.randrange(2, len(words) - 1)
        kind = chance.randrange(5)
        if kind == 0:
            words[i] = chance.choice(ODD)
        elif kind == 1:
            words[i] = chance.choice(words)
        elif kind == 2:
            del words[i]
        elif kind == 3:
            words.insert(i, chance.choice((words[i], *ODD)))
        else:
            words[i], words[i - 1] = words[i - 1], words[i]
    return b"".join(words)


@needs_native
@pytest.mark.parametrize("rounds", [300, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.long
def test_both_readers_agree_on_any_order_of_opcodes(
    tmp_path: Path, protocol: int, rounds: int
) -> None:
    chunked.make(tmp_path, 2, 2, protocol)
    path, chance, accepted = metadata(tmp_path), random.Random(31), 0
    good = path.read_bytes()
    for _ in range(rounds):
        path.write_bytes(rebuilt(good, chance))
        found, other = natively(path), generally(path)
        if found is not None:
            accepted += 1
            assert told(found) == other, path.read_bytes()
    assert accepted


@pytest.mark.parametrize("by", [natively, as_any_pickle])
@pytest.mark.parametrize(
    "long", [b"\x8a\x09" + b"\xff" * 8 + b"\0", b"\x8a\x08" + b"\xff" * 7 + b"\x7f"]
)
def test_a_number_beyond_63_bits_is_damage(
    root: Path, long: bytes, by: Callable[[Path], Any]
) -> None:
    path = metadata(root)
    good = path.read_bytes()
    for opcode, number, at in pickletools.genops(good):
        if opcode.name == "BININT2" and number:
            path.write_bytes(good[:at] + long + good[at + 3 :])
            found = outcome(lambda: by(path))
            assert found in (None, DamagedFile) or told(found) == generally(path)


def test_a_global_that_is_no_text_is_damage(root: Path) -> None:
    path = metadata(root)
    name = b"X\x03\0\0\0\xed\xa0\x80"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"0" + name + name + b"\x93.")
    assert natively(path) is None and generally(path) is DamagedFile


def test_no_tensor_has_more_axes_than_torch_makes(tmp_path: Path) -> None:
    ones = (1,) * 65
    with pytest.raises(ValueError, match="64"):
        axes(ones)
    with pytest.raises(ValueError, match="63 bits"):
        axes((1 << 63, 2))
    assert axes(ones[:64]) == ones[:64]
    header = json.dumps({"w": {"dtype": "U8", "shape": [1] * 200_000, "data_offsets": [0, 1]}})
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0")
    with pytest.raises(DamagedFile, match="axes"):
        SafetensorsFile.open(path)


def test_an_offset_that_is_no_number_is_damage(tmp_path: Path) -> None:
    cut = json.dumps({"w": {"saved_offsets": [1e999]}}).replace("Infinity", "1e999")
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"w": entry, "__metadata__": {"DCP_SHARDING_INFO": cut}})
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0")
    with pytest.raises(DamagedFile, match="OverflowError"):
        SafetensorsFile.open(path)
