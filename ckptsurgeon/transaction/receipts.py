"""Receipts: what each finished surgery did, kept in `.ckptsurgeon/receipts/<id>/`."""

from __future__ import annotations

import functools
import json
import os
import pwd
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import SurgeryError, VerificationFailed
from ckptsurgeon.hints import Hint, command, shell
from ckptsurgeon.plans.as_json import Malformed, parsed, to_json
from ckptsurgeon.plans.edits import AnyChange, Change, Computed, Content, Rewrite
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.transaction.home import ATTIC, HOME, RECEIPTS, staged_name
from ckptsurgeon.transaction.inverse import inverse
from ckptsurgeon.transaction.names import ID
from ckptsurgeon.version import VERSION

ASIDE = "receipt.damaged"
"""The name that a user gives to a damaged receipt to go on without it."""

# --- read ----------------------------------------------------------------------------------------


def next_id(root: Path) -> str:
    """The id of the next surgery: "0001", …; none that an attic has, though its receipt is lost."""
    return f"{max(map(int, [*_ids(root), *_ids(root, ATTIC)]), default=0) + 1:04d}"


def numbered(id: str) -> str:
    """The id that a user may write without its zeros."""
    return id.zfill(4) if id.isdecimal() else id


def read(root: Path, mentioning: Collection[str] = ()) -> list[Receipt]:
    """Every surgery that was finished and whose receipt can be read, oldest first; with
    `mentioning` only those whose text has one of these words."""
    receipts = []
    for id in _ids(root):
        path = root / receipt_file(id)
        if disk.is_file(path) and _mentions(path, mentioning):
            receipt, _ = _read(path)
            receipts += [] if receipt is None else [receipt]
    return receipts


def _mentions(path: Path, words: Collection[str]) -> bool:
    state = _state(path)
    try:
        return not words or _mentions_once(path, tuple(words), *state)
    except OSError:  # what is wrong with it is said where it is read
        return True


@functools.lru_cache(4096)
def _mentions_once(path: Path, words: tuple[str, ...], *_: int) -> bool:
    text = whole_file.read(path, whole_file.MAX_RECORD)
    return any(word.encode() in text for word in words)


def damaged(root: Path) -> dict[str, str]:
    """Id → what is wrong, of each surgery whose receipt can't be read or was set aside for that:
    it stays in force and can't be undone."""
    wrong = {}
    for id in _ids(root):
        path = root / receipt_file(id)
        if disk.is_file(path):
            reason = _read(path)[1]
        else:
            reason = "was set aside as damaged" if disk.is_there(path.with_name(ASIDE)) else ""
        if reason:
            wrong[id] = f"{receipt_file(id)} {reason}"
    return wrong


def refuse_damaged(root: Path) -> None:
    """Raise while there is a receipt that can't be read: a plan goes by all of them, unless the
    user has set it aside."""
    for id, wrong in damaged(root).items():
        path = root / receipt_file(id)
        if disk.is_file(path):
            restore = f"restore {path} from a copy of the run"
            raise SurgeryError(f"{root / wrong}", next=(restore, set_aside(path)))


def unread(id: str, error: Exception) -> VerificationFailed:
    """What is said of a surgery that is done, where nothing could be read after it."""
    return VerificationFailed(
        f"receipt {id} is in force, and the run can't be read back: {error}",
        untouched="every byte from before the surgery is kept",
        next=(command("verify", why="reads it again"), command("undo", id)),
    )


def set_aside(path: Path) -> Hint:
    """How to go on without a damaged receipt."""
    return shell(
        ["mv", path, path.with_name(ASIDE)],
        why="go on without it; its surgery stays in force and can't be undone",
    )


def taken_back(receipts: Sequence[Receipt]) -> dict[str, str]:
    """Id → the id of what took it back, of each surgery that is undone and of each undo that was
    redone. What was redone is in force again."""
    by: dict[str, str] = {}
    for receipt in reversed(receipts):
        if receipt.undoes is not None and receipt.id not in by:
            by[receipt.undoes] = receipt.id
    return by


def standing(receipts: Sequence[Receipt]) -> list[Receipt]:
    """Those that are in force: no undo, and not undone."""
    undone = taken_back(receipts)
    return [receipt for receipt in receipts if receipt.undoes is None and receipt.id not in undone]


def changed(receipts: Sequence[Receipt], fields: Collection[str]) -> bool:
    """Whether a surgery that is in force changed any of these fields."""
    return any(
        isinstance(change, Change) and change.field in fields
        for receipt in standing(receipts)
        for change in receipt.changes
    )


