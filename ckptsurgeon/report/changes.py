"""The changes of a plan, a receipt or a diff as rows of a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from ckptsurgeon.errors import count
from ckptsurgeon.plans.edits import (
    ABSENT,
    AnyChange,
    Aside,
    Change,
    Computed,
    NewName,
    NewText,
    Relink,
    Rewrite,
)
from ckptsurgeon.report.style import MANY, Row, arrow, clean, names, value
from ckptsurgeon.transaction.home import stored_run

LONG = 300
"""Characters of a text, as of Ray's list, of which a row tells no more than how many there are."""


def changes(
    items: Sequence[AnyChange], *, back: bool = False, sides: tuple[str, str] | None = None
) -> list[Row]:
    """Rows of changes; equal changes of one field are one row, which counts its places, and so are
    equal changes of many parameters.

    With `back`, the rows of taking them back; with `sides`, those of what differs between the two,
    where a file that one of them lacks was moved by nobody."""
    rows = []
    labels = _labels(items)
    for label in dict.fromkeys(labels):
        mine = [item for item, own in zip(items, labels, strict=True) if own == label]
        rows += _changed(label, [item for item in mine if isinstance(item, Change)], back)
        rows += _relinked(label, [item for item in mine if isinstance(item, Relink)], back)
        files = [item for item in mine if not isinstance(item, (Change, Relink))]
        if sides is not None:
            rows += _alone(label, files, sides)
            files = [item for item in files if isinstance(item, Rewrite) and not item.new_file]
            rows += _rewritten(label, files, back) if files else []
        elif label == "checkpoint":
            rows += _asides([item.file for item in files], back)
        elif files:
            rows += _rewritten(label, files, back)
    return rows


def _labels(items: Sequence[AnyChange]) -> list[str]:
    """The field of each change, without its parameter where there are many of its kind."""
    kinds = {item.field: item.field.partition(" of ")[0] for item in items}
    many = {kind for kind, number in Counter(kinds.values()).items() if number > MANY}
    return [kinds[item.field] if kinds[item.field] in many else item.field for item in items]


def _changed(label: str, items: Sequence[Change], back: bool) -> list[Row]:
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for item in items:
        # A key of torch.distributed.checkpoint has the whole way in it, and the parameter's name.
        name = PurePosixPath(item.file).name
        if item.path:
            name = str(next(item.paths())[-1]).rpartition(".")[2]
            if item.new == ABSENT and name.isdecimal():  # the number of a parameter
                name = ""
        wanted = repr(item.new)
        if isinstance(item.new, Computed):  # of each tensor from others, told in the same words
            name, wanted = "", item.new.label
        if isinstance(item, NewName):  # each file has a name of its own
            groups.setdefault(("", "", ""), []).append(item)
            continue
        groups.setdefault((name, repr(item.old), wanted), []).append(item)
    several = len({name for name, _, _ in groups}) > 1
    rows = []
    for (name, _, _), group in groups.items():
        ends = (group[0].old, group[0].new)
        old, new = reversed(ends) if back else ends
        sign, text = "~", arrow(label, old, new)
        if old in (None, ABSENT, [], (), "") and new not in (None, ABSENT):
            sign, text = "+", value(label, new)
        elif isinstance(group[0], NewText) and max(sizes := [len(str(old)), len(str(new))]) > LONG:
            text = f"{sizes[0]} → {count(sizes[1], 'character')}"
        files = len({item.file for item in group})
        if isinstance(group[0], NewName):
            note = "" if files == 1 else f"and {count(files - 1, 'other file')}"
        elif group[0].path:
            places = sum(item.places for item in group)
            note = f"{count(places, 'place')} in {count(files, 'shard')}"
            chunks = sum(item.places * item.chunks for item in group)
            note += f", {count(chunks, 'chunk')}" if chunks > places else ""
            note += f" ({clean(name)})" if several else ""
        elif files > 1:
            note = f"{count(files, 'file')} called {clean(name)}"
        else:
            note = "" if group[0].file == label else clean(group[0].file)
        rows.append(Row(label, text, note, sign))
    return rows


def _relinked(label: str, items: Sequence[Relink], back: bool) -> list[Row]:
    """A row for each link; of many, the first with their number."""
    rows = []
    for item in items[: 1 if len(items) > MANY else MANY]:
        old, new = (item.new, item.old) if back else (item.old, item.new)
        note = f"the link {clean(item.file)}"
        if len(items) > MANY:
            note = f"{count(len(items), 'link')}, the first {clean(item.file)}"
        text = arrow(label, old or "a file", new or "a file")
        rows.append(Row(label, text, note, "~"))
    return rows


def _asides(files: Sequence[str], back: bool) -> list[Row]:
    where = "from the attic" if back else "to the attic"
    return [Row("checkpoints", _steps(files), where, "<" if back else ">")] if files else []


def _steps(files: Sequence[str]) -> str:
    """Each number once, of a step that has several folders too."""
    shown = (re.sub(r"^\D*0*(?=\d+$)", "", PurePosixPath(file).name) for file in files)
    return names([*dict.fromkeys(shown)])


def _alone(label: str, items: Sequence[AnyChange], sides: tuple[str, str]) -> list[Row]:
    """The files that one of the sides has."""
    rows = []
    mine = [item.file for item in items if isinstance(item, Aside)]
    its = [item.file for item in items if isinstance(item, Rewrite) and item.new_file]
    for sign, side, files in (("-", sides[0], mine), ("+", sides[1], its)):
        if files and label == "checkpoint":
            rows.append(Row("checkpoints", _steps(files), f"only in {side}", sign))
        elif files:
            name = "events" if label == "tensorboard" else label
            rows.append(Row(name, names(files), f"only in {side}", sign))
    return rows


def _rewritten(label: str, items: Sequence[AnyChange], back: bool) -> list[Row]:
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:
        sign, where, note = _about(item, back)
        groups.setdefault((sign, where), []).append(note)
    parts = []
    for (sign, where), notes in groups.items():
        files = f"{count(len(notes), 'file')}{where}"
        if len(set(notes)) == 1:
            parts.append((sign, files + notes[0]))
        elif where:
            parts.append((sign, files + _summed(notes)))
        elif len(notes) <= MANY:
            parts += [(sign, f"1 file{note}") for note in notes]
        else:
            parts.append((sign, f"{files}, the first{notes[0]}"))
    label = "events" if label == "tensorboard" else label
    line = ", ".join([parts[0][1], *(f"{sign} {text}" for sign, text in parts[1:])])
    if len(line) <= 64:
        return [Row(label, line, sign=parts[0][0])]
    return [Row(label, text, sign=sign) for sign, text in parts]


def _summed(notes: Sequence[str]) -> str:
    """The notes of several files that say the same of different numbers of events, as one."""
    said = [re.fullmatch(r"(.*?)(\d+) events?", note) for note in notes]
    words = {match[1] for match in said if match}
    if len(words) == 1 and all(said):
        return f"{words.pop()}{count(sum(int(match[2]) for match in said if match), 'event')}"
    return f", the first{notes[0]}"


def _about(item: AnyChange, back: bool) -> tuple[str, str, str]:
    """Sign of an event file's change, the folder that it is made in, and what is said about it."""
    if isinstance(item, Rewrite) and item.new_file:
        if back:
            return ">", "", " to the attic"
        folder = stored_run(item.file) or str(PurePosixPath(item.file).parent)
        return "+", f" in {clean(folder)}/", f": {clean(item.note)}"
    if isinstance(item, Rewrite):
        return "~", "", " as before" if back else f": {clean(item.note)}"
    return ("<", "", " from the attic") if back else (">", "", " to the attic")
