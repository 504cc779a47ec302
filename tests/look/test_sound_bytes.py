"""verify at levels 3 and 4: flipped bits, holes, values that no optimizer makes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import chunked
from ckptsurgeon import Run, look
from ckptsurgeon.look import soundness
from ckptsurgeon.look.soundness import CRC, MEANING, NAMES, VALUES, Shard, inspect
from tests.conftest import Trained
from tests.look.conftest import OPTIM, change, flip, found, one, payloads
from tests.support.torch_files import load_shard, same, shards

LEVELS = range(NAMES, VALUES + 1)


def test_a_flipped_bit_that_torch_loads_is_found_at_level_3(trained: Trained) -> None:
    root = trained(ranks=2)
    path = root / "global_step8" / OPTIM.format(1)
    flip(path, "data/1")
    load_shard(path)
    assert found(root, MEANING) == ()
    start = payloads(path)["data/1"][0]
    one(found(root, CRC), str(path), f"byte {start}: the record 'data/1'", "has CRC")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder that is no disk, where there is one."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder)


def damaged(data: bytes, chance: random.Random) -> tuple[bytes, list[int]]:
    """One flip, zeroed hole or truncation, and the offsets that differ."""
    kind, at = chance.choice("fffffffzzt"), chance.randrange(len(data))
    if kind == "t":
        return data[:at], []
    out = bytearray(data)
    if kind == "f":
        out[at] ^= 1 << chance.randrange(8)
    else:
        end = min(len(data), at + chance.choice((16, 512, 4096)))
        out[at:end] = bytes(end - at)
    return bytes(out), [i for i in range(at, min(at + 4096, len(out))) if out[i] != data[i]]


@pytest.mark.long
def test_a_thousand_flips_holes_and_truncations(trained: Trained, memory: Path) -> None:
    """Every one that touches a byte with a CRC, or cuts the file, is found. What is not found is
    in padding: torch then loads the same values."""
    chance = random.Random(7)
    protected = unnoticed = 0
    for path in shards(trained()):
        copy = memory / path.name
        data, values = path.read_bytes(), load_shard(path)
        ranges = list(payloads(path).values())
        for _ in range(500):
            bad, offsets = damaged(data, chance)
            if bad == data:
                continue
            copy.write_bytes(bad)
            shard = Shard(copy)
            inspect(shard, CRC)
            covered = any(s <= offset < e for offset in offsets for s, e in ranges)
            protected += covered or not offsets
            if not shard.findings:
                assert not covered and offsets, offsets
                assert same(load_shard(copy), values), offsets
                unnoticed += 1
            assert all(text.startswith(f"{copy}: byte ") for text in shard.findings)
    assert protected > 800
    assert unnoticed < 50


@pytest.mark.parametrize("legacy", [True, False])
def test_bytes_without_a_crc_are_counted_and_are_no_damage(trained: Trained, legacy: bool) -> None:
    root = trained()
    path = root / "global_step8" / OPTIM.format(0)
    states = load_shard(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(states, path, _use_new_zipfile_serialization=not legacy)
    finally:
        torch.serialization.set_crc32_options(True)
    told = look.verify(Run.open(root), level=CRC)
    assert told.findings == ()
    assert told.no_crc is not None
    assert told.no_crc > 0.9 * path.stat().st_size


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("exp_avg", float("nan"), "NaN or Inf"),
        ("exp_avg_sq", float("inf"), "NaN or Inf"),
        ("exp_avg_sq", -1e-9, "negative numbers"),
    ],
)
def test_a_moment_that_no_optimizer_makes_is_found_by_its_byte(
    trained: Trained, kind: str, value: float, says: str
) -> None:
    root = trained()
    path = root / "global_step8" / OPTIM.format(0)

    def poison(outer: dict[str, Any]) -> None:
        outer["base_optimizer_state"]["state"][0][kind][100] = value

    change(path, poison)
    assert found(root, CRC) == ()
    record = "data/1" if kind == "exp_avg" else "data/2"
    offset = payloads(path)[record][0] + 400
    one(
        found(root, VALUES), f"{path}: byte {offset}: the record '{record}' ({kind})", says, " 1 of"
    )


def test_a_weight_of_bfloat16_that_is_infinite_is_found(trained: Trained) -> None:
    root = trained(dtype="bf16")
    path = root / "global_step8" / "mp_rank_00_model_states.pt"
    states = load_shard(path)
    next(v for v in states["module"].values() if v.dtype == torch.bfloat16).view(-1)[3] = -torch.inf
    torch.save(states, path)
    one(found(root, VALUES), "mp_rank_00_model_states.pt: byte ", "NaN or Inf: 1 of")


def test_the_memory_does_not_grow_with_the_shard(trained: Trained, memory: Path) -> None:
    root = memory / "run"
    shutil.copytree(trained(), root, ignore=shutil.ignore_patterns("global_step[246]"))
    layer = root / "global_step8" / "layer_01-model_00-model_states.pt"
    torch.save({"w": torch.ones(80 << 20, dtype=torch.float32)}, layer)
    code = (
        "import sys; from pathlib import Path; from ckptsurgeon import Run, look\n"
        f"found = look.verify(Run.open(Path({str(root)!r})), level=4)\n"
        "print(len(found.findings), 'torch' in sys.modules)\n"
        "print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    answer, peak = done.stdout.splitlines()
    assert answer == "0 False"
    assert int(peak) < 256 << 10


def test_archives_inside_larger_files_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, alive, most = chunked.make(tmp_path, 4, 20), list[weakref.ref[Shard]](), 0

    def watched(shard: Shard, level: int) -> None:
        nonlocal most
        alive.append(weakref.ref(shard))
        most = max(most, sum(each() is not None for each in alive))
        inspect(shard, level)

    monkeypatch.setattr(soundness, "BATCH", 16)
    monkeypatch.setattr(soundness, "inspect", watched)
    findings = found(tmp_path, CRC)
    lost = [text for text in findings if "no pickle" in text]
    assert len(alive) > chunks == 240
    assert len(lost) == len(findings) == 4 * 3 * (20 - chunked.WRITTEN)
    assert most <= 2 * 16


# --- the command ---------------------------------------------------------------------------------
