"""Offline runs as W&B writes them, without it: what `tests/formats/test_wandb.py` has of it."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptsurgeon.logs.tensorboard.wire import as_varint, delimited

BLOCK = 32768


def bytes_field(number: int, content: bytes) -> bytes:
    return delimited(number << 3 | 2, content)


def item(name: str, value: object) -> bytes:
    return bytes_field(2, name.encode()) + bytes_field(16, json.dumps(value).encode())


def history(values: Mapping[str, object]) -> bytes:
    """A point, with the step that W&B counts."""
    own = bytes_field(2, as_varint(1 << 3) + as_varint(int(str(values["_step"]))))
    return bytes_field(2, b"".join(bytes_field(1, item(*pair)) for pair in values.items()) + own)


def summary(values: Mapping[str, object]) -> bytes:
    return bytes_field(3, b"".join(bytes_field(1, item(*pair)) for pair in values.items()))


def stats(time: int, value: float) -> bytes:
    stamp = bytes_field(2, as_varint(1 << 3) + as_varint(time))
    return bytes_field(7, stamp + bytes_field(3, item("cpu", value)))


def of_run(id: str) -> bytes:
    return bytes_field(17, bytes_field(1, id.encode()) + bytes_field(3, b"project"))


def framed(records: Iterable[bytes]) -> bytes:
    """A file of these records, written without the code that is tested."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for data in records:
        first = True
        while True:
            left = BLOCK - len(out) % BLOCK
            if left < 7:
                out += bytes(left)
                continue
            part, data = data[: left - 7], data[left - 7 :]
            kind = (1 if first else 4) if not data else (2 if first else 3)
            crc = zlib.crc32(bytes([kind]) + part)
            out += struct.pack("<IHB", crc, len(part), kind) + part
            first = False
            if not data:
                break
    return bytes(out)


def unframed(data: bytes) -> list[bytes]:
    """The records of a file, every checksum checked."""
    assert data[:7] == b":W&B\xe1\xbe\x00"
    records, at, part = [], 7, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            assert not any(data[at : at + left])
            at += left
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, at)
        content = data[at + 7 : at + 7 + length]
        assert zlib.crc32(bytes([kind]) + content) == crc
        assert (kind in (1, 2)) == (part == b"" or kind in (1, 2))
        part += content
        at += 7 + length
        if kind in (1, 4):
            records.append(part)
            part = b""
    assert part == b""
    return records


def write_run(
    root: Path,
    steps: Iterable[int],
    *,
    id: str = "abc",
    time: int = 1_700_000_000,
    more: Mapping[str, object] | None = None,
    online: bool = False,
) -> Path:
    """The file of one start of a trainer that logs each of these steps, a second apart; `online`
    is sent while it is logged."""
    folder = root / "wandb" / f"{'' if online else 'offline-'}run-{time}-{id}"
    folder.mkdir(parents=True)
    records = [bytes_field(21, b""), of_run(id)]
    for i, step in enumerate(steps):
        values = {"train/global_step": step, "loss": 2 / step, **(more or {})}
        own = {"_timestamp": float(time + i), "_step": i}
        records += [summary({**values, **own}), history({**values, **own})]
        records.append(stats(time + i, float(i)))
    records.append(bytes_field(18, b""))
    path = folder / f"run-{id}.wandb"
    path.write_bytes(framed(records))
    return path
