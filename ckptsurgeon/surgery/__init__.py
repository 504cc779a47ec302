"""The public API: plans, and what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptsurgeon.surgery.apply import apply, give_up, recover, refuse_stale, waiting, way_back
from ckptsurgeon.surgery.plan import plan

if TYPE_CHECKING:
    from ckptsurgeon.surgery.compaction import plan_compact, plan_shrink
    from ckptsurgeon.surgery.undo import plan_redo, plan_undo

_HOMES = {
    "plan_compact": "compaction", "plan_shrink": "compaction",
    "plan_redo": "undo", "plan_undo": "undo",
}  # fmt: skip

__all__ = [
    "apply",
    "give_up",
    "plan",
    "plan_compact",
    "plan_redo",
    "plan_shrink",
    "plan_undo",
    "recover",
    "refuse_stale",
    "waiting",
    "way_back",
]


def __getattr__(name: str) -> Any:
    """The rarer ones load their module at first use: a `set` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
