"""A step that counts as another number after a surgery: whether its trainer finds it again."""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.layout import numbered_inside, resumes
from ckptsurgeon.hints import shell
from ckptsurgeon.run.run import Run


def renumbered(run: Run, step: int, number: int, stay: Collection[int]) -> list[int]:
    """The steps that `stay`, by the numbers that they have once `step` counts as `number`: one that
    has its number in its file has the new one."""
    inside = numbered_inside(run.format)
    return sorted({number if inside and saved == step else saved for saved in stay})


def refuse_shadowed(run: Run, step: int, number: int, stay: Collection[int]) -> None:
    """Raise SurgeryError where `step` counts as `number` once it is edited, and a trainer that
    keeps no pointer would go back to a higher one: to another of those that `stay`, or, where names
    have the number, to this one after it has saved lower ones.

    `stay` are the saved steps that are still in the run after the surgery."""
    if number == step or run.pointers():
        return
    entry = (run.entries(step) or [run.directory(step)])[0]
    over = [other for other in stay if other != step and other >= number]
    aside: list[list[object]] = [
        ["mkdir", "ASIDE"],
        ["mv", *(p for o in over for p in run.entries(o)), "ASIDE"],
    ]
    if numbered_inside(run.format):
        if over:
            raise SurgeryError(
                f"{entry.name} would be step {number}, and step {over[-1]} would be resumed in its "
                "place: its trainer keeps no pointer",
                next=shell(*aside, why="in another folder they are in nobody's way"),
            )
    elif number < step and resumes(run.format, run.root) is not None:
        name = re.sub(rf"(?<!\d)0*{step}(?!\d)", str(number), entry.name)
        raise SurgeryError(
            f"the next step would be {number + 1}, and {entry.name} keeps its name: its trainer "
            f"resumes the highest number, so until it saves a step after {step} each restart would "
            "come back here and train the same steps again",
            next=shell(
                *(aside if over else []),
                ["mv", entry, entry.with_name(name)],
                why="then the same command again",
            ),
        )
