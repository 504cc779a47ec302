"""The trainers that `make test-formats` installs beside the usual packages, and stand-ins for what
they import and use for pictures alone."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from tests.support.newest_megatron import beside

FOLDER = beside("trainers")
NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# torchvision's compiled operators want a GPU's torch, and none of them is called here.
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", NMS)
EMPTY: Any = types.ModuleType("cv2")
EMPTY.setNumThreads = EMPTY.__version__ = str
sys.modules.setdefault("cv2", EMPTY)
