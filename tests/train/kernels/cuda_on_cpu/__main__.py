"""Holds the parity table against a library of `build`: python -m … LIBRARY [--guarded|--shifted].

It prints a digest of the bits that each row gives. Guarded, each argument ends where memory ends: a
read or write behind it kills the process. Shifted, it begins at an odd element, so an access to
several at once does so, too.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.train.kernels.case import check, clone, native
from tests.train.kernels.table import CASES
from train.kernels import library

_LIBC = ctypes.CDLL(None, use_errno=True)
PROT_NONE = 0


def guarded(argument: Any) -> Any:
    """A copy of a tensor that ends right before a page that nobody may touch."""
    if isinstance(argument, list):
        return [guarded(item) for item in argument]
    if not isinstance(argument, Tensor) or argument.numel() == 0:
        return argument
    readable = -(-argument.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, readable + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    behind = ctypes.c_void_p(start + readable)
    if _LIBC.mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    offset = readable - argument.nbytes
    flat = torch.frombuffer(memory, dtype=argument.dtype, count=argument.numel(), offset=offset)
    copy = flat.view(argument.shape)
    copy.copy_(argument)
    return copy


def shifted(argument: Any) -> Any:
    """A copy of a tensor that begins one element after an aligned one."""
    if isinstance(argument, list):
        return [shifted(item) for item in argument]
    if not isinstance(argument, Tensor):
        return argument
    flat = argument.new_empty(argument.numel() + 1)[1:]
    copy = flat.view(argument.shape)
    copy.copy_(argument)
    return copy


def main(path: str, *options: str) -> int:
    library.build = lambda: Path(path)
    library.check_code_for = lambda device: None  # it may hold one kernel only
    reason = library.load()
    assert reason is None, reason
    rows = [(case, dtype) for case in CASES if native(case.op, "cpu") for dtype in case.dtypes]
    place = guarded if "--guarded" in options else shifted if "--shifted" in options else clone
    failed = 0
    for case, dtype in rows:
        try:
            digest = check(case, dtype, "cpu", place)
            print(f"{case.op} {dtype} {digest}")
        except AssertionError as error:
            failed += 1
            print(f"{case.op} {dtype}: {str(error).strip().splitlines()[0]}")
    print(f"{len(rows)} rows, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
