"""The form of a remedy that this run can take."""

from __future__ import annotations

from collections.abc import Sequence

from ckptsurgeon import surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.advise.remedies import Remedy
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.advice import Proposal
from ckptsurgeon.run.run import Run


def proposal(run: Run, remedy: Remedy) -> Proposal:
    """The first form of a remedy that `plan` accepts."""
    refused = ""
    for data in (remedy.recipe, *remedy.others):
        try:
            surgery.plan(run, from_data(data))
        except SurgeryError as error:
            refused = refused or error.what
        else:
            return Proposal(remedy, data)
    return Proposal(remedy, None, refused)


def first(proposals: Sequence[Proposal]) -> Proposal | None:
    """The first that `plan` accepts."""
    return next((each for each in proposals if each.recipe is not None), None)
