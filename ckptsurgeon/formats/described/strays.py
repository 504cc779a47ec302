"""Whole steps that a page does not name, beside those that it does: `best_model_24.pth` by
`checkpoint_20.pth`.

A trainer that goes on from the highest number of all its files would load one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.described.checkpoint import expanded
from ckptsurgeon.formats.described.description import Content, Description, KeyPath
from ckptsurgeon.formats.described.file_pattern import FilePattern
from ckptsurgeon.formats.fields.constants import ODD
from ckptsurgeon.formats.fields.understood import is_count
from ckptsurgeon.formats.places.siblings import numbers
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.transaction.home import HOME


@frozen
class Stray:
    """A file with an optimizer where the page has one, and what of the run is it and nothing else.
    Its `step` is what the file counts, or the highest number in its name; -1 without either. It is
    `numbered` where its name has that number, and `counted` where the file has."""

    entry: Path
    step: int
    numbered: bool
    counted: bool

    def is_after(self, page: Description, step: int, own: Collection[Path]) -> bool:
        """Whether it was saved after `step`, whose files are `own`: counts are compared with the
        counts in those, as names may count something else, and without either the times are."""
        if self.step < 0:
            return _saved(self.entry) > max(map(_saved, own), default=0)
        if not self.counted:
            return self.step > step
        counts = [count for path in own if (count := _count(_tree(path), page)) is not None]
        return self.step > max(counts, default=step)


def strays(run: Path, page: Description, known: Collection[Path]) -> list[Stray]:
    """All but the `known` files, in folders where the files of a step may be."""
    found: dict[Path, Stray] = {}
    for pattern, content in page.files.items():
        if not content.optimizers or content.loader:
            continue
        names = pattern.text.split("/")
        at = next((i for i, name in enumerate(names) if "{step}" in name), len(names) - 1)
        names[at] = f"*{Path(names[at]).suffix if at == len(names) - 1 else ''}"
        for path, _ in FilePattern("/".join(names)).matches(run):
            entry = FilePattern.above(run, path, at + 1)
            if path in known or HOME in path.parts or entry in found or disk.is_link(entry):
                continue
            tree = _tree(path)
            if _is_step(tree, content):
                found[entry] = _stray(entry, _count(tree, page))
    return list(found.values())


def _stray(entry: Path, count: int | None) -> Stray:
    named = [number.value for number in numbers(entry.name)]
    if count is None:
        return Stray(entry, max(named, default=-1), bool(named), False)
    return Stray(entry, count, any(number >= count for number in named), True)


def _saved(path: Path) -> int:
    return path.stat().st_mtime_ns


def _tree(path: Path) -> Any:
    try:
        return Archive.open(path).tree()
    except (SurgeryError, OSError, *ODD):
        return None


def _is_step(tree: Any, content: Content) -> bool:
    """Whether an optimizer is where the page has one, and all that a file of the step must have."""
    if any(not list(expanded(tree, needed)) for needed in content.has):
        return False
    return any(
        isinstance(each, Mapping) and {"state", "param_groups"} <= set(each)
        for keys in content.optimizers
        for each in _values(tree, keys)
    )


def _values(tree: Any, keys: KeyPath) -> Iterator[Any]:
    for path in expanded(tree, keys):
        yield get(tree, path)


def _count(tree: Any, page: Description) -> int | None:
    """The step that a file says it is."""
    paths: Sequence[KeyPath] = [
        *([page.number] if page.number else []),
        *(keys for content in page.files.values() for keys in content.fields.get("iteration", ())),
    ]
    counts = (value for keys in paths for value in _values(tree, keys) if is_count(value))
    return next(counts, None)
