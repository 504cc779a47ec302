"""The public API: plans, and what becomes of them."""

from __future__ import annotations

from ckptsurgeon.surgery.apply import apply, recover, refuse_stale
from ckptsurgeon.surgery.compaction import plan_compact, plan_shrink
from ckptsurgeon.surgery.plan import plan
from ckptsurgeon.surgery.undo import plan_undo

__all__ = [
    "apply",
    "plan",
    "plan_compact",
    "plan_shrink",
    "plan_undo",
    "recover",
    "refuse_stale",
]
