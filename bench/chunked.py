"""Builds a step of torchtitan as many ranks save it, `.metadata` of the real classes.

Usage: python -m bench.chunked ROOT TENSORSxRANKS
"""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

STEP = 100
ROWS, COLUMNS = 4, 8
"""Of a chunk; that of the last rank has a row less."""
WRITTEN = 8
"""Ranks whose chunks are written, the last among them; the files of others are holes as long."""
GROUP: dict[str, Any] = {
    "lr": 1e-3, "initial_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1,
    "amsgrad": False, "foreach": None, "maximize": False, "capturable": False,
    "differentiable": False, "fused": True,
}  # fmt: skip


def main() -> int:
    """Build it and say how many chunks it has."""
    tensors, ranks = map(int, sys.argv[2].split("x"))
    print(f'{{"chunks": {make(Path(sys.argv[1]), tensors, ranks)}}}')
    return 0


def make(root: Path, tensors: int, ranks: int, protocol: int = pickle.DEFAULT_PROTOCOL) -> int:
    """`step-100` of so many parameters with two moments each, all cut by rows over `ranks`: the
    number of chunks. A value of a chunk is its rank and 1, and the number of its tensor over 8."""
    folder = root / f"step-{STEP}"
    folder.mkdir(parents=True)
    parameters = [f"layers.{number}.attention.wq.weight" for number in range(tensors)]
    names = [
        f"{before}{name}{after}"
        for name in parameters
        for before, after in (
            ("", ""), ("optimizer.state.", ".exp_avg"), ("optimizer.state.", ".exp_avg_sq"),
        )
    ]  # fmt: skip
    described: dict[str, Any] = {name: _tensor(ranks) for name in names}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    _values(folder, parameters, described, stored)
    for rank in range(ranks):
        blobs = _blobs(rank, ranks, len(names))
        path = folder / f"__{rank}_1.distcp"
        if rank < WRITTEN - 1 or rank == ranks - 1:
            path.write_bytes(b"".join(blobs))
        else:
            with path.open("wb") as file:
                file.truncate(len(names) * len(blobs[0]))
        at, file_name = 0, path.name
        for name, blob in zip(names, blobs, strict=True):
            # As they come from each rank's own process: no text but the file's name is shared.
            index = MetadataIndex(f"{name[:1]}{name[1:]}", torch.Size([ROWS * rank, 0]), rank)
            stored[index] = _StorageInfo(file_name, at, len(blob))
            at += len(blob)
    plan = {name: tuple(name.split(".")) for name in described}
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(described, plan, stored), file, protocol)
    return len(names) * ranks


def _rows(rank: int, ranks: int) -> int:
    return ROWS - (rank == ranks - 1)


def _tensor(ranks: int) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(
            torch.Size([ROWS * rank, 0]), torch.Size([_rows(rank, ranks), COLUMNS])
        )
        for rank in range(ranks)
    ]
    size = torch.Size([ROWS * ranks - 1, COLUMNS])
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, chunks)


def _blobs(rank: int, ranks: int, count: int) -> list[bytes]:
    """The archives of one rank's chunks; of a rank that is not written, as long ones."""
    size = (_rows(rank, ranks), COLUMNS)
    if WRITTEN - 1 <= rank < ranks - 1:
        return [_archive(torch.zeros(size))] * count
    return [_archive(torch.full(size, rank + 1 + number / 8)) for number in range(count)]


def _archive(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _values(
    folder: Path,
    parameters: list[str],
    described: dict[str, Any],
    stored: dict[MetadataIndex, _StorageInfo],
) -> None:
    """What is not cut, in a file of its own: steps, settings, the trainer's counter."""
    values: dict[str, Any] = {"train_state.step": STEP}
    for name in parameters:
        values[f"optimizer.state.{name}.step"] = torch.tensor(float(STEP))
        values |= {f"optimizer.param_groups.{name}.{key}": value for key, value in GROUP.items()}
    known: dict[str, bytes] = {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for name, value in values.items():
            blob = known.setdefault(repr(value), b"") or _archive(value)
            known[repr(value)] = blob
            index = MetadataIndex(name)
            described[name] = BytesStorageMetadata()
            if isinstance(value, torch.Tensor):
                none = torch.Size([])
                chunk = ChunkStorageMetadata(none, none)
                described[name] = TensorStorageMetadata(TensorProperties(), none, [chunk])
                index = MetadataIndex(name, none, 0)
            stored[index] = _StorageInfo("__0_0.distcp", file.tell(), len(blob))
            file.write(blob)


if __name__ == "__main__":
    sys.exit(main())
