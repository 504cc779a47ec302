"""The JSON documents of `--json`, schema 1: docs/json.md says what each key means."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import SurgeryError, why_unread
from ckptsurgeon.hints import apart
from ckptsurgeon.plans.edits import AnyChange, Aside, Change, Computed, Elements, Relink
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.report.edits import acts
from ckptsurgeon.report.fields import SHOWN, places

if TYPE_CHECKING:
    from ckptsurgeon.formats import Checkpoint, State
    from ckptsurgeon.logs.printed.comparison import Comparison
    from ckptsurgeon.look import Verification
    from ckptsurgeon.look.advise import Advice
    from ckptsurgeon.look.finding import Finding
    from ckptsurgeon.look.loss_tail import LossTail
    from ckptsurgeon.look.resumed.verdict import Verdict
    from ckptsurgeon.look.vitals.vitals import Vitals
    from ckptsurgeon.run.run import Run
    from ckptsurgeon.transaction.given_up import GivenUp
    from ckptsurgeon.transaction.recovery import Recovery

SCHEMA = 1
"""Grows when a key changes its meaning or leaves; a new key alone does not change it."""


def plain(item: Any) -> Any:
    """`item` in JSON's own types; a number that JSON can't say (inf, nan) becomes its name."""
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else str(item)
    if isinstance(item, Mapping):
        return {str(key): plain(inner) for key, inner in item.items()}
    if isinstance(item, (list, tuple)):
        return [plain(inner) for inner in item]
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {f.name: plain(getattr(item, f.name)) for f in dataclasses.fields(item)}
    return str(item)


def plan_json(plan: Plan, format: str, receipt: Receipt | None = None) -> dict[str, Any]:
    """The document of `plan`, and with its receipt that of every command that edited."""
    return {
        "schema": SCHEMA,
        "run": plan.run,
        "title": plan.title,
        "step": _step(plan.before),
        "format": format,
        "promise": promise_json(plan.promise),
        "before": promise_json(plan.before),
        "changes": changes_json(plan.changes),
        "edits": len(plan.edits),
        "warnings": list(plan.warnings),
        "undoes": plan.undoes,
        "restored": plan.restored or None,
        "applied": receipt is not None,
        "receipt": None if receipt is None else receipt.id,
        "verdict": None if receipt is None else _verdict(plan.promise),
    }


def _verdict(promise: Promise | None) -> str | None:
    """`verified`, or `written` where no loader of the trainer was ever asked which values it takes;
    null without a promise."""
    if promise is None:
        return None
    return "verified" if promise.asked else "written"


def _step(promise: Promise | None) -> int | None:
    return None if promise is None else _known(promise.step - 1, promise)


def _known(step: int, promise: Promise | None) -> int | None:
    """`step`; null where no name and no number says which one it is."""
    return None if promise is not None and "step" in promise.not_known else step


def promise_json(promise: Promise | None) -> Any:
    """`promise` in every document."""
    document = plain(promise)
    if promise is not None and "step" in promise.not_known:
        document["step"] = None
    return document


def changes_json(items: Sequence[AnyChange]) -> list[dict[str, Any]]:
    """One object for each place."""
    each = (item.single() if isinstance(item, Change) else (item,) for item in items)
    return [_change_json(one) for single in each for one in single]


def _change_json(item: AnyChange) -> dict[str, Any]:
    base = {"file": item.file, "field": item.field}
    if isinstance(item, Change):
        path, new = [plain(key) for key in item.path], plain(item.new)
        if isinstance(item.new, (Computed, Elements)):
            new["told"] = new.pop("label")  # as schema 1 has it
        return {
            "kind": "change",
            **base,
            "path": path,
            "old": plain(item.old),
            "new": new,
            "elements": plain(item.elements),
        }
    if isinstance(item, Aside):
        return {"kind": "aside", **base}
    if isinstance(item, Relink):
        return {"kind": "relink", **base, "old": item.old, "new": item.new}
    return {"kind": "rewrite", **base, "note": item.note, "new_file": item.new_file}


def checkpoint_json(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """The document of `show`."""
    state = run.with_caveats(checkpoint.state())
    return {
        "schema": SCHEMA,
        "run": str(run.root),
        "step": _known(state.step, state.promise),
        "format": run.format.name,
        "dialect": state.dialect,
        "data_parallel": state.data_parallel,
        "model_parallel": state.model_parallel,
        "promise": promise_json(state.promise),
        "schedule": plain(state.schedule),
        "places": {
            field: [
                {
                    "file": run.relative(place.file),
                    "path": [plain(key) for key in place.path],
                    "value": plain(place.value),
                    "wins": place.wins,
                }
                for place in places(checkpoint, field)
            ]
            for field in SHOWN
        },
        "notes": list(state.notes),
    }


def verification_json(result: Verification, comparison: Comparison | None = None) -> dict[str, Any]:
    """The document of `verify`."""
    return {
        "schema": SCHEMA,
        "step": _known(result.step, result.promise),
        "format": result.format,
        "promise": promise_json(result.promise),
        "files": result.files,
        "sound": not result.findings,
        "verdict": _verdict(result.promise),
        "findings": list(result.findings),
        "level": result.level,
        "no_crc": result.no_crc,
        "against": result.against,
        "since": verdicts_json(result.since),
        "moments": plain(result.moments),
        "not_compared": list(result.not_compared),
        "word": comparison_json(comparison),
    }


def verdicts_json(since: Iterable[Verdict]) -> list[dict[str, str]]:
    """What an earlier step says of a later one."""
    return [{"subject": v.subject, "verdict": v.verdict, "text": v.text} for v in since]


def comparison_json(comparison: Comparison | None) -> dict[str, Any] | None:
    """What the trainer said, compared with the promise; null when it was not read."""
    if comparison is None:
        return None
    return {
        "step": comparison.expected.promise.step,
        "agrees": list(comparison.agrees),
        "differs": list(comparison.differs),
        "not_compared": list(comparison.not_compared),
        "not_said": list(comparison.not_said),
        "lines": list(comparison.lines),
    }


def diagnoses_json(
    run: Run, diagnoses: Sequence[Finding], loss: Advice, seen: Vitals | None = None
) -> dict[str, Any]:
    """The document of `doctor`."""
    return {
        "schema": SCHEMA,
        "run": str(run.root),
        "healthy": not diagnoses,
        "loss": {"verdict": loss.verdict, "reason": loss.reason},
        "findings": _findings(diagnoses),
        "writers": _writers(run),
        "vitals": None if seen is None else _vitals(seen),
    }


def _findings(found: Sequence[Finding]) -> list[dict[str, Any]]:
    entries = []
    for item in found:
        command, comment = apart(item.next or "")
        entries.append({"what": item.what, "next": command, "comment": comment})
    return entries


def _vitals(seen: Vitals) -> dict[str, Any]:
    """Each observation with what to do about it."""
    document: dict[str, Any] = plain(dataclasses.replace(seen, next={}))
    del document["next"]
    for item in document["observations"]:
        item["next"], item["comment"] = apart(seen.next[item["kind"]])
    return document


def status_json(
    run: Run,
    state: State | None,
    problem: SurgeryError | None,
    seen: LossTail | None,
    found: Sequence[Finding] = (),
) -> dict[str, Any]:
    """The document of `status`."""
    logs = _logs_json(run)
    return {
        "schema": SCHEMA,
        "run": str(run.root),
        "name": run.name,
        "step": None if state is None else _known(state.step, state.promise),
        "format": run.format.name,
        "promise": None if state is None else promise_json(state.promise),
        "schedule": None if state is None else plain(state.schedule),
        "steps": [
            {"step": step, "complete": condition == "complete"}
            for step, condition in run.conditions.of_each(run.steps()).items()
        ],
        "pointers": run.pointers(),
        "logdirs": logs["logdirs"],
        "logs": logs["logs"],
        "loss": None if seen is None else _loss_json(seen),
        "writers": logs["writers"],
        "logs_unread": logs["logs_unread"],
        "interrupted": run.interrupted(),
        "receipts": len(run.receipts()),
        "damaged_receipts": run.damaged_receipts(),
        "problem": None if problem is None else error_json(problem),
        "findings": _findings(found),
    }


def _writers(run: Run) -> list[str] | None:
    """Who writes to the run; null where its logs, which say so, can't be looked at."""
    with contextlib.suppress(OSError):
        return run.writers()
    return None


