"""What `recover` did with a surgery that was cut off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.transaction import receipts
from ckptsurgeon.transaction.entry import Step


@frozen
class Recovery:
    """What `recover` did: "nothing", "discarded" (before), "finished" (after) or "given up" (taken
    back but for the files in `left`, see `GivenUp`), by the edits that the journal names."""

    outcome: str
    title: str | None = None
    receipt: str | None = None
    steps: tuple[Step, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)

    def unread(self, error: BaseException) -> SurgeryError:
        """What is said where nothing could be read after it."""
        why = error if isinstance(error, Exception) else OSError("stopped by Ctrl-C")
        if self.receipt is not None:
            return receipts.unread(self.receipt, why)
        return SurgeryError(
            f"the surgery “{self.title}” was taken back, and the run can't be read back: {why}",
            next=command("verify", why="reads it again"),
        )
