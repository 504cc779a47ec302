"""One picture of a run: what was kept, what was abandoned, and why. Drawn with matplotlib."""

from __future__ import annotations

from ckptsurgeon.report.picture.axes import KINDS
from ckptsurgeon.report.picture.page import page
from ckptsurgeon.report.picture.sheet import FORMATS, draw

__all__ = ["FORMATS", "KINDS", "draw", "page"]
