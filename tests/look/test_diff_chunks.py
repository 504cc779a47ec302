"""diff of steps in many chunks: tensor by tensor, and no chunk is opened without --tensors."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import chunked
from ckptsurgeon import Run
from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.chunks import Item
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.look.diff.diff import Diff, diff
from ckptsurgeon.look.diff.sides import Side

TENSORS, RANKS = 2, 6
MOMENT = "optimizer.state.layers.1.attention.wq.weight.exp_avg"


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, Path]:
    one, other = tmp_path / "one", tmp_path / "other"
    chunked.make(one, TENSORS, RANKS)
    shutil.copytree(one, other)
    return one, other


def compared(one: Path, other: Path, **more: Any) -> Diff:
    return diff(*(Side(Run.open(root), chunked.STEP) for root in (one, other)), **more)


def write(root: Path, name: str, chunk: int, data: bytes, at: int = 0) -> None:
    """Other bytes in the elements of a chunk."""
    saved = Saved.open(root / f"step-{chunked.STEP}")
    item = saved.items[name][chunk]
    start = item.start + saved.archive(item).payload("data/0") + at
    with (saved.folder / item.file).open("r+b") as file:
        file.seek(start)
        file.write(data)


def test_a_tensor_in_chunks_is_one_tensor(twins: tuple[Path, Path]) -> None:
    found = compared(*twins, tensors=True)
    assert found.same and found.tensors is not None
    assert found.tensors.identical == 3 * TENSORS
    write(twins[1], MOMENT, 2, b"\0" * 8, at=4)  # 3.5 twice: the third rank, the fifth name
    write(twins[1], MOMENT, 4, b"\0" * 4)
    assert compared(*twins).same
    found = compared(*twins, tensors=True)
    assert found.tensors is not None and found.tensors.identical == 3 * TENSORS - 1
    (changed,) = found.tensors.changed
    assert (changed.name, changed.path, changed.elements) == (MOMENT, (MOMENT,), 3)
    assert changed.largest == 5.5


def test_values_are_compared_without_a_chunk(
    twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, real = list[tuple[int, ...]](), Saved.opened

    def counted(self: Saved, item: Item) -> Archive:
        opened.append(item.offset or ())
        return real(self, item)

    monkeypatch.setattr(Saved, "opened", counted)
    assert compared(*twins).same
    assert opened and not any(opened)  # a number has an offset of no axes
    compared(*twins, tensors=True)
    assert sum(map(bool, opened)) == 2 * 3 * TENSORS * RANKS


def test_a_chunk_that_is_another_is_an_error(twins: tuple[Path, Path]) -> None:
    saved = Saved.open(twins[1] / f"step-{chunked.STEP}")
    first, file = saved.items[MOMENT][0], io.BytesIO()
    torch.save(torch.ones(chunked.COLUMNS, chunked.ROWS), file)
    data = file.getvalue()
    assert first.length == len(data)
    with (saved.folder / first.file).open("r+b") as written:
        written.seek(first.start)
        written.write(data)
    assert compared(*twins).same
    with pytest.raises(DamagedFile, match=r"exp_avg: it is not the float32 \(4, 8\) of .metadata"):
        compared(*twins, tensors=True)
