"""Plan, Receipt, Run and State as text or JSON; the only package that knows colour and width."""

from __future__ import annotations

from ckptsurgeon.report.attic import attic, attic_json
from ckptsurgeon.report.copies import export, export_json, flags_json, fork, fork_json
from ckptsurgeon.report.diff import diff, diff_json
from ckptsurgeon.report.document import (
    SCHEMA,
    checkpoint_json,
    diagnoses_json,
    error_json,
    log_json,
    plan_json,
    recovery_json,
    relaunch_json,
    status_json,
    verification_json,
)
from ckptsurgeon.report.edits import acts
from ckptsurgeon.report.format_check import format_check, format_check_json
from ckptsurgeon.report.optimizer_check import optimizer_check, optimizer_check_json
from ckptsurgeon.report.plan import done, error, log, plan, recipe, recovery, waiting
from ckptsurgeon.report.progress import Progress
from ckptsurgeon.report.ready import ready, ready_json
from ckptsurgeon.report.run import checkpoint, diagnoses, first_save, status, verification
from ckptsurgeon.report.style import Style, count, with_apply

__all__ = [
    "SCHEMA",
    "Progress",
    "Style",
    "acts",
    "attic",
    "attic_json",
    "checkpoint",
    "checkpoint_json",
    "count",
    "diagnoses",
    "diagnoses_json",
    "diff",
    "diff_json",
    "done",
    "error",
    "error_json",
    "export",
    "export_json",
    "first_save",
    "flags_json",
    "fork",
    "fork_json",
    "format_check",
    "format_check_json",
    "log",
    "log_json",
    "optimizer_check",
    "optimizer_check_json",
    "plan",
    "plan_json",
    "ready",
    "ready_json",
    "recipe",
    "recovery",
    "recovery_json",
    "relaunch_json",
    "status",
    "status_json",
    "verification",
    "verification_json",
    "waiting",
    "with_apply",
]
