"""Plan, Receipt, Run and State as text or JSON; the only package that knows colour and width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptsurgeon.report.attics import attic as attic
    from ckptsurgeon.report.attics import attic_json as attic_json
    from ckptsurgeon.report.attics import pruned as pruned
    from ckptsurgeon.report.copies import export as export
    from ckptsurgeon.report.copies import export_json as export_json
    from ckptsurgeon.report.copies import flags_json as flags_json
    from ckptsurgeon.report.copies import fork as fork
    from ckptsurgeon.report.copies import fork_json as fork_json
    from ckptsurgeon.report.differences import diff as diff
    from ckptsurgeon.report.differences import diff_json as diff_json
    from ckptsurgeon.report.document import SCHEMA as SCHEMA
    from ckptsurgeon.report.document import checkpoint_json as checkpoint_json
    from ckptsurgeon.report.document import diagnoses_json as diagnoses_json
    from ckptsurgeon.report.document import error_json as error_json
    from ckptsurgeon.report.document import log_json as log_json
    from ckptsurgeon.report.document import plan_json as plan_json
    from ckptsurgeon.report.document import recovery_json as recovery_json
    from ckptsurgeon.report.document import relaunch_json as relaunch_json
    from ckptsurgeon.report.document import status_json as status_json
    from ckptsurgeon.report.document import verification_json as verification_json
    from ckptsurgeon.report.drafts import draft as draft
    from ckptsurgeon.report.drafts import draft_json as draft_json
    from ckptsurgeon.report.drafts import draft_page as draft_page
    from ckptsurgeon.report.edits import acts as acts
    from ckptsurgeon.report.format_checks import format_check as format_check
    from ckptsurgeon.report.format_checks import format_check_json as format_check_json
    from ckptsurgeon.report.optimizer_checks import optimizer_check as optimizer_check
    from ckptsurgeon.report.optimizer_checks import optimizer_check_json as optimizer_check_json
    from ckptsurgeon.report.parameter_maps import parameter_map as parameter_map
    from ckptsurgeon.report.parameter_maps import parameter_map_json as parameter_map_json
    from ckptsurgeon.report.plans import done as done
    from ckptsurgeon.report.plans import error as error
    from ckptsurgeon.report.plans import log as log
    from ckptsurgeon.report.plans import plan as plan
    from ckptsurgeon.report.plans import recipe as recipe
    from ckptsurgeon.report.plans import recovery as recovery
    from ckptsurgeon.report.plans import waiting as waiting
    from ckptsurgeon.report.plans import way_back as way_back
    from ckptsurgeon.report.progress import Progress as Progress
    from ckptsurgeon.report.readiness import ready as ready
    from ckptsurgeon.report.readiness import ready_json as ready_json
    from ckptsurgeon.report.run import checkpoint as checkpoint
    from ckptsurgeon.report.run import diagnoses as diagnoses
    from ckptsurgeon.report.run import first_save as first_save
    from ckptsurgeon.report.run import status as status
    from ckptsurgeon.report.run import verification as verification
    from ckptsurgeon.report.style import Style as Style
    from ckptsurgeon.report.style import with_apply as with_apply

_PLACES = {
    "attics": "attic attic_json pruned",
    "copies": "export export_json flags_json fork fork_json",
    "differences": "diff diff_json",
    "document": "SCHEMA checkpoint_json diagnoses_json error_json log_json plan_json recovery_json "
    "relaunch_json status_json verification_json",
    "drafts": "draft draft_json draft_page",
    "edits": "acts",
    "format_checks": "format_check format_check_json",
    "optimizer_checks": "optimizer_check optimizer_check_json",
    "parameter_maps": "parameter_map parameter_map_json",
    "plans": "done error log plan recipe recovery waiting way_back",
    "progress": "Progress",
    "readiness": "ready ready_json",
    "run": "checkpoint diagnoses first_save status verification",
    "style": "Style with_apply",
}
_HOMES = {name: place for place, names in _PLACES.items() for name in names.split()}
"""The module of each name, none of which is called as a name is: it would be in its place."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Each name loads its module at first use: no command needs all."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
