"""A copy of what a checkpoint file will hold, in host memory, so that training can go on."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn


class Room:
    """Host memory in which one copy lies after the other: to get pages from the kernel takes longer
    than to copy. On a GPU it is pinned."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._used: list[Tensor] = []

    def take(self, size: int, pinned: bool) -> Tensor:
        """So many bytes."""
        fit = next((i for i, one in enumerate(self._free) if one.numel() == size), None)
        if fit is None:
            one = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        else:
            one = self._free.pop(fit)
        self._used.append(one)
        return one

    def empty(self) -> None:
        """Whoever had a copy in it needs it no more."""
        self._free, self._used = self._used, []


def host_copy(state: Any, room: Room) -> Any:
    """What `torch.save` would write of `state` now, as a copy that it can write later.

    Tensors are copied to the CPU, and those that share memory share it again; all else is copied
    by pickling it."""
    stream = io.BytesIO()
    copier = _Copier(stream, room)
    copier.dump(state)
    stream.seek(0)
    return _Joiner(stream, copier.copies).load()


class _Copier(pickle.Pickler):
    """Writes a number for each tensor, of which it keeps a copy."""

    def __init__(self, stream: io.BytesIO, room: Room) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._room = room
        self.copies: list[Tensor] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._seen: dict[int, tuple[Tensor, int]] = {}  # the tensor too: its id must stay its own

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._seen:
            self._seen[id(value)] = value, len(self.copies)
            self.copies.append(self._copy(value))
        return self._seen[id(value)][1]

    def _copy(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            whole = self._room.take(storage.nbytes(), storage.device.type == "cuda")
            whole.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            self._storages[storage._cdata] = whole.untyped_storage()
        copy = torch.empty(0, dtype=tensor.dtype).set_(
            self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)


class _Joiner(pickle.Unpickler):
    """Puts the copies where the numbers stand."""

    def __init__(self, stream: io.BytesIO, copies: list[Tensor]) -> None:
        super().__init__(stream)
        self._copies = copies

    def persistent_load(self, number: int) -> Tensor:
        return self._copies[number]
