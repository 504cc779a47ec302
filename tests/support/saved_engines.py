"""Steps that real DeepSpeed engines saved, each trained once in a session and copied."""

from __future__ import annotations

import atexit
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.deepspeed_engine import Options, launched, make

STEP = 6
_KEPT = TemporaryDirectory()
atexit.register(_KEPT.cleanup)
_MADE: dict[str, Path] = {}


def saved(root: Path, options: Options, ranks: int = 1, steps: int = STEP) -> Path:
    """A run of one saved step, in a process group of one."""
    wanted = f"{options} {ranks} {steps}"
    if wanted not in _MADE:
        kept = Path(_KEPT.name) / str(len(_MADE))
        if ranks == 1:
            make(kept, options, steps)
        else:
            launched("make", kept, options, ranks, steps)
        _MADE[wanted] = kept
    return Path(shutil.copytree(_MADE[wanted], root))
