"""What is said of a file that is neither as it was before its step nor as that leaves it."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.errors import InterruptedSurgery
from ckptsurgeon.hints import command

BACK = "put the file back as the surgery left it"
THEN = command("recover", why="after that")
GIVE_UP = command("recover", "--give-up", why="takes the rest back, and leaves that file as it is")


def unlike(path: Path, what: str, act: str = BACK) -> InterruptedSurgery:
    """What is wrong with the file, and what a person does about it."""
    return InterruptedSurgery(
        f"{path}: {what}",
        untouched="the journal is kept; the surgery has overwritten no byte from before it",
        next=(act, THEN, GIVE_UP),
    )
