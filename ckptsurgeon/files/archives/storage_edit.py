"""What changes in the bytes of one torch storage: ranges that become zeros or a number.

Several tensors may be views of one storage. What is not to be changed stays, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

from ckptsurgeon.errors import DEFECT, SurgeryError, count
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.tree import Tensor, all_tensors, tensors
from ckptsurgeon.plans.edits import Computed, length

MAX_ROWS = 1 << 20
"""Separate byte ranges of the most scattered view that is edited."""

Range = tuple[int, int]


@dataclass
class StorageEdit:
    """The new bytes of one storage of `size` bytes: `zeros` and `numbers` (offset → bytes, or what
    they are computed from) are disjoint; all else is kept."""

    size: int
    zeros: list[Range] = field(default_factory=list)
    numbers: dict[int, bytes | Computed] = field(default_factory=dict)

    def pieces(self) -> Iterator[tuple[int, int, bytes | Computed | None, bool]]:
        """The whole storage in order: (start, end, new bytes, unchanged)."""
        changes: list[tuple[int, int, bytes | Computed | None]] = []
        changes += [(start, end, None) for start, end in self.zeros]
        changes += [(s, s + length(data), data) for s, data in self.numbers.items()]
        position = 0
        for start, end, data in sorted(changes, key=lambda item: item[0]):
            if position < start:
                yield position, start, None, True
            yield start, end, data, False
            position = end
        if position < self.size:
            yield position, self.size, None, True

    def number_ranges(self) -> list[Range]:
        return union((start, start + length(data)) for start, data in self.numbers.items())

    @property
    def computed(self) -> bool:
        """Whether some bytes are not known before they are written."""
        return any(isinstance(data, Computed) for data in self.numbers.values())

    @property
    def unchanged_bytes(self) -> int:
        """Bytes that stay."""
        changed = sum(end - start for start, end in self.zeros)
        return self.size - changed - sum(map(length, self.numbers.values()))


class TensorEdit(NamedTuple):
    """Tensors whose every element becomes zero (None) or `number`, or which each become `number` as
    a whole if that is as long, or what is computed; maybe only the `elements` [start, end), in the
    order of the shape."""

    tensors: Sequence[Tensor]
    number: bytes | Computed | None
    elements: Range | None = None


def blanks(
    tree: Any, tensor_edits: Sequence[TensorEdit]
) -> tuple[dict[str, int], list[TensorEdit]]:
    """The storages that become zeros as a whole and are one tensor's alone, with their bytes; and
    the other edits, which `storage_edits` takes."""
    holders = Counter(map(attrgetter("storage"), all_tensors(tree)))
    blank: list[Tensor] = []
    rest: list[Tensor] = []
    for mine, number, elements in tensor_edits:
        zero = number is None or (isinstance(number, bytes) and not any(number))
        if not zero or elements is not None:
            rest += mine
            continue
        alone = [tensor.whole and holders[tensor.storage] == 1 for tensor in mine]
        blank += compress(mine, alone)
        rest += compress(mine, map(not_, alone))
    out = {t.storage: t.storage_numel * ITEM_BYTES[t.dtype] for t in blank}
    if not rest:
        return out, []
    for tensor in rest:  # also wished to be something else
        out.pop(tensor.storage, None)
    left = (
        tensor_edit._replace(tensors=[t for t in tensor_edit.tensors if t.storage not in out])
        for tensor_edit in tensor_edits
    )
    return out, [tensor_edit for tensor_edit in left if tensor_edit.tensors]


def storage_edits(tree: Any, tensor_edits: Sequence[TensorEdit]) -> dict[str, StorageEdit]:
    """By storage key, what must be written for each of these edits.

    Raises SurgeryError if a byte would also change of a tensor that is not in
    `tensor_edits`, or if two of them contradict each other."""
    out: dict[str, StorageEdit] = {}
    for tensor, number, elements in one_by_one(tensor_edits):
        size = tensor.storage_numel * ITEM_BYTES[tensor.dtype]
        edit = out.setdefault(tensor.storage, StorageEdit(size))
        spans = ranges(part(tensor, *elements) if elements else tensor)
        if number is None:
            edit.zeros += spans
            continue
        if isinstance(number, Computed):
            _computed(edit, spans, number)
            continue
        for start, end in spans:
            data = number * ((end - start) // len(number))
            if edit.numbers.setdefault(start, data) != data:
                raise SurgeryError(
                    f"the storage {tensor.storage!r} is to hold two numbers in one place",
                    next=DEFECT,
                )
    for key, edit in out.items():
        _refuse_overlapping(key, edit)
        if len(edit.zeros) > 1:
            edit.zeros = union(edit.zeros)
        if edit.numbers and overlap(edit.zeros, edit.number_ranges()):
            raise SurgeryError(
                f"the storage {key!r} is to hold zero and a number in one place", next=DEFECT
            )
    if not out:
        return out
    known = {id(tensor) for tensor_edit in tensor_edits for tensor in tensor_edit.tensors}
    for path, tensor in tensors(tree):
        if id(tensor) in known or (shared := out.get(tensor.storage)) is None:
            continue
        if overlap(ranges(tensor), union([*shared.zeros, *shared.number_ranges()])):
            raise SurgeryError(
                f"the tensor {'.'.join(map(str, path))} shares the bytes that would change",
                next="change every tensor that shares them, or none",
            )
    return out


def one_by_one(
    tensor_edits: Sequence[TensorEdit],
) -> Iterator[tuple[Tensor, bytes | Computed | None, Range | None]]:
    """Each tensor with what it is to become."""
    for mine, number, elements in tensor_edits:
        for tensor in mine:
            yield tensor, number, elements


def _refuse_overlapping(key: str, edit: StorageEdit) -> None:
    """Raise SurgeryError where two numbers begin apart and meet."""
    end = 0
    for start in sorted(edit.numbers):
        if start < end:
            raise SurgeryError(
                f"the storage {key!r} is to hold two numbers in one place", next=DEFECT
            )
        end = start + length(edit.numbers[start])


def _computed(edit: StorageEdit, spans: list[Range], number: Computed) -> None:
    """Take what is computed, which lies side by side. Raises SurgeryError where the tensor does
    not, or is to hold two things."""
    if not spans:
        return
    ((start, end), *others) = spans
    if others or end - start != number.size:
        raise SurgeryError(
            f"{number.label or number.rule}: the tensor is scattered over its storage, or of "
            "another size",
            next="save the checkpoint again with tensors that are contiguous",
        )
    if edit.numbers.setdefault(start, number) != number:
        raise SurgeryError("a storage is to hold two numbers in one place", next=DEFECT)


def part(tensor: Tensor, start: int, end: int) -> Tensor:
    """The elements [start, end) of a tensor as a flat tensor of its own. Raises SurgeryError for
    one whose elements do not lie in the order of its shape, or that has no such elements."""
    if not contiguous(tensor) or not 0 <= start <= end <= tensor.numel:
        raise SurgeryError(
            f"a tensor of shape {tensor.size} has no flat elements {start} to {end}",
            next="save the checkpoint again with tensors that are contiguous",
        )
    return replace(tensor, offset=tensor.offset + start, size=(end - start,), stride=(1,))


def contiguous(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, in the order of its shape."""
    expected = 1
    for size, stride in zip(reversed(tensor.size), reversed(tensor.stride), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


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
        stride, number = axes.pop(0)
        run = max(run, (number - 1) * stride + run)
    starts = [tensor.offset]
    for stride, number in axes:
        if len(starts) * number > MAX_ROWS:
            raise SurgeryError(
                f"a tensor of {count(tensor.numel, 'element')} is scattered over its storage",
                next="save the checkpoint again with tensors that are contiguous",
            )
        starts = [start + k * stride for k in range(number) for start in starts]
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
