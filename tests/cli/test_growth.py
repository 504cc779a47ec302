"""A step, receipt, event file or stray file costs as much in a run of many as in one of few."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.transplant import ranks
from ckptsurgeon.formats import Place
from ckptsurgeon.formats.fields.columns import Column
from ckptsurgeon.logs.tensorboard.crc32c import masked
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.transaction.kept import document
from ckptsurgeon.transaction.receipts import contents, records
from tests.cli.conftest import Surgeon, invoke
from tests.support.counted import counted, linear
from tests.support.tiny_run import GROUP, LAMBDA_LR, make_run, write_torch_file

SIZES = [(6, 12, 80), pytest.param((50, 100, 1000), marks=pytest.mark.slow)]
FEW = 2
ADAM = {"state": {0: {"step": 1.0}}, "param_groups": [{**GROUP, "params": [0]}]}


def hugging_face(root: Path, steps: int) -> None:
    make_run(root, range(1, steps + 1))


def accelerate(root: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        folder = root / f"checkpoint_{step}"
        folder.mkdir(parents=True)
        write_torch_file(folder / "optimizer.bin", ADAM)
        write_torch_file(folder / "scheduler.bin", LAMBDA_LR)
        (folder / "random_states_0.pkl").touch()


def deepspeed(root: Path, steps: int) -> None:
    model = {"dp_world_size": 1, "mp_world_size": 1, "optimizer": ADAM, "module": {}}
    for step in range(1, steps + 1):
        folder = root / f"global_step{step}"
        folder.mkdir(parents=True)
        write_torch_file(folder / "mp_rank_00_model_states.pt", {**model, "global_steps": step})
    (root / "latest").write_text(f"global_step{steps}")


def lightning(root: Path, steps: int) -> None:
    root.mkdir()
    for step in range(1, steps + 1):
        saved = {
            "pytorch-lightning_version": "2.6", "global_step": step, "epoch": 0, "loops": {},
            "state_dict": {}, "optimizer_states": [ADAM], "lr_schedulers": [],
        }  # fmt: skip
        write_torch_file(root / f"epoch=0-step={step}.ckpt", saved)
    os.link(root / f"epoch=0-step={steps}.ckpt", root / "last.ckpt")


def fairseq(root: Path, steps: int) -> None:
    root.mkdir()
    for step in range(1, steps + 1):
        saved = {"optimizer_history": [{"num_updates": step}], "last_optimizer_state": ADAM}
        write_torch_file(root / f"checkpoint_1_{step}.pt", saved)


def torch_files(root: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        (root / f"step_{step}").mkdir(parents=True)
        write_torch_file(root / f"step_{step}" / "optimizer.pt", ADAM)


TORCH = ("--format", "torch:step_{step}/optimizer.pt=")
STEPS: dict[str, tuple[Callable[[Path, int], None], tuple[str, ...]]] = {
    "hugging-face": (hugging_face, ()),
    "accelerate": (accelerate, ()),
    "deepspeed": (deepspeed, ()),
    "lightning": (lightning, ()),
    "fairseq": (fairseq, ()),
    "torch": (torch_files, TORCH),
}
LOOKS = (
    ("status",),
    ("status", "--json"),
    ("verify",),
    ("doctor",),
    ("advise",),
    ("log",),
    ("rollback", "--to", "2", "-n"),
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("format", STEPS)
@pytest.mark.long
def test_a_step_costs_the_same_in_a_run_of_many(
    format: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    make, more = STEPS[format]
    _grows(tmp_path, make, sizes, more)


def receipts(root: Path, many: int) -> None:
    make_run(root, (2, 4))
    for number in range(1, many + 1):
        receipt = Receipt(
            id=f"{number:04d}", title="set lr", why="", when="2026-01-01T00:00:00+00:00", user="a",
            host="b", version="1", recipe={}, changes=(), inverse=(), promise=None,
        )  # fmt: skip
        documents = contents(receipt, document(root, ()))
        for staged, final in records(receipt.id).items():
            (root / final).parent.mkdir(parents=True, exist_ok=True)
            (root / final).write_bytes(documents[staged])


def event_files(root: Path, many: int) -> None:
    """Of restarts that each lost the last of ten steps."""
    make_run(root, (2, 4))
    (root / "runs").mkdir()
    for number in range(many):
        began = 1e9 + number
        records = [_double(began) + b"\x1a\x0dbrain.Event:2"]
        records += [_loss(10 * number + step, began + step / 100) for step in range(9)]
        name = f"events.out.tfevents.{1_000_000_000 + number}.elsewhere.1.0"
        (root / "runs" / name).write_bytes(b"".join(map(_record, records)))


def files_beside(root: Path, many: int) -> None:
    make_run(root, (2, 4))
    for number in range(many):
        (root / f"slurm-{number}.out").touch()


def folders_beside(root: Path, many: int) -> None:
    make_run(root, (2, 4))
    for number in range(many):
        (root / f"outputs-{number}").mkdir()


def files_within(root: Path, many: int) -> None:
    make_run(root, (2, 4))
    for number in range(many):
        (root / "checkpoint-4" / f"notes-{number}.txt").touch()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "make", [receipts, event_files, files_beside, folders_beside, files_within]
)
@pytest.mark.long
def test_so_does_whatever_else_is_in_a_run(
    make: Callable[[Path, int], None], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    _grows(tmp_path, make, sizes, ())


def test_a_file_beside_the_steps_is_listed_and_not_looked_at(tmp_path: Path) -> None:
    costs = {}
    for size in (FEW, 12, 96):  # what the first one imports is not counted
        files_beside(tmp_path / str(size), size)
        costs[size], _ = counted("status", "-C", tmp_path / str(size))
    assert costs[96].system - costs[12].system < 84


def _grows(
    folder: Path, make: Callable[[Path, int], None], sizes: tuple[int, ...], more: tuple[str, ...]
) -> None:
    for size in (FEW, *sizes):
        make(folder / str(size), size)
    forks = (("fork", folder / "forked", "--hard-link", "-n"), ("prune", "--keep", "1", "-n"))
    for words in (*LOOKS, *forks):
        costs = {}
        for size in (FEW, *sizes):
            costs[size], result = counted(*words, "-C", folder / str(size), *more)
            assert result.exit_code in (0, 4) or words[0] == "advise", result.output  # without logs
        del costs[FEW]  # what the first one imports is not counted
        linear(costs)


def _record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    sums = struct.pack("<I", masked(head)), struct.pack("<I", masked(data))
    return head + sums[0] + data + sums[1]


def _double(wall: float) -> bytes:
    return b"\x09" + struct.pack("<d", wall)


def _loss(step: int, wall: float) -> bytes:
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 1.0)
    summary = b"\x0a" + bytes([len(value)]) + value
    number = bytes([step & 127 | 128, step >> 7])
    return _double(wall) + b"\x10" + number + b"\x2a" + bytes([len(summary)]) + summary


@pytest.mark.slow
def test_a_transplant_reads_the_places_of_the_source_once_however_many_shards(
    surgeon: Surgeon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters without a step of their own take that of the source, which is looked up once."""
    reads = 0
    each = Column.__iter__

    def counting(column: Column) -> Iterator[Place]:
        nonlocal reads
        for place in each(column):
            reads += 1
            yield place

    monkeypatch.setattr(Column, "__iter__", counting)
    costs = {}
    for shards in (25, 50, 100):
        root, reads = tmp_path / str(shards), 0
        ranks(root, shards)
        result = surgeon("transplant", "--from", root / "source", "-n", "-C", root / "run")
        assert result.exit_code == 0, result.output
        costs[shards] = reads
    few, many = (costs[50] - costs[25]) / 25, (costs[100] - costs[50]) / 50
    assert 0 < many <= 1.5 * few, costs


