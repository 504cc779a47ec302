"""A real run with one bad file in it, and what every command must do with it."""

from __future__ import annotations

import io
import os
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from ckptsurgeon.cli import app
from ckptsurgeon.logs.tensorboard.crc32c import masked
from tests.support.snapshot import exact_snapshot

OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
TURNS = 100_000
LOOPS = 1000
"""What a bad input may cost, whatever it says of itself: this many bare loops of TURNS turns."""
Damage = Callable[[bytes], bytes]


def call(*words: object, **env: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process; a traceback fails the test, and so
    does the CPU time of LOOPS bare loops, which the same machine runs at the same moment."""
    runner = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "100", **env})
    began = time.process_time()
    result = runner.invoke(app, [str(word) for word in words])
    spent = time.process_time() - began
    assert spent < LOOPS * bare_loop()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def bare_loop() -> float:
    """Seconds of CPU that a loop of TURNS turns takes here and now."""
    began = time.process_time()
    stack: list[None] = []
    for _ in range(TURNS):
        stack.append(None)
        stack.pop()
    return time.process_time() - began


def refused(root: Path, *words: object, says: str = "", code: int = 1, offset: bool = False) -> str:
    """The command is refused in three lines and leaves every byte, name and time as it was."""
    before = exact_snapshot(root)
    status, out, said = call(*words, "-C", root, *(() if words[0] == "show" else ("--yes",)))
    assert status == code, f"{words}: exit {status}\n{out}{said}"
    labels = [line.split(":")[0] for line in said.splitlines() if not line.startswith(" ")]
    labels = [label for label in labels if label not in ("staging", "editing")]
    assert labels == ["error", "untouched", "next"], said
    assert out == ""
    assert says in said, said
    if offset:
        assert ": byte " in said, said
    assert exact_snapshot(root) == before
    return said


def harmless(root: Path, *words: object) -> str:
    """The command succeeds, and leaves every byte, name and time as it was."""
    before = exact_snapshot(root)
    status, out, said = call(*words, "-C", root)
    assert status == 0, said
    assert exact_snapshot(root) == before
    return out


def with_pickle(shard: Path, damage: Damage) -> None:
    """Rewrite the shard with another data.pkl; what else is in it stays, with correct CRCs."""
    original = zipfile.ZipFile(io.BytesIO(shard.read_bytes()))
    with zipfile.ZipFile(shard, "w", zipfile.ZIP_STORED) as archive:
        for info in original.infolist():
            data = original.read(info)
            if info.filename.endswith("/data.pkl"):
                data = damage(data)
            archive.writestr(zipfile.ZipInfo(info.filename), data)


def text(value: str) -> bytes:
    """The opcode that pushes `value`."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def first(payload: bytes, *, protocol: int | None = None) -> Damage:
    """`payload` pushes one value before anything else; it is dropped, and the shard is whole."""

    def damage(data: bytes) -> bytes:
        head = data[:2] if protocol is None else bytes([0x80, protocol])
        return head + payload + b"0" + data[2:]

    return damage


def entry(payload: bytes) -> Damage:
    """One more key of the shard's dict, whose value `payload` pushes."""

    def damage(data: bytes) -> bytes:
        assert data.endswith(b"u.")
        return data[:-1] + text("more") + payload + b"s."

    return damage


def instead(data: bytes) -> Damage:
    """`data` is the whole pickle."""
    return lambda _: data


def replaced(old: bytes, new: bytes) -> Damage:
    """Every `old` in the pickle becomes `new`."""

    def damage(data: bytes) -> bytes:
        assert old in data, old
        return data.replace(old, new)

    return damage


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def events(root: Path) -> Path:
    return next((root / "tensorboard").glob("*tfevents*"))


def record(length: int) -> bytes:
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked(head))
