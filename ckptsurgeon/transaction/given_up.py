"""The record of a surgery that was given up: its receipt, and the files that were not restored.

It lies where the receipt would, under another name: no command takes the surgery for one that was
done, and its id is not used again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import InterruptedSurgery
from ckptsurgeon.plans.as_json import Malformed, parsed, to_json
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.plans.record_types import made
from ckptsurgeon.transaction.home import HOME, RECEIPTS, staged_name
from ckptsurgeon.transaction.names import ID


@frozen
class GivenUp:
    """`left`: each file that was left as somebody else wrote it → where the surgery has kept what
    it was before, a name in the attic; empty where that is gone."""

    receipt: Receipt
    left: Mapping[str, str]


def record_file(id: str) -> str:
    """Where the record of surgery `id` is once it is given up."""
    return f"{HOME}/{RECEIPTS}/{id}/given-up.json"


def staged_record(id: str) -> str:
    """Where it is written before that."""
    return staged_name(id, "given-up.json")


def read(root: Path) -> list[GivenUp]:
    """Every surgery that was given up and whose record can be read, oldest first."""
    found = []
    for path in disk.matching(root / HOME / RECEIPTS, "*/given-up.json"):
        try:
            document = parsed(whole_file.read(path, whole_file.MAX_RECORD, follow=False))
            record = made(GivenUp, document if isinstance(document, dict) else {})
        except (OSError, Malformed, TypeError):
            continue
        if ID.fullmatch(record.receipt.id) and record.receipt.id == path.parent.name:
            found.append(record)
    return found


def staged_receipt(root: Path, id: str) -> Receipt:
    """The receipt that surgery `id` would have got. Raises InterruptedSurgery where it can't be
    read: nothing else says what the surgery has to bring back."""
    path = root / staged_name(id, "receipt.json")
    try:
        receipt, wrong = parsed(whole_file.read(path, whole_file.MAX_RECORD, follow=False)), ""
    except OSError as error:
        receipt, wrong = None, f": {error.strerror}"
    except Malformed as error:
        receipt, wrong = None, f": {error}"
    if not isinstance(receipt, Receipt) or receipt.id != id:
        raise InterruptedSurgery(
            f"{path} is damaged{wrong}, and it says what the surgery has to bring back",
            untouched="nothing was touched by this command",
            next=f"restore {path} from a snapshot of the file system",
        )
    return receipt


def write(root: Path, id: str, left: Mapping[str, str]) -> None:
    """Put the record in place, durably; again where an earlier attempt was killed at it."""
    staged, path = root / staged_record(id), root / record_file(id)
    if not disk.is_there(path):
        if disk.is_there(staged):
            disk.remove_file(staged)
        document = {"receipt": staged_receipt(root, id), "left": dict(left)}
        text = json.dumps(document, default=to_json) + "\n"
        disk.write_new(staged, text.encode())
        disk.rename(staged, path)
    disk.fsync_directory(path.parent)
