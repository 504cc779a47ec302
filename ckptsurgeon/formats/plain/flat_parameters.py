"""Which elements of fairscale's flat parameters are whose, by the metadata that metaseq and fairseq
save.

A module that FSDP wraps lays its parameters end to end, and each data rank has a piece of that, as
long as the first one's: `padding` elements at its end are of no parameter. Source: `_get_shard`,
`local_metadata_dict` and `consolidate_shard_weights` of
`fairscale/nn/data_parallel/fully_sharded_data_parallel.py`, 146f1602.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.fields.understood import mapping
from ckptsurgeon.formats.fields.values import Part
from ckptsurgeon.hints import command

RANK = re.compile(r"-shard(\d+)\.pt$")
METADATA = ("shard_metadata", "fsdp_metadata")
"""Its key, in metaseq's files and in fairseq's."""


class Flat(NamedTuple):
    """What lies end to end in a flat parameter, and how much of this rank's piece is padding."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    padding: int


def flats(tree: Mapping[str, Any]) -> dict[str, Flat]:
    """The flat parameters of one file by their names in its model; none where the file does not say
    what is in them, and of experts, which each rank has for itself."""
    out = {}
    saved = next((tree[key] for key in METADATA if key in tree), None)
    for module in mapping(saved).get("param_metadata") or ():
        inside = f"{module['fsdp_path']}." if module.get("fsdp_path") else ""
        known = {} if module.get("no_broadcast_optim_state") else mapping(module.get("params"))
        for name, own in known.items():
            if isinstance(own, Mapping) and {"names", "numels", "padding"} <= own.keys():
                names = tuple(f"{inside}{each}" for each in own["names"])
                out[f"{inside}{name}"] = Flat(names, tuple(own["numels"]), int(own["padding"]))
    return out


def pieces(part: Part, flat: Flat) -> Iterator[Part]:
    """The stretches of each parameter in one rank's piece of a flat one. Raises SurgeryError where
    the piece is of another size than the metadata says."""
    file, size = part.place.file, part.place.value.numel
    match = RANK.search(file.name)
    first = (int(match[1]) if match else 0) * size
    end = first + size - flat.padding
    if max(0, min(sum(flat.numels) - first, size)) != size - flat.padding:
        raise _contradiction(file, part)
    at = 0
    for name, numel in zip(flat.names, flat.numels, strict=True):
        start, stop = max(at, first), min(at + numel, end)
        if start < stop:
            yield part._replace(parameter=name, start=start - first, end=stop - first)
        at += numel


def _contradiction(file: Path, part: Part) -> SurgeryError:
    return SurgeryError(
        f"{file.name}: its {part.kind} of {part.parameter} have "
        f"{count(part.place.value.numel, 'element')}, and its metadata says otherwise",
        next=command("doctor", why="which step is whole"),
    )
