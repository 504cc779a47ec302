"""fairseq2 without what is compiled of it, which reads data and wants the very torch that it was
built for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from tests.support.newest_megatron import beside


def package() -> Path:
    """Where it is installed. Its part that is compiled counts as absent, as it does for those who
    build its documentation."""
    module = ModuleType("fairseq2n")
    module.DOC_MODE = True  # type: ignore[attr-defined]
    module.__version__ = "0"  # type: ignore[attr-defined]
    sys.modules["fairseq2n"] = module
    return beside("fairseq2")
