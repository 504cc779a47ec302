"""Copies of one parameter that drifted apart across tensor-parallel ranks become their average."""

from __future__ import annotations

from typing import Annotated, ClassVar

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.dtypes import FLOATS, ITEM_BYTES, floats, from_floats
from ckptsurgeon.files.expressions import matching
from ckptsurgeon.formats import Checkpoint, Copy, Replica
from ckptsurgeon.formats.capabilities import HasReplicas
from ckptsurgeon.hints import command
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import AnyChange, Change, Elements
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run


@held
class Replicas(Section):
    """Weights, fp32 masters and both moments of every parameter that is whole on each rank and not
    equal on all: each the mean of its copies in float64."""

    key: ClassVar[str] = "sync_replicas"
    computes: ClassVar[bool] = True

    params: Annotated[
        str,
        Key(
            "average the copies that tensor-parallel ranks keep of layer norms and the like, where "
            "they drifted apart",
            "--params REGEX",
            "Only parameters whose names match REGEX.",
            pattern=True,
        ),
    ] = ""

    def title(self, run: Run, step: int) -> list[str]:
        return ["sync replicas"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        replicas = HasReplicas.of(checkpoint).replicas()
        if replicas:
            names = (r.parameter for r in replicas)
            chosen = matching(self.params, names, kind="replicated parameter")
            replicas = [r for r in replicas if r.parameter in chosen]
        changes: list[AnyChange] = []
        for replica in drifted(checkpoint, replicas):
            data = _mean(checkpoint, replica)
            new = Elements(data, f"mean of {count(len(replica.copies), 'rank')}")
            field = f"{replica.kind} of {replica.parameter}"
            for copy in replica.copies:
                if read(checkpoint, copy) != data:
                    file, path = run.relative(copy.place.file), copy.place.path
                    changes.append(Change(file, field, "values", new, path, copy.elements))
        return changes, []


def drifted(checkpoint: Checkpoint, replicas: list[Replica]) -> list[Replica]:
    """Those whose copies are not byte for byte equal."""
    return [r for r in replicas if len({read(checkpoint, copy) for copy in r.copies}) > 1]


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
        raise SurgeryError(
            f"{replica.parameter}: its copies differ in type: {' and '.join(sorted(dtypes))}",
            next=command("verify", "--level", "3", why="list what contradicts itself"),
        )
    dtype = dtypes.pop()
    if dtype not in FLOATS:
        raise SurgeryError(
            f"{replica.parameter}: values of {dtype} have no mean",
            next=command("verify", "--level", "3", why="list what contradicts itself"),
        )
    values = [floats(read(checkpoint, copy), dtype).astype("f8") for copy in replica.copies]
    if len({len(item) for item in values}) > 1:
        raise SurgeryError(
            f"{replica.parameter}: its copies differ in size",
            next=command("verify", "--level", "3", why="list what contradicts itself"),
        )
    return from_floats(numpy.mean(values, axis=0, dtype="f8"), dtype)


# --- commands ------------------------------------------------------------------------------------


def sync_replicas(section: Replicas) -> Recipe:
    """Average parameters of which every tensor-parallel rank keeps a copy.

    Layer norms and the like, which are whole on every rank: weights, fp32 masters and moments,
    where the copies drifted apart.

    Examples:
    ckptsurgeon sync-replicas --params layernorm
    """
    return Recipe(section)


COMMANDS = {"sync-replicas": sync_replicas}