def _logs_json(run: Run) -> dict[str, Any]:
    """What the logs say, and who writes them; null, with the reason, where they can't be looked
    at."""
    try:
        return {
            "logdirs": [run.relative(folder) for folder in run.logs.folders()],
            "logs": [
                {"name": stream.name, "last_step": stream.last}
                for source in run.log_sources()
                for stream in source.streams()
            ],
            "writers": run.writers(),
            "logs_unread": None,
        }
    except OSError as error:
        return {
            **dict.fromkeys(("logdirs", "logs", "writers")),
            "logs_unread": why_unread(error),
        }


def _loss_json(seen: LossTail) -> dict[str, Any]:
    """The last point of the loss, and what is wrong with its end."""
    from ckptsurgeon.report.sparkline import headline

    what, hint = headline(seen) or (None, "")
    next, comment = apart(hint)
    return {
        "step": seen.steps[-1],
        "value": plain(seen.values[-1]),
        "problem": what,
        "next": next or None,
        "comment": comment or None,
    }


def log_json(
    receipts: Sequence[Receipt],
    *,
    pruned: Collection[str] = (),
    damaged: Mapping[str, str] | None = None,
    given_up: Sequence[GivenUp] = (),
) -> dict[str, Any]:
    """The document of `log`, newest first; the attics of those in `pruned` are gone, and those in
    `damaged` can't be read. `given_up` are no surgeries that were done."""
    return {
        "schema": SCHEMA,
        "receipts": [
            {
                "receipt": item.id,
                "title": item.title,
                "why": item.why,
                "when": item.when,
                "user": item.user,
                "host": item.host,
                "version": item.version,
                "recipe": plain(item.recipe),
                "promise": promise_json(item.promise),
                "undoes": item.undoes,
                "restored": item.restored or None,
                "pruned": item.id in pruned,
            }
            for item in reversed(receipts)
        ],
        "damaged": dict(damaged or {}),
        "given_up": [
            {
                "surgery": item.receipt.id,
                "title": item.receipt.title,
                "why": item.receipt.why,
                "when": item.receipt.when,
                "user": item.receipt.user,
                "host": item.receipt.host,
                "left": dict(item.left),
                "pruned": item.receipt.id in pruned,
            }
            for item in reversed(given_up)
        ],
    }