@pytest.mark.parametrize("few", [25, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.long
def test_twice_the_shards_take_twice_the_receipt_and_memory_of_a_transplant(
    few: int, tmp_path: Path
) -> None:
    """So these say what 10,000 take: 20 MB and 1 GB at most. The receipt does not list where each
    piece of a shard came from."""
    _transplanted(tmp_path / "first", 25)  # what it imports is not counted
    small, large = (_least(tmp_path / str(count), count) for count in (few, 2 * few))
    for one, two, most in zip(small, large, (2_000, 100_000), strict=True):
        assert two <= 2.25 * one and two <= 2 * few * most, (small, large)


def _least(root: Path, shards: int) -> tuple[int, int]:
    """The same of two runs alike: in one of them the interpreter's table of names may grow, by some
    MB at once."""
    receipts, peaks = zip(*(_transplanted(root / each, shards) for each in "ab"), strict=True)
    return min(receipts), min(peaks)


def _transplanted(root: Path, shards: int) -> tuple[int, int]:
    """Bytes of the receipt, and of memory at the peak."""
    ranks(root, shards)
    tracemalloc.start()
    try:
        result = invoke("transplant", "--from", root / "source", "-y", "-C", root / "run")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.exit_code == 0, result.output
    records = (root / "run/.ckptsurgeon/receipts/0001").iterdir()
    return sum(record.stat().st_size for record in records), peak
