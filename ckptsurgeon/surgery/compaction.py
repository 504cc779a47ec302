"""Plans that rewrite the shards of one step without bytes that nothing uses: compact, shrink."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import count
from ckptsurgeon.files.archives import shrink
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.fields.constants import TORCH
from ckptsurgeon.formats.fields.known_globals import refuse_unknown
from ckptsurgeon.formats.fields.trees import compacted
from ckptsurgeon.plans.edits import Rewrite
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.render import render, touched
from ckptsurgeon.transaction import receipts

ZIP = b"PK\3\4"
"""How an archive begins."""


def plan_compact(run: Run, step: int | None = None, *, allow_globals: Collection[str] = ()) -> Plan:
    """Rewrite the shards of one step, by default the latest, without the bytes that surgeries left
    behind. Values, tensors and the promise stay; the old files stay in the attic until `prune`."""
    run.refuse_interrupted()
    checkpoint = run.checkpoint(run.latest() if step is None else step)
    smaller = compacted(checkpoint, run.root)
    total = sum(freed for _, _, freed in smaller)
    note = f"what earlier surgeries left goes, {count(total, 'byte', spec=',')}"
    changes = [Rewrite(file, "shard", content, note) for file, content, _ in smaller]
    return _plan_rewrites(
        run, checkpoint, f"compact step {checkpoint.step}", changes, allow_globals
    )


def plan_shrink(run: Run, step: int | None = None, *, allow_globals: Collection[str] = ()) -> Plan:
    """Rewrite the torch files of one step whose storages hold more than their tensors use.

    Values, tensors and the promise stay, and which tensors share their bytes; the old files stay in
    the attic until `prune`."""
    run.refuse_interrupted()
    checkpoint = run.checkpoint(run.latest() if step is None else step)
    smaller, total = [], 0
    for path in run.format.files(run.root, checkpoint.step):
        archive = checkpoint.archives.get(path)
        if archive is None and not _is_archive(path):
            continue
        archive = archive or Archive.open(path)
        content = shrink.shrink(archive, run.relative(path))
        if content is not None:
            smaller.append((run.relative(path), content))
            total += archive.size - content.size
    note = f"what no tensor uses goes, {count(total, 'byte', spec=',')}"
    changes = [Rewrite(file, "shard", content, note) for file, content in smaller]
    return _plan_rewrites(run, checkpoint, f"shrink step {checkpoint.step}", changes, allow_globals)


def _is_archive(path: Path) -> bool:
    """By its name and its first bytes: other files may have such names, as folders may."""
    if not path.name.endswith(TORCH) or not disk.is_file(path):
        return False
    with path.open("rb") as file:
        return file.read(len(ZIP)) == ZIP


def _plan_rewrites(
    run: Run,
    checkpoint: Checkpoint,
    title: str,
    changes: Sequence[Rewrite],
    allow_globals: Collection[str],
) -> Plan:
    promise = checkpoint.state().promise
    refuse_unknown(checkpoint.globals(), allow_globals)
    id = receipts.next_id(run.root)
    edits = render(run, checkpoint, changes, id)
    return Plan(
        id=id,
        run=str(run.root),
        title=title,
        recipe={},
        changes=tuple(changes),
        edits=tuple(edits),
        assumes=tuple(run.fingerprint(file) for file in touched(edits)),
        promise=promise,
        before=promise,
        step=checkpoint.step,
        saved=tuple(run.steps()),
        sizes=run.logs.sizes(),
    )
