"""What no page names and yet carries a step's number in its name, beside the files of that step.

`model_000008.pt` and `meta_000008.json` lie beside `optim_000008.pt`: a trainer that finds them
resumes step 8, so they leave when it leaves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.transaction.home import EVENTS

DIGITS = re.compile(r"\d{1,18}")
VERSION = re.compile(r"\.[A-Za-z]+\d+$")
"""The end of a name whose number is part of a file type: `.mp4`, `.h5`, `.sha256`."""
Shape = tuple[Path, str, int]
"""A folder, a name in it with each number as `#`, and which of the numbers is meant."""


@frozen
class Number:
    """One number of a name: which one, its value, and as it is `written`: with its zeros, and
    whether it follows a letter."""

    index: int
    value: int
    written: tuple[str, bool]


@frozen
class Siblings:
    """By number: the names that are of that step (`own`, which may be of one that is not saved),
    and those that are written as one of that step is but may mean something else (`unclear`).
    `beyond` are the numbers above all saved steps, of names that every saved step has."""

    own: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    unclear: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    beyond: Collection[int] = ()


def siblings(
    run: Path, entries: Mapping[int, Collection[Path]], known: Collection[Path]
) -> Siblings:
    """What lies beside the `entries` of the saved steps, in the run's root, or in a folder there,
    apart from `known`. A name is of a step if names of its shape have the numbers of two saved
    steps or more, and none between those of the first and the last step that is no step. Deeper
    folders are not looked at."""
    every = {path for paths in entries.values() for path in paths}
    written = {
        number.written
        for step, paths in entries.items()
        for path in paths
        for number in numbers(path.name)
        if number.value == step
    }
    near = {run, *(path.parent for path in every)}
    above = {parent for path in every for parent in path.parents}
    shapes: dict[Shape, set[int]] = defaultdict(set)
    names: dict[Path, list[tuple[Shape, Number]]] = {}
    for path in _listed(run, near, every | set(known)):
        for number in numbers(path.name):
            shape = (path.parent, DIGITS.sub("#", path.name), number.index)
            shapes[shape].add(number.value)
            names.setdefault(path, []).append((shape, number))
    steps = set(entries)
    of_steps = {shape for shape, found in shapes.items() if _are_steps(found, steps)}
    zeros = {text for text, _ in written}
    own: dict[int, list[Path]] = defaultdict(list)
    unclear: dict[int, list[Path]] = defaultdict(list)
    beyond: set[int] = set()
    for path, found in names.items():
        far = path.parent not in near
        means = {
            number.value
            for shape, number in found
            if shape in of_steps
            and not (far and number.value in steps and number.written[0] not in zeros)
        }
        if len(means) == 1 and path not in above:
            (step,) = means
            own[step].append(path)
            if any(shape in of_steps and steps <= shapes[shape] for shape, _ in found):
                beyond |= {step} if step > max(steps) else set()
            continue
        likely = {n.value for _, n in found if n.written in written and n.value in steps}
        for step in means | (set() if far else likely):
            if path not in above or not _has_others(path, step, entries):
                unclear[step].append(path)
    return Siblings(own, unclear, beyond)


def _are_steps(found: set[int], steps: set[int]) -> bool:
    inner = {number for number in found if min(steps) < number < max(steps)}
    return len(found & steps) > 1 and inner <= steps


def _has_others(folder: Path, step: int, entries: Mapping[int, Collection[Path]]) -> bool:
    """Whether a step other than `step` lies in `folder`."""
    others = (path for other, paths in entries.items() if other != step for path in paths)
    return any(path.is_relative_to(folder) for path in others)


def numbers(name: str) -> Iterator[Number]:
    """Those that stand alone: no letter follows, and no fraction is meant."""
    end = match.start() if (match := VERSION.search(name)) else len(name)
    for index, match in enumerate(DIGITS.finditer(name)):
        before, after = name[: match.start()], name[match.end() :]
        fraction = re.search(r"\d\.$", before) or re.match(r"\.\d", after)
        padded = len(match[0]) > 1 and match[0].startswith("0")
        if match.start() < end and not re.match(r"[^\W\d_]", after) and (padded or not fraction):
            yield Number(index, int(match[0]), (match[0], bool(re.search(r"[^\W\d_]$", before))))


def _listed(run: Path, near: Collection[Path], known: Collection[Path]) -> Iterator[Path]:
    """The names in the folders of `near`, and in the other folders of the root; of these none that
    has a number itself, as it may be a step with all that is in it."""
    for folder in sorted(near):
        yield from _names(folder, known)
    for folder in _names(run, known):
        numbered = any(True for _ in numbers(folder.name))
        if (
            folder not in near
            and not numbered
            and disk.is_folder(folder)
            and not disk.is_link(folder)
        ):
            yield from _names(folder, known)


def _names(folder: Path, known: Collection[Path]) -> list[Path]:
    """Event files are cut where they are, and hidden names are no trainer's."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [
        path
        for path in paths
        if path not in known and path.name[0] != "." and EVENTS not in path.name
    ]
