"""Whether calls can go past the page cache where a test writes."""

from __future__ import annotations

import os
from pathlib import Path


def takes_direct_calls(path: Path) -> bool:
    """Whether the file system of `path` lets it be opened for them."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True
