"""Copies of one parameter that drifted apart across tensor-parallel ranks become their average."""

from __future__ import annotations

import re

from ckptsurgeon.edits import AnyChange, Change, Elements
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.dtypes import FLOATS, ITEM_BYTES, floats, from_floats
from ckptsurgeon.formats import Checkpoint, Copy, Replica
from ckptsurgeon.recipe.recipe import Recipe
from ckptsurgeon.run.run import Run


def replicas(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for `sync_replicas`: weights, fp32 masters and both moments of every parameter that
    is whole on each rank and not equal on all, each the mean of its copies in float64."""
    wanted = recipe.sync_replicas
    if wanted is None:
        return [], []
    found = [item for item in checkpoint.replicas() if re.search(wanted.params, item.parameter)]
    if not found:
        raise UsageError(
            f"no replicated parameter matches {wanted.params!r}",
            next="ckptsurgeon sync-replicas    takes them all",
        )
    changes: list[AnyChange] = []
    for replica in drifted(checkpoint, found):
        data = _mean(checkpoint, replica)
        told = f"mean of {len(replica.copies)} ranks"
        for copy in replica.copies:
            if read(checkpoint, copy) != data:
                place = copy.place
                field = f"{replica.kind} of {replica.parameter}"
                new = Elements(data, told)
                file = run.relative(place.file)
                changes.append(Change(file, field, "values", new, place.path, copy.elements))
    return changes, []


def drifted(checkpoint: Checkpoint, found: list[Replica]) -> list[Replica]:
    """Those whose copies are not byte for byte equal."""
    return [r for r in found if len({read(checkpoint, copy) for copy in r.copies}) > 1]


def read(checkpoint: Checkpoint, copy: Copy) -> bytes:
    """The bytes of one copy; its elements must lie side by side."""
    tensor = copy.place.value
    item = ITEM_BYTES[tensor.dtype]
    start, end = copy.elements or (0, tensor.numel)
    archive = checkpoint.archives[copy.place.file]
    at = archive.payload(f"data/{tensor.storage}") + (tensor.offset + start) * item
    return archive.read_at(at, (end - start) * item)


def _mean(checkpoint: Checkpoint, replica: Replica) -> bytes:
    import numpy

    dtypes = {copy.place.value.dtype for copy in replica.copies}
    if len(dtypes) > 1:
        raise SurgeryError(f"{replica.parameter}: its copies are of {' and '.join(sorted(dtypes))}")
    dtype = dtypes.pop()
    if dtype not in FLOATS:
        raise SurgeryError(f"{replica.parameter}: a mean of {dtype} has no meaning")
    values = [floats(read(checkpoint, copy), dtype).astype("f8") for copy in replica.copies]
    if len({len(item) for item in values}) > 1:
        raise SurgeryError(f"{replica.parameter}: its copies differ in size")
    return from_floats(numpy.mean(values, axis=0, dtype="f8"), dtype)
