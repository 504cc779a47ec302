"""Pauses the garbage collector while millions of small objects are made."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0
_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: it would visit a million small lists again and again. It goes
    on when the last of several threads is out."""
    global _inside, _enabled
    with _lock:
        if _inside == 0:
            _enabled = gc.isenabled()
        _inside += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _enabled:
                gc.enable()
