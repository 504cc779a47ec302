"""Puts an empty module in the place of OpenCV, which MMEngine uses for pictures alone."""

from __future__ import annotations

import sys
import types
from typing import Any

EMPTY: Any = types.ModuleType("cv2")
EMPTY.setNumThreads = EMPTY.__version__ = str
sys.modules.setdefault("cv2", EMPTY)
