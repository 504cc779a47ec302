"""The compiled module that reads torch shards, where it was built; `shards` is None without it."""

from __future__ import annotations

import importlib
from typing import Any

shards: Any
try:
    shards = importlib.import_module("ckptsurgeon.files._shards")
except ImportError:
    shards = None
