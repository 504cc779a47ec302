"""What the tests of verify and of vital signs share: a real engine's run, and what is found."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look
from ckptsurgeon.look.soundness import MEANING
from tests.conftest import once
from tests.support.snapshot import snapshot
from tests.support.torch_files import load_shard

LAST, EARLIER = 240, 200
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def facts(root: Path, step: int | None = None, against: int | None = None) -> tuple[str, ...]:
    """What the vital signs of a step say against it."""
    return look.verify(Run.open(root), step, level=4, against=against).findings


@pytest.fixture(scope="session")
def engines(shared: Path) -> Path:
    """A bf16 run of a real engine; every step around the last two is saved. Nobody changes it."""
    from tests.support import deepspeed_engine

    def train(folder: Path) -> None:
        with deepspeed_engine.process_group():
            engine = deepspeed_engine.build(deepspeed_engine.Options(dtype="bf16", model="wide"))
            for step in (*range(1, 7), EARLIER, *range(LAST - 2, LAST + 1)):
                deepspeed_engine.train(engine, step - engine.global_steps)
                client = deepspeed_engine.client(step)
                engine.save_checkpoint(str(folder / "run"), client_state=client)

    return once(shared / "vitals", train) / "run"


def found(root: Path, level: int = MEANING, step: int | None = None) -> tuple[str, ...]:
    """The findings; reading them changes no byte and no time."""
    before = snapshot(root)
    findings = look.verify(Run.open(root), step, level=level).findings
    assert snapshot(root) == before
    return findings


def one(findings: tuple[str, ...], *words: str) -> None:
    (finding,) = findings
    for word in words:
        assert word in finding


def change(path: Path, edit: Any) -> None:
    states = load_shard(path)
    edit(states["optimizer_state_dict"])
    torch.save(states, path)


def payloads(path: Path) -> dict[str, tuple[int, int]]:
    """Where the bytes of each record are, as Python's zipfile sees it."""
    out = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            lengths = file.read(4)
            start = info.header_offset + 30 + sum(lengths[::2]) + 256 * sum(lengths[1::2])
            out[info.filename.partition("/")[2]] = (start, start + info.file_size)
    return out


def flip(path: Path, record: str, bit: int = 5) -> int:
    """Flip one bit in the middle of a record; the offset of its byte."""
    offset = sum(payloads(path)[record]) // 2
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
    return offset
