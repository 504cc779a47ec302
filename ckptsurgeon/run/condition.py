"""Whether a saved step is complete, asked of its names and of as few of its bytes as will tell."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckptsurgeon.errors import NotUnderstood, SurgeryError
from ckptsurgeon.files.one_look import one_look, shared
from ckptsurgeon.formats import Format
from ckptsurgeon.remote import reads
from ckptsurgeon.workers import side_by_side

Listing = frozenset[tuple[str, int]]
"""Name, from the step's folder, and size of each of its files."""


class Conditions:
    """The conditions of one run's steps."""

    def __init__(self, root: Path, format: Format) -> None:
        self._root, self._format = root, format
        self._whole: set[Listing] = set()
        """Of the steps that were complete, in a bucket."""

    def of(self, step: int) -> str:
        """`complete`, `incomplete`, or why that is not known: what says how many shards there are
        is `not understood`, or `damaged` and can't be read.

        In a bucket a listing gives all sizes, and each file that is opened costs two requests. So a
        step is not opened there where its files have the names and sizes of a complete one's: of
        other world sizes, its shards would have other sizes."""
        try:
            listing = None if reads.key(self._root) is None else self._listing(step)
            if listing in self._whole:
                return "complete"
            if self._format.missing(self._root, step):
                return "incomplete"
        except NotUnderstood:
            return "not understood"
        except SurgeryError:
            return "damaged"
        if listing is not None:
            self._whole.add(listing)
        return "complete"

    def of_each(self, steps: Iterable[int]) -> dict[int, str]:
        """The same of several steps, asked at once where a server is waited for."""
        steps = list(steps)
        with one_look(), reads.files_at_once(self._root):
            self._format.steps(self._root)  # the names, which the threads need not ask for
            return dict(zip(steps, side_by_side(shared(self.of), steps), strict=True))

    def why(self, step: int) -> str:
        """Why a step is not complete."""
        try:
            missing = self._format.missing(self._root, step)
        except NotUnderstood as error:
            return f"not understood ({error.what})"
        except SurgeryError as error:
            return f"damaged ({error.what})"
        return f"incomplete (no {', '.join(missing[:3])})"

    def _listing(self, step: int) -> Listing:
        folder = self._format.directory(self._root, step)
        files = self._format.files(self._root, step)
        return frozenset((os.path.relpath(path, folder), path.stat().st_size) for path in files)
