"""A surgery as one value: the plan before it is applied, the receipt after that.

Paths are as in `edits`. Each value survives JSON and `from_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ckptsurgeon.plans.edits import AnyChange, Edit, Inverse
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.plans.promise import Promise


@held
class Fingerprint:
    """A file (or directory) as it was when the plan was made; compared right before the commit."""

    file: str
    dev: int
    ino: int
    size: int
    mtime_ns: int


@held
class Plan:
    """The changes, the edits they render to, the fingerprints they assume, and the promise.

    `id` is the receipt that it will become; `edits` are in the order in which the disk gets them,
    such that a reader of the pointers sees the state before or the state after. `step` is the saved
    step whose files are edited, None where none are. If the trainer then goes on from another
    state, `steps` are those that are there once the surgery is done, and `logs` the event files
    from before it: an undo knows by them what the trainer wrote since. `saved` are the steps that
    were there when it was made, and `sizes` those of the event files: a trainer adds to them."""

    id: str
    run: str
    title: str
    recipe: Mapping[str, Any]
    changes: tuple[AnyChange, ...]
    edits: tuple[Edit, ...]
    assumes: tuple[Fingerprint, ...]
    promise: Promise | None
    before: Promise | None = None
    warnings: tuple[str, ...] = ()
    undoes: str | None = None
    step: int | None = None
    steps: tuple[int, ...] = ()
    logs: tuple[str, ...] = ()
    restored: str = ""
    """Of an undo or a redo: whether what it brings back is what was taken away, see `kept`."""
    saved: tuple[int, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.edits


@held
class Receipt:
    """An applied plan, kept. `inverse` are the edits that bring back the state before, in order.

    `read` are the files of another run that numbers were read from, as they were; the changes do
    not say which bytes of them, as 10,000 shards would take 20 MB for that. `launch` is that of the
    ranks which computed it, if some did."""

    id: str
    title: str
    why: str
    when: str
    user: str
    host: str
    version: str
    recipe: Mapping[str, Any]
    changes: tuple[AnyChange, ...]
    inverse: tuple[Inverse, ...]
    promise: Promise | None
    before: Promise | None = None
    undoes: str | None = None
    step: int | None = None
    steps: tuple[int, ...] = ()
    logs: tuple[str, ...] = ()
    restored: str = ""
    read: tuple[Fingerprint, ...] = ()
    launch: str = ""
