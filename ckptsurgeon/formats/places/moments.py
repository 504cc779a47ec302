"""Adam's moments in the state of one parameter, as torch, apex and bitsandbytes name them.

bitsandbytes keeps each as one byte an element, an index into the map `qmap`, times the largest
absolute value of its block (`bitsandbytes/optim/optimizer.py`; before 0.44 they are not nested).
Byte 0 of a signed map is nearly -1 and not 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.constants import NESTED
from ckptsurgeon.formats.fields.values import Place
from ckptsurgeon.plans.edits import ZEROS, Fill, Key

NUMBERS = {"exp_avg": "1", "exp_avg_sq": "2"}
ALSO = ("max_exp_avg_sq", "momentum_buffer")
"""What AMSGrad keeps besides, and what Muon keeps of the parameters that are not Adam's."""
ALL = (*NUMBERS, *ALSO)
SCALES = ("absmax", "max", "new_max")
"""What the codes of a moment are multiplied by: of each block, or (older) of the whole tensor."""
NUMBERED = frozenset(f"{key}{n}" for key in ("state", *SCALES) for n in NUMBERS.values())
"""The keys in which bitsandbytes keeps the moments."""


def places(
    checkpoint: Checkpoint,
    file: Path,
    path: tuple[Key, ...],
    state: Mapping[Key, Any],
    name: str,
    wins: bool = True,
) -> Iterator[Place]:
    """Every tensor that makes up the moment `name`: exp_avg, exp_avg_sq or one of ALSO.

    Each place says by `zero` what its tensor holds where the moment is 0."""
    if name in state:
        yield Place(file, (*path, name), state[name], wins)
        return
    if name not in NUMBERS:
        return
    inner = state
    if isinstance(state.get(NESTED), Mapping):
        inner, path = state[NESTED], (*path, NESTED)
    number = NUMBERS[name]
    codes, map = inner.get(f"state{number}"), inner.get(f"qmap{number}")
    if not isinstance(codes, Tensor):
        return
    if codes.dtype != "uint8":  # a small parameter, kept in 32 bits
        yield Place(file, (*path, f"state{number}"), codes, wins)
        return
    code = _zero(checkpoint, file, map, number)
    zero = Fill(code) if code else ZEROS
    yield Place(file, (*path, f"state{number}"), codes, wins, zero)
    for scale in SCALES:
        tensor = inner.get(f"{scale}{number}")
        if isinstance(tensor, Tensor):
            yield Place(file, (*path, f"{scale}{number}"), tensor, wins)


def _zero(checkpoint: Checkpoint, file: Path, map: Any, number: str) -> int:
    """The index of 0 in a map of at most 256 numbers."""
    if isinstance(map, Tensor) and 0 < map.numel <= 256 and map.stride == (1,):
        archive = checkpoint.archives[file]
        archive.storage(map)
        item = ITEM_BYTES[map.dtype]
        start = archive.payload(f"data/{map.storage}") + map.offset * item
        data = archive.read_at(start, map.numel * item)
        for code in range(map.numel):
            if not any(data[code * item : (code + 1) * item]):
                return code
    raise SurgeryError(
        f"{file.name}: no code of qmap{number} stands for 0, so the 8-bit moments have no zero",
        next="rollback to a step before the optimizer state was damaged",
    )
