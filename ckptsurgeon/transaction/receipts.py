"""Receipts: what each finished surgery did, kept in `.ckptsurgeon/receipts/<id>/`."""

from __future__ import annotations

import functools
import json
import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Content, Plan, Promise, Receipt, Rewrite, from_json, to_json
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.inverse import inverse
from ckptsurgeon.version import VERSION

# --- read ----------------------------------------------------------------------------------------


def next_id(root: Path) -> str:
    """The id of the next surgery: "0001", …"""
    return f"{max(map(int, _ids(root)), default=0) + 1:04d}"


def read(root: Path, mentioning: str = "") -> list[Receipt]:
    """Every surgery that was finished, oldest first; with `mentioning` only those whose text has
    that word. Raises SurgeryError for a damaged receipt."""
    receipts = []
    for id in _ids(root):
        path = root / receipt_file(id)
        if mentioning and mentioning.encode() not in path.read_bytes():
            continue
        status = path.stat()
        receipts.append(_read_once(path, status.st_ino, status.st_size, status.st_mtime_ns))
    return receipts


def standing(receipts: Sequence[Receipt]) -> list[Receipt]:
    """Those that are in force: no undo, and not undone."""
    undone = {receipt.undoes for receipt in receipts}
    return [receipt for receipt in receipts if receipt.undoes is None and receipt.id not in undone]


def told(receipts: Sequence[Receipt], promise: Promise) -> Promise:
    """`promise` with what the surgeries in force said of its step: a value that they made for one
    step only is still for one step, as long as it is theirs."""
    for receipt in standing(receipts):
        old = receipt.promise
        if old is not None and old.step == promise.step:
            reach = {
                name: why
                for name, why in old.one_step.items()
                if getattr(old, name, None) == getattr(promise, name, None)
            }
            promise = replace(promise, one_step={**promise.one_step, **reach})
    return promise


@functools.lru_cache(64)
def _read_once(path: Path, *status: int) -> Receipt:
    """The receipt at `path`, read once for each state of the file: that of a checkpoint of 400
    shards is long."""
    try:
        receipt = from_json(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError):
        receipt = None
    if not isinstance(receipt, Receipt):
        raise SurgeryError(
            f"{path} is damaged",
            next="move it out of .ckptsurgeon; its surgery stays in force but can't be undone",
        )
    return receipt


def _ids(root: Path) -> list[str]:
    folder = root / HOME / "receipts"
    if not folder.is_dir():
        return []
    ids = [item.name for item in folder.iterdir() if item.name.isdigit()]
    return sorted(id for id in ids if (root / receipt_file(id)).is_file())


# --- write ---------------------------------------------------------------------------------------


def receipt_file(id: str) -> str:
    """Where the receipt of surgery `id` is: once it is there, the surgery is finished."""
    return f"{HOME}/receipts/{id}/receipt.json"


def records(id: str) -> dict[str, str]:
    """Staged name → final name of the two records of a surgery."""
    return {
        f"{HOME}/staging/{id}.{name}": f"{HOME}/receipts/{id}/{name}"
        for name in ("recipe.json", "receipt.json")
    }


def contents(receipt: Receipt) -> dict[str, bytes]:
    """Staged name → bytes of the two records."""
    documents = (receipt.recipe, to_json(receipt))
    return dict(zip(records(receipt.id), map(_pretty, documents), strict=True))


def of(plan: Plan) -> Receipt:
    """The receipt that `plan` becomes, here and now."""
    return Receipt(
        id=plan.id,
        title=plan.title,
        why=str(plan.recipe.get("why") or ""),
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        user=_user(),
        host=os.uname().nodename,
        version=VERSION,
        recipe=plan.recipe,
        changes=tuple(
            # What a log file got is on disk; a receipt says which file, and that it changed.
            replace(change, content=Content(())) if isinstance(change, Rewrite) else change
            for change in plan.changes
        ),
        inverse=inverse(plan.edits),
        promise=plan.promise,
        before=plan.before,
        undoes=plan.undoes,
        step=plan.step,
        steps=plan.steps,
        logs=plan.logs,
    )


def _user() -> str:
    """The user's name by the user database: the environment is not evidence."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _pretty(document: Mapping[str, Any]) -> bytes:
    """JSON with a line for each change and each edit. The encoder's own indentation takes ten times
    as long, and a checkpoint of 400 shards has 5,000 changes."""
    fields = []
    for key, value in document.items():
        text = json.dumps(value, ensure_ascii=False, default=to_json)
        if text.startswith('[{"kind"'):  # a quote in a string has a backslash before it
            text = "[\n  " + text[1:-1].replace('}, {"kind": ', '},\n  {"kind": ') + "\n ]"
        fields.append(f" {json.dumps(key)}: {text}")
    # A file name that is not UTF-8 has surrogates in it, which JSON escapes in the same way.
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode(errors="backslashreplace")
