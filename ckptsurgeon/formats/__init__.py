"""Where each family of trainers keeps each field of a checkpoint, and which place wins on load.

A family is a folder with a `layout` (the files of a run: a Format) and a `checkpoint` (what is in
them). A new format is one file or folder here, and one line in `detect.FORMATS`.
"""

from ckptsurgeon.formats.checkpoint import Checkpoint, Disagreement
from ckptsurgeon.formats.fields.names import FIELDS
from ckptsurgeon.formats.fields.values import (
    MOMENTS,
    Adam,
    Blob,
    Box,
    Codes,
    Conversion,
    Copy,
    Decay,
    Hazard,
    Part,
    Place,
    Replica,
    Rival,
    Setting,
    State,
    Strip,
    Weight,
)
from ckptsurgeon.formats.layout import Format

__all__ = [
    "FIELDS",
    "MOMENTS",
    "Adam",
    "Blob",
    "Box",
    "Checkpoint",
    "Codes",
    "Conversion",
    "Copy",
    "Decay",
    "Disagreement",
    "Format",
    "Hazard",
    "Part",
    "Place",
    "Replica",
    "Rival",
    "Setting",
    "State",
    "Strip",
    "Weight",
]