def recovery_json(done: Recovery, receipt: Receipt | None = None) -> dict[str, Any]:
    """The document of `recover`; with the receipt of what it finished."""
    return {
        "schema": SCHEMA,
        "outcome": done.outcome,
        "title": done.title,
        "receipt": done.receipt,
        "restored": None if receipt is None else receipt.restored or None,
        "files": acts(done.steps),
        "left": dict(done.left),
    }


def relaunch_json(
    argv: Sequence[str],
    promise: Promise,
    status: int | None,
    script: str | None = None,
    comparison: Comparison | None = None,
    saved: tuple[int, Sequence[Verdict]] | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The document of `relaunch`; `status` is null when nothing was started."""
    return {
        "schema": SCHEMA,
        "command": list(argv),
        "environment": dict(variables or {}),
        "promise": promise_json(promise),
        "status": status,
        "script": script,
        "word": comparison_json(comparison),
        "saved": None if saved is None else {"step": saved[0], "since": verdicts_json(saved[1])},
    }


def error_json(error: SurgeryError) -> dict[str, Any]:
    """The one object that stderr gets when a command with --json fails."""
    hints = [apart(hint) for hint in error.hints]
    return {
        "error": error.what,
        "untouched": error.untouched,
        "next": [command for command, _ in hints],
        "comment": [comment for _, comment in hints],
        "exit_code": error.exit_code,
    }
