"""What two steps say of one thing that a resume must bring back: a verdict, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.plans.edits import AnyChange, Change
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.plan import Receipt

AGREES, DIFFERS, NOT_COMPARED = "agrees", "differs", "not compared"


@frozen
class Verdict:
    """`verdict` is one of AGREES, DIFFERS, NOT_COMPARED; `text` of the second is a sentence of its
    own, of the others it goes on after `subject`."""

    subject: str
    verdict: str
    text: str

    @property
    def agrees(self) -> bool:
        """Whether both steps say so."""
        return self.verdict == AGREES

    @property
    def differs(self) -> bool:
        """Whether the later step is not what training makes of the earlier one."""
        return self.verdict == DIFFERS

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" if self.subject else self.text


def edited(
    receipts: Sequence[Receipt],
    now: Checkpoint,
    before: Checkpoint,
    fields: tuple[str, ...] | None = None,
) -> bool:
    """Whether a surgery stands between the two: on a step in between, on the later one, or on the
    earlier one after the later was saved. What was done to the earlier one before that is what the
    trainer went on from. With `fields`, only one that changed a field whose name begins so."""
    from datetime import datetime

    saved = datetime.fromtimestamp(now.state().saved_at).astimezone()
    return any(
        _touches(receipt.changes, fields)
        for receipt in receipts
        if receipt.step is not None and before.step <= receipt.step <= now.step
        if receipt.step != before.step or datetime.fromisoformat(receipt.when) > saved
    )


def _touches(changes: Iterable[AnyChange], fields: tuple[str, ...] | None) -> bool:
    found = [change for change in changes if isinstance(change, Change)]
    return bool(found) if fields is None else any(c.field.startswith(fields) for c in found)
