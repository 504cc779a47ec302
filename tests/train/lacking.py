"""The trainer on a node of which rank 1 has no native kernels."""

from __future__ import annotations

import os
import runpy

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        os.environ["CKPTSURGEON_KERNELS"] = "off"
    runpy.run_module("train", run_name="__main__", alter_sys=True)
