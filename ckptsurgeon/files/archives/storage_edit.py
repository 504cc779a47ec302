"""What changes in the bytes of one torch storage: ranges that become zeros or a number.

Several tensors may be views of one storage. What is not to be changed stays, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.tree import Tensor, tensors

MAX_ROWS = 1 << 20
"""Separate byte ranges of the most scattered view that is edited."""

Range = tuple[int, int]


@dataclass
class StorageEdit:
    """The new bytes of one storage of `size` bytes: `zeros` and `numbers` (offset → bytes) are
    disjoint; all else is kept."""

    size: int
    zeros: list[Range] = field(default_factory=list)
    numbers: dict[int, bytes] = field(default_factory=dict)

    def pieces(self) -> Iterator[tuple[int, int, bytes | None, bool]]:
        """The whole storage in order: (start, end, new bytes, unchanged)."""
        changes: list[tuple[int, int, bytes | None]] = [(s, e, None) for s, e in self.zeros]
        changes += [(s, s + len(data), data) for s, data in self.numbers.items()]
        position = 0
        for start, end, data in sorted(changes, key=lambda item: item[0]):
            if position < start:
                yield position, start, None, True
            yield start, end, data, False
            position = end
        if position < self.size:
            yield position, self.size, None, True

    def number_ranges(self) -> list[Range]:
        return union((start, start + len(data)) for start, data in self.numbers.items())

    @property
    def unchanged_bytes(self) -> int:
        """Bytes that stay."""
        changed = sum(end - start for start, end in self.zeros)
        return self.size - changed - sum(map(len, self.numbers.values()))


class Wish(NamedTuple):
    """A tensor whose every element becomes zero (None) or `number`, or which becomes `number` as a
    whole if that is as long; of a flat one, maybe only the `elements` [start, end)."""

    tensor: Tensor
    number: bytes | None
    elements: tuple[int, int] | None = None


def storage_edits(tree: Any, wishes: Sequence[Wish]) -> dict[str, StorageEdit]:
    """By storage key, what it takes that each wish comes true.

    Raises SurgeryError if a byte would also change that belongs to a tensor not in `wishes`, or if
    two wishes contradict each other."""
    out: dict[str, StorageEdit] = {}
    for tensor, number, elements in wishes:
        size = tensor.storage_numel * ITEM_BYTES[tensor.dtype]
        edit = out.setdefault(tensor.storage, StorageEdit(size))
        spans = ranges(part(tensor, *elements) if elements else tensor)
        if number is None:
            edit.zeros += spans
            continue
        for start, end in spans:
            data = number * ((end - start) // len(number))
            if edit.numbers.setdefault(start, data) != data:
                raise SurgeryError(
                    f"the storage {tensor.storage!r} is to hold two numbers in one place"
                )
    for key, edit in out.items():
        if len(edit.zeros) > 1:
            edit.zeros = union(edit.zeros)
        if edit.numbers and overlap(edit.zeros, edit.number_ranges()):
            raise SurgeryError(f"the storage {key!r} is to hold zero and a number in one place")
    if not out:
        return out
    known = {id(wish.tensor) for wish in wishes}
    for path, tensor in tensors(tree):
        if id(tensor) in known or (shared := out.get(tensor.storage)) is None:
            continue
        if overlap(ranges(tensor), union([*shared.zeros, *shared.number_ranges()])):
            raise SurgeryError(
                f"the tensor {path!r} shares the bytes that would change",
                next="change every tensor that shares them, or none",
            )
    return out


def part(tensor: Tensor, start: int, end: int) -> Tensor:
    """The elements [start, end) of a flat tensor as a tensor of its own. Raises SurgeryError for
    one that is not flat, or has no such elements."""
    if len(tensor.size) != 1 or tensor.stride != (1,) or not 0 <= start <= end <= tensor.size[0]:
        raise SurgeryError(f"a tensor of shape {tensor.size} has no flat elements {start} to {end}")
    return replace(tensor, offset=tensor.offset + start, size=(end - start,))


def ranges(tensor: Tensor) -> list[Range]:
    """The byte ranges of the storage that the elements of `tensor` are in, joined and ascending.
    Raises SurgeryError for a view of more than MAX_ROWS of them."""
    item = ITEM_BYTES[tensor.dtype]
    if len(tensor.size) == 1 and tensor.stride[0] == 1:  # nearly all: flat, or flattened
        start = tensor.offset * item
        return [(start, start + tensor.size[0] * item)] if tensor.size[0] else []
    if not tensor.numel:
        return []
    # From the innermost axis outwards: the elements of a run lie side by side.
    axes = sorted((s, n) for s, n in zip(tensor.stride, tensor.size, strict=True) if n > 1)
    run = 1
    while axes and axes[0][0] <= run:
        stride, count = axes.pop(0)
        run = max(run, (count - 1) * stride + run)
    starts = [tensor.offset]
    for stride, count in axes:
        if len(starts) * count > MAX_ROWS:
            raise SurgeryError(f"a tensor of {tensor.numel} elements is scattered over its storage")
        starts = [start + k * stride for k in range(count) for start in starts]
    return union((start * item, (start + run) * item) for start in starts)


def union(parts: Iterable[Range]) -> list[Range]:
    """The same bytes in as few ascending ranges as there can be."""
    out: list[Range] = []
    for start, end in sorted(parts):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def overlap(left: list[Range], right: list[Range]) -> bool:
    """Whether two ascending lists of ranges have a byte in common."""
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i][0] < right[j][1] and right[j][0] < left[i][1]:
            return True
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return False
