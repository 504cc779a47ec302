"""verify: what each level finds, on checkpoints of the real trainer, and that it writes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import chunked
from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.look import soundness
from ckptsurgeon.look.soundness import CRC, MEANING, NAMES, VALUES, Shard, inspect
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.snapshot import snapshot
from tests.support.torch_files import load_shard, same, shards

LEVELS = range(NAMES, VALUES + 1)
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


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


# --- sound ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "zero", "dtype"), [(1, 1, "fp32"), (2, 1, "fp32"), (1, 0, "fp32"), (1, 1, "bf16")]
)
def test_what_the_trainer_saved_is_sound_at_all_levels(
    trained: Trained, ranks: int, zero: int, dtype: str
) -> None:
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    for level in LEVELS:
        told = look.verify(Run.open(root), level=level)
        assert (told.findings, told.level) == ((), level)
        assert told.no_crc == (None if level == NAMES else 0)
        assert (told.moments is None) == (level < VALUES)


def test_the_norms_are_those_of_all_shards(trained: Trained) -> None:
    root = trained(ranks=2)
    told = look.verify(Run.open(root), level=VALUES)
    states = [
        state
        for path in shards(root)
        if "optim" in path.name
        for optimizer in [load_shard(path)["optimizer_state_dict"]]
        for state in optimizer["base_optimizer_state"]["state"].values()
    ]
    assert told.moments is not None
    for name, moment in told.moments.items():
        values = torch.cat([state[name] for state in states]).double().abs()
        assert moment.l1 == pytest.approx(values.sum().item(), rel=1e-9)
        assert moment.max == values.max().item()


def test_surgeries_leave_a_sound_checkpoint(trained: Trained) -> None:
    root = trained(ranks=2)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"reset": ["moments"], "set": {"lr": 5e-4}})))
    assert all(found(root, level) == () for level in LEVELS)
    surgery.apply(run, surgery.plan_compact(run))
    assert all(found(root, level) == () for level in LEVELS)
    moments = look.verify(run, level=VALUES).moments
    assert moments is not None
    assert [(moment.l1, moment.max) for moment in moments.values()] == [(0, 0), (0, 0)]


# --- names and meaning ---------------------------------------------------------------------------


def test_missing_and_foreign_ranks_are_named(trained: Trained) -> None:
    folder = trained(ranks=2) / "global_step8"
    (folder / OPTIM.format(1)).rename(folder / OPTIM.format(7))
    missing, foreign = found(folder.parent, NAMES)
    assert missing == f"global_step8: missing: {OPTIM.format(1)}"
    assert foreign.startswith(OPTIM.format(7))


def test_a_layer_file_lacks_for_one_tensor_rank(trained: Trained) -> None:
    folder = trained() / "global_step8"
    for layer, rank in ((1, 0), (1, 1), (3, 0)):
        torch.save({"w": torch.rand(64)}, folder / f"layer_0{layer}-model_0{rank}-model_states.pt")
    one(found(folder.parent, NAMES), "missing: layer_03-model_01-model_states.pt")
    flip(folder / "layer_01-model_01-model_states.pt", "data/0")
    assert len(found(folder.parent, MEANING)) == 1
    assert "layer_01-model_01-model_states.pt: byte " in found(folder.parent, CRC)[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shard_of_another_step_is_found(trained: Trained, ranks: int) -> None:
    root = trained(ranks=ranks)
    name = OPTIM.format(ranks - 1)
    shutil.copy(root / "global_step2" / name, root / "global_step8" / name)
    findings = found(root)
    assert any("Adam step" in text or "adam_step" in text for text in findings)
    if ranks == 2:
        assert any(f"adam_step: 2 in {name}" in text or name in text for text in findings)
    assert found(root, step=4) == ()


def test_a_model_file_of_another_step_is_found(trained: Trained) -> None:
    root = trained()
    name = "mp_rank_00_model_states.pt"
    shutil.copy(root / "global_step4" / name, root / "global_step8" / name)
    assert f"{name}: holds step 4, not 8" in found(root)


def test_a_shard_of_another_world_size_is_found(trained: Trained, _originals: Any) -> None:
    root = trained()
    other = _originals(2, 1, "fp32") / "global_step8" / OPTIM.format(0)
    shutil.copy(other, root / "global_step8" / OPTIM.format(0))
    findings = found(root)
    assert f"{OPTIM.format(0)}: is one of 2 data-parallel partitions, not of 1" in findings


def change(path: Path, edit: Any) -> None:
    states = load_shard(path)
    edit(states["optimizer_state_dict"])
    torch.save(states, path)


def _gap(outer: dict[str, Any]) -> None:
    list(outer["param_slice_mappings"][0].values())[1].numel -= 1


def _overlap(outer: dict[str, Any]) -> None:
    list(outer["param_slice_mappings"][0].values())[1].numel += 1


def _end(outer: dict[str, Any]) -> None:
    outer["param_slice_mappings"][1].popitem()


def _beyond(outer: dict[str, Any]) -> None:
    list(outer["param_slice_mappings"][1].values())[-1].numel += 1


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_gap, "param group 0: no parameter has the elements"),
        (_overlap, "overlaps what ends at"),
        (_end, "param group 1: no parameter has the elements"),
        (_beyond, "the parameters end at element"),
    ],
)
def test_mappings_cover_the_flat_partition(trained: Trained, edit: Any, says: str) -> None:
    root = trained(ranks=2)
    name = OPTIM.format(0)
    change(root / "global_step8" / name, edit)
    one(found(root), name, says)


def test_one_shard_of_a_thousand_that_differs_is_named(trained: Trained) -> None:
    root = trained()
    shutil.rmtree(root / "global_step2")
    folder = root / "global_step8"

    def count(outer: dict[str, Any]) -> None:
        outer["partition_count"] = [1000, 1000]

    first = folder / OPTIM.format(0)
    change(first, count)
    model = load_shard(folder / "mp_rank_00_model_states.pt") | {"dp_world_size": 1000}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(1, 1000):
        os.link(first, folder / OPTIM.format(rank))
    for level in (NAMES, MEANING):
        assert look.verify(Run.open(root), level=level).findings == ()
    other = folder / OPTIM.format(617)
    states = load_shard(other)
    other.unlink()
    states["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]["lr"] = 1.5
    torch.save(states, other)
    (finding,) = look.verify(Run.open(root)).findings
    assert finding.startswith("shards disagree on lr of param group 1: ")
    assert finding.endswith(f" in 999 shards, 1.5 in {other.name}")


def test_a_value_without_end_is_compared_all_the_same(trained: Trained) -> None:
    root = trained(ranks=2)
    endless: list[Any] = []
    endless.append(endless)
    wide: list[Any] = [0]
    for _ in range(40):
        wide = [wide, wide]
    for scale in (endless, wide):
        path = root / "global_step8" / OPTIM.format(0)
        change(path, lambda outer, scale=scale: outer.update(dynamic_loss_scale=scale))
        assert any("dynamic_loss_scale" in finding for finding in found(root))


# --- bytes ---------------------------------------------------------------------------------------


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


def test_the_command_says_level_and_exits_4(trained: Trained) -> None:
    root = trained()

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ckptsurgeon", "verify", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True)

    assert typed("--level", "4", "--jobs", "2").stdout.startswith(
        "sound: step 8: 2 files, deepspeed, level 4\n"
    )
    assert typed("--level", "5").returncode == 2
    flip(root / "global_step8" / OPTIM.format(0), "data/2")
    assert typed().returncode == 0
    bad = typed("--level", "3")
    assert bad.returncode == 4
    assert "not sound: step 8: 2 files, deepspeed, level 3, 1 finding\n" in bad.stdout
    document = json.loads(typed("--level", "3", "--json").stdout)
    assert (document["sound"], document["level"], document["no_crc"]) == (False, 3, 0)
