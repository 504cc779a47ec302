"""Megatron's MMapIndexedDataset (.bin tokens, .idx index): a memory-mapped reader and a writer.

.idx, little endian: magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequences, u64 length
of the document index, i32 sizes[], i64 byte pointers[], i64 document index[] (first entry 0).
"""

from __future__ import annotations

import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from .errors import TrainError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 name float types, and differently in two forks: never tokens.
DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# What Megatron picks: two bytes whenever the ids fit.
SMALL_VOCABULARY = 65500


class IndexedDataset:
    """A read-only token stream with its sequence and document boundaries.

    `tokens` is the whole .bin as one memory map; the sequences must lie in it back to back, as
    every Megatron writer leaves them. Raises TrainError when a file is not what the format says.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index, data = _paths(self.prefix)
        for path in (index, data):
            if not path.is_file():
                raise TrainError(
                    f"{path}: no such file",
                    next=f"python -m train prepare-data --output {self.prefix} FILES…",
                )
        size = index.stat().st_size
        with index.open("rb") as f:
            header = f.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise _damaged(index, "not a Megatron index (no MMIDIDX magic)")
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != 1:
            raise _damaged(index, f"index version {version}; only version 1 is known")
        if code not in DTYPES:
            raise _damaged(index, f"dtype code {code} is not an integer type")
        wanted = HEADER.size + 12 * sequences + 8 * documents
        if size < wanted:
            raise _damaged(index, f"{size} bytes; its header asks for {wanted}")
        mapped = np.memmap(index, mode="r", dtype=np.uint8)
        at = HEADER.size
        self.sizes = mapped[at : at + 4 * sequences].view("<i4")
        at += 4 * sequences
        pointers = mapped[at : at + 8 * sequences].view("<i8")
        at += 8 * sequences
        self.document_index = mapped[at : at + 8 * documents].view("<i8")
        self.dtype = np.dtype(DTYPES[code])
        total = int(self.sizes.sum(dtype=np.int64))
        starts = np.concatenate(([0], np.cumsum(self.sizes, dtype=np.int64)[:-1]))
        if sequences and not np.array_equal(pointers, starts * self.dtype.itemsize):
            raise _damaged(index, "its sequences do not lie back to back in the .bin")
        if data.stat().st_size != total * self.dtype.itemsize:
            raise _damaged(
                data, f"{data.stat().st_size} bytes; its index asks for {total} {self.dtype}"
            )
        self._starts = starts
        self.tokens: npt.NDArray[np.integer] = (
            np.memmap(data, mode="r", dtype=self.dtype) if total else np.empty(0, self.dtype)
        )

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> npt.NDArray[np.integer]:
        start = int(self._starts[sequence])
        return self.tokens[start : start + int(self.sizes[sequence])]


class IndexedDatasetWriter:
    """Write a .bin/.idx pair; both appear under their names only when the block ends cleanly."""

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self.dtype = np.dtype(np.uint16 if vocab_size < SMALL_VOCABULARY else np.int32)
        self._index, self._data = _paths(str(prefix))
        self._data.parent.mkdir(parents=True, exist_ok=True)
        self._sizes: list[int] = []
        self._documents = [0]
        self._partial = self._data.with_name(self._data.name + ".tmp")
        self._out = self._partial.open("wb")

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def add_document(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append one document that is one sequence. An empty one is passed over."""
        if not len(tokens):
            return
        self._out.write(np.ascontiguousarray(tokens, dtype=self.dtype).tobytes())
        self._sizes.append(len(tokens))
        self._documents.append(len(self._sizes))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._out.close()
        if kind is not None:
            self._partial.unlink()
            return
        sizes = np.array(self._sizes, dtype="<i4")
        ends = np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
        pointers = np.concatenate(([0], ends[:-1])).astype("<i8")[: len(sizes)]
        documents = np.array(self._documents, dtype="<i8")
        header = HEADER.pack(MAGIC, 1, CODES[self.dtype.type], len(sizes), len(documents))
        partial = self._index.with_name(self._index.name + ".tmp")
        partial.write_bytes(header + sizes.tobytes() + pointers.tobytes() + documents.tobytes())
        self._partial.replace(self._data)
        partial.replace(self._index)


def _paths(prefix: str) -> tuple[Path, Path]:
    return Path(prefix + ".idx"), Path(prefix + ".bin")


def _damaged(path: Path, what: str) -> TrainError:
    return TrainError(f"{path}: {what}", next="python -m train prepare-data    build it again")
