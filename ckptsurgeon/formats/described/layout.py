"""The files of a trainer that a page describes: steps, copies of them, and what a restart loads."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats.checkpoint import read_shards
from ckptsurgeon.formats.described.checkpoint import DescribedCheckpoint, expanded
from ckptsurgeon.formats.described.description import Content, Description, FilePattern
from ckptsurgeon.formats.layout import BaseFormat
from ckptsurgeon.formats.plain.checkpoint import Located
from ckptsurgeon.formats.sane import is_count
from ckptsurgeon.formats.step_folders import files_below, refuse_link

ENDING = 1 << 20
"""Bytes at the end of a torch file that hold its directory."""
Shard = tuple[Path, FilePattern, Mapping[str, int]]
_known: dict[tuple[object, ...], int | None] = {}
"""The step in a file, by the file as it was: names do not tell it."""


class Described(BaseFormat):
    """The format of one page."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.name = description.name
        self.fresh_optimizer = ""

    # --- steps -----------------------------------------------------------------------------------

    def recognizes(self, run: Path) -> bool:
        """True with a file of a pattern that has what `has` names."""
        return any(
            self._number(path, content) is not None
            for path, content in self._candidates(run)
            if not content.optional
        )

    def _candidates(self, run: Path) -> Iterator[tuple[Path, Content]]:
        """The newest file of each pattern: one is enough to know a trainer by."""
        for pattern, content in self.description.files.items():
            for path, _ in reversed(pattern.matches(run)):
                yield path, content
                break

    def _number(self, path: Path, content: Content) -> int | None:
        """The step in a file, or 0 where its name has it; None for another trainer's file, and for
        one that can't be read."""
        try:
            status = path.stat()
        except OSError:
            return None
        key = (self.name, str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in _known:
            _known[key] = self._read_number(path, content)
        return _known[key]

    def _read_number(self, path: Path, content: Content) -> int | None:
        try:
            tree = Archive.open(path).tree()
            if any(not list(expanded(tree, needed)) for needed in content.has):
                return None
            number = get(tree, self.description.number) if self.description.number else 0
        except (SurgeryError, OSError, ArithmeticError, LookupError, TypeError, ValueError,
                AttributeError):  # fmt: skip
            return None
        return number if is_count(number) else None

    def _found(self, run: Path) -> dict[int, list[Shard]]:
        """The shards of each step; copies of a step are not among them."""
        copies = {path for path, _ in self._copies(run)}
        steps: dict[int, list[Shard]] = {}
        for pattern, content in self.description.files.items():
            for path, numbers in pattern.matches(run):
                if path in copies or path.is_symlink():
                    continue
                step = numbers.get("step")
                if step is None:
                    step = self._number(path, content)
                if step is not None:
                    steps.setdefault(step, []).append((path, pattern, numbers))
        return steps

    def _copies(self, run: Path) -> list[tuple[Path, Mapping[str, int]]]:
        found = [each for pattern in self.description.last for each in pattern.matches(run)]
        return list({path: (path, numbers) for path, numbers in found}.values())

    def steps(self, run: Path) -> list[int]:
        """The numbers in names or in files. A copy counts where nothing else of a step is left."""
        copied = {self.pointed(path) for path, _ in self._copies(run)} - {None}
        return sorted({*self._found(run), *(step for step in copied if step is not None)})

    def _shards(self, run: Path, step: int) -> list[Shard]:
        """The files of `step` by their own name: those of a copy if there are none."""
        shards = self._found(run).get(step, [])
        if shards:
            return shards
        pattern = next(iter(self.description.files))
        return [
            (path, pattern, numbers)
            for path, numbers in self._copies(run)
            if self.pointed(path) == step and not path.is_symlink()
        ]

    def directory(self, run: Path, step: int) -> Path:
        """The folder of the step, or the run where steps are files."""
        entries = self.entries(run, step)
        return entries[0] if entries and entries[0].is_dir() else run

    def entries(self, run: Path, step: int) -> list[Path]:
        """The folder, or the files but for copies that a restart loads."""
        return sorted({each.entry(run, p) for p, each, _ in self._found(run).get(step, [])})

    def files(self, run: Path, step: int) -> list[Path]:
        """The shards, what lies beside them in a folder, and the copies of the step."""
        shards = {path for path, _, _ in self._shards(run, step)}
        beside = {p for e in self.entries(run, step) if e.is_dir() for p in files_below(e)}
        return sorted(shards | beside | set(self._copies_of(run, step)))

    def _copies_of(self, run: Path, step: int) -> list[Path]:
        """Copies, not links: what a link leads to is edited where it is."""
        return [
            path
            for path, _ in self._copies(run)
            if not path.is_symlink() and self.pointed(path) == step
        ]

    def missing(self, run: Path, step: int) -> list[str]:
        """A pattern without a file, and the ranks below the world size or the highest one."""
        shards = self._shards(run, step)
        for entry in self.entries(run, step):
            refuse_link(entry)
        names: list[str] = []
        for pattern, content in self.description.files.items():
            mine = [(path, numbers) for path, each, numbers in shards if each == pattern]
            if not mine and not content.optional:
                names.append(pattern.text.replace("{step}", str(step)))
            ranks = {numbers["rank"] for _, numbers in mine if "rank" in numbers}
            if not ranks:
                continue
            world = max(mine[0][1].get("world", 0), max(ranks) + 1)
            names += [
                pattern.text.replace("{step}", str(step)).replace("{rank}", str(rank))
                for rank in range(world)
                if rank not in ranks
            ]
        return names

    # --- what a restart loads --------------------------------------------------------------------

    def pointer_files(self, run: Path) -> list[Path]:
        """The text file that names a step, and of each kind of copy the newest."""
        named = [run / self.description.pointer[0]] if self.description.pointer else []
        return [
            *named,
            *(path for pattern in self.description.last for path in _newest(pattern, run)),
        ]

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """The text, and every copy with the shard of its rank that it must be a copy of: whichever
        a restart picks, it is this step."""
        out: dict[Path, str | Path] = {}
        if self.description.pointer:
            file, template = self.description.pointer
            out[run / file] = template.replace("{step}", str(step))
        shards = self._shards(run, step)
        for path, numbers in self._copies(run):
            alike = [p for p, _, n in shards if n.get("rank") == numbers.get("rank")]
            if not alike:
                raise SurgeryError(
                    f"{path.name} has no counterpart in step {step}: it was saved by another "
                    "number of ranks",
                    next="ckptsurgeon status    the steps that are saved",
                )
            if path not in alike:
                out[path] = alike[0]
        return out

    def pointed(self, pointer: Path) -> int | None:
        """The step in the text, or in the copy."""
        page = self.description
        if page.pointer and pointer.name == page.pointer[0]:
            head, _, tail = page.pointer[1].partition("{step}")
            named = (text(pointer) or "").strip()
            digits = named.removeprefix(head.lstrip()).removesuffix(tail.rstrip())
            return int(digits) if digits.isascii() and digits.isdecimal() else None
        if page.number:
            return self._number(pointer, next(iter(page.files.values())))
        return self._named(pointer)

    def _named(self, pointer: Path) -> int | None:
        """The step that a link leads to by its name, or that a copy equals: in size and in its
        end, where the checksum of every record is."""
        run = pointer.parent
        found = {path: step for step, each in self._found(run).items() for path, _, _ in each}
        if pointer.is_symlink():
            return found.get(pointer.resolve())
        end = _end(pointer)
        same = [path for path in found if end is not None and _end(path) == end]
        return found[same[-1]] if same else None

    def log_folders(self, run: Path) -> Sequence[str]:
        """By the name of the run's folder, as the page says; else the run itself."""
        named = self.description.logs.get(run.name)
        return (".",) if named is None else (named,)

    def idle_paths(self, run: Path, step: int) -> list[str]:
        """Of each file pattern, by dots."""
        contents = self.description.files
        trees, _ = read_shards(path for path, _, _ in self._shards(run, step))
        idle = []
        for pattern, content in contents.items():
            mine = [trees[path] for path, each, _ in self._shards(run, step) if each == pattern]
            for path in content.paths():
                if not any(list(expanded(tree, path)) for tree in mine):
                    idle.append(f"{pattern.text}: {'.'.join(map(str, path)) or 'all of it'}")
        return idle

    # --- advice ----------------------------------------------------------------------------------

    def advise(self, key: str, value: object) -> str:
        """The sentence of the page; without one, where to write it."""
        template = self.description.options.get(key)
        if template is None:
            return f"set it where the trainer is started; options.{key} of the page is empty"
        return template.replace("{value}", str(value))

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> str:
        """The sentence of the page, if it has one."""
        words = " ".join(f"{first}-{last}" for first, last in ranges)
        if "skip" in self.description.options:
            return self.advise("skip", words)
        return super().advise_skip(ranges)

    # --- contents --------------------------------------------------------------------------------

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> DescribedCheckpoint:
        """Read the tree of every shard, and of every copy of the step."""
        contents = self.description.files
        shards = {path: contents[pattern] for path, pattern, _ in self._shards(run, step)}
        first = next(iter(contents.values()))
        inside = shards | dict.fromkeys(self._copies_of(run, step), first)
        inside = {path: content for path, content in inside.items() if path not in without}
        trees, archives = read_shards(inside)
        located = {
            key: tuple(_located(trees, inside, key))
            for key in ("optimizers", "schedulers", "scalers", "weights")
        }
        if not any(located.values()):
            raise _leads_nowhere(inside)
        fields = {name for content in inside.values() for name in content.fields}
        ranks = {n["rank"] for _, _, n in self._shards(run, step) if "rank" in n}
        path = self.directory(run, step)
        return DescribedCheckpoint(
            path=next(iter(shards), run) if path == run else path,
            step=step,
            trees=trees,
            archives=archives,
            optimizers=located["optimizers"],
            schedulers=located["schedulers"],
            scales=tuple((file, (*at, "scale")) for file, at in located["scalers"]),
            family=self.name,
            ranks=(max(1, len(ranks)), 1),
            description=self.description,
            weights_at=located["weights"],
            counters={name: tuple(_counters(trees, inside, name)) for name in fields},
        )


def _newest(pattern: FilePattern, run: Path) -> list[Path]:
    """Of the files of one pattern the newest by its time, for each rank: what a restart picks. A
    link has the time of what it leads to."""
    newest: dict[int | None, Path] = {}
    for path, numbers in pattern.matches(run):
        rank = numbers.get("rank")
        best = newest.get(rank)
        if path.exists() and (best is None or path.stat().st_mtime_ns >= best.stat().st_mtime_ns):
            newest[rank] = path
    return list(newest.values())


def _leads_nowhere(inside: Mapping[Path, Content]) -> SurgeryError:
    file, content = next(iter(inside.items()))
    named = [".".join(map(str, path)) for path in content.paths()]
    return SurgeryError(
        f"{file.name} holds nothing that the description names: {', '.join(named)}",
        next="--format FORMAT    with the key paths of this file",
    )


def _end(path: Path) -> tuple[int, bytes] | None:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - ENDING))
            return size, file.read()
    except OSError:
        return None


def _located(
    trees: Mapping[Path, Any], inside: Mapping[Path, Content], key: str
) -> Iterator[Located]:
    for file, content in inside.items():
        for path in getattr(content, key):
            yield from ((file, full) for full in expanded(trees[file], path))


def _counters(
    trees: Mapping[Path, Any], inside: Mapping[Path, Content], name: str
) -> Iterator[Located]:
    for file, content in inside.items():
        for path in content.fields.get(name, ()):
            yield from ((file, full) for full in expanded(trees[file], path))