def with_caveats(receipts: Sequence[Receipt], promise: Promise) -> Promise:
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


def _read(path: Path) -> tuple[Receipt | None, str]:
    """The receipt at `path`, or what is wrong with it. That a disk did not give its bytes is not
    kept: the next look may read them. Raises OSError where it says nothing of the file."""
    state = _state(path)
    try:
        return _read_once(path, *state)
    except OSError as error:
        return None, f"can't be read: {error.strerror}"


def _state(path: Path) -> tuple[int, int, int]:
    """Of a file: another one after each change."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@functools.lru_cache(4096)
def _read_once(path: Path, *_: int) -> tuple[Receipt | None, str]:
    """The same, read once for each state of the file: that of a checkpoint of 400 shards is long.
    Raises OSError."""
    try:
        receipt = parsed(whole_file.read(path, whole_file.MAX_RECORD))
    except Malformed as error:
        return None, f"is damaged: {error}"
    if not isinstance(receipt, Receipt):
        return None, "is damaged: it is not a receipt"
    if receipt.id != path.parent.name:
        return None, f"is damaged: it calls itself that of surgery {receipt.id!r}"
    return receipt, ""


def _ids(root: Path, kind: str = RECEIPTS) -> list[str]:
    """Also of a surgery whose receipt can't be read; of those that keep an attic, too."""
    folder = root / HOME / kind
    if not disk.is_folder(folder):
        return []
    return sorted(item.name for item in folder.iterdir() if ID.fullmatch(item.name))


# --- write ---------------------------------------------------------------------------------------


def receipt_file(id: str) -> str:
    """Where the receipt of surgery `id` is: once it is there, the surgery is finished."""
    return f"{HOME}/{RECEIPTS}/{id}/receipt.json"


def records(id: str) -> dict[str, str]:
    """Staged name → final name of the records of a surgery, the receipt last."""
    return {
        staged_name(id, name): f"{HOME}/{RECEIPTS}/{id}/{name}"
        for name in ("recipe.json", "kept.json", "receipt.json")
    }


def contents(receipt: Receipt, kept: bytes) -> dict[str, bytes]:
    """Staged name → bytes of the records; `kept` says what is taken away (`kept.document`)."""
    documents = (_pretty(receipt.recipe), kept, _pretty(to_json(receipt)))
    return dict(zip(records(receipt.id), documents, strict=True))


def of(plan: Plan, launch: str = "") -> Receipt:
    """The receipt that `plan` becomes, here and now, by the ranks of `launch`."""
    outside = set().union(*map(_outside, plan.changes))
    return Receipt(
        id=plan.id,
        title=plan.title,
        why=str(plan.recipe.get("why") or ""),
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        user=_user(),
        host=os.uname().nodename,
        version=VERSION,
        recipe=plan.recipe,
        changes=tuple(map(_shortened, plan.changes)),
        inverse=inverse(plan.edits, plan.id),
        promise=plan.promise,
        before=plan.before,
        undoes=plan.undoes,
        step=plan.step,
        steps=plan.steps,
        logs=plan.logs,
        restored=plan.restored,
        read=tuple(each for each in plan.assumes if each.file in outside),
        launch=launch,
    )


def _shortened(change: AnyChange) -> AnyChange:
    """What a log file got is on disk: a receipt says which file, and that it changed. What numbers
    of another run became tensors, too: it says which tensors, and the files of that run once."""
    if isinstance(change, Rewrite):
        return replace(change, content=Content(()))
    if isinstance(change, Change) and isinstance(change.new, Computed) and _outside(change):
        return replace(change, new=replace(change.new, terms=()))
    return change


def _outside(change: AnyChange) -> set[str]:
    """The files of another run that its numbers are read from."""
    new = change.new if isinstance(change, Change) else None
    terms = new.terms if isinstance(new, Computed) else ()
    files = {file for term in terms for source in term for file, _, _ in source.ranges()}
    return {file for file in files if file.startswith("../") or Path(file).is_absolute()}


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
        text = json.dumps(value, ensure_ascii=False, check_circular=False, default=to_json)
        if text.startswith('[{"kind"'):  # a quote in a string has a backslash before it
            text = "[\n  " + text[1:-1].replace('}, {"kind": ', '},\n  {"kind": ') + "\n ]"
        fields.append(f" {json.dumps(key)}: {text}")
    # A file name that is not UTF-8 has surrogates in it, which JSON escapes in the same way.
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode(errors="backslashreplace")
