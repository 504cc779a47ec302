"""The files of a trainer that a page describes: steps, copies of them, and what a restart loads."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dcp import METADATA, Saved
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats.dcp.shards import absent
from ckptsurgeon.formats.deepspeed.engine import Engine
from ckptsurgeon.formats.described.checkpoint import DescribedCheckpoint, expanded
from ckptsurgeon.formats.described.copied import Copied
from ckptsurgeon.formats.described.description import Content, Description, FilePattern, KeyPath
from ckptsurgeon.formats.described.reading import opened
from ckptsurgeon.formats.described.sharded import beginnings
from ckptsurgeon.formats.layout import BaseFormat, leads_inside, leads_out, outside
from ckptsurgeon.formats.megatron.dist import COMMON, CONFIG
from ckptsurgeon.formats.protocol import Checkpoint
from ckptsurgeon.formats.sane import is_count
from ckptsurgeon.formats.shard_files import read_shards
from ckptsurgeon.formats.step_folders import files_below
from ckptsurgeon.formats.values import Rival

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
        """True with a file of a pattern that has what `has` names, or a folder that its loader
        knows."""
        return any(
            _is_loaded(path, content.loader)
            if content.loader
            else self._number(path, content) is not None
            for path, content in self._candidates(run)
        )

    def _candidates(self, run: Path) -> Iterator[tuple[Path, Content]]:
        """The newest file of each pattern: one is enough to know a trainer by. Of folders each, as
        the newest may be half saved."""
        for pattern, content in self.description.files.items():
            if content.optional:
                continue
            for path, _ in reversed(pattern.matches(run)):
                yield path, content
                if not content.loader:
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
            _known[key] = _read_number(path, content, self.description.number)
        return _known[key]

    def _within(self, folder: Path) -> int | None:
        """The step in the file of `folder` that has it."""
        within = self.description.within
        matches = within.file.matches(folder) if within else []
        return self._number(matches[0][0], Content()) if matches else None

    def _found(self, run: Path) -> dict[int, list[Shard]]:
        """The shards of each step; copies of a step are not among them."""
        copies = {path for path, _ in self._copies(run)}
        steps: dict[int, list[Shard]] = {}
        if within := self.description.within:
            for folder, _ in within.folder.matches(run):
                if folder in copies or leads_inside(run, folder):
                    continue
                step = self._within(folder)
                if step is not None:
                    steps.setdefault(step, []).extend(self._inside(folder))
            return steps
        for pattern, content in self.description.files.items():
            for path, numbers in pattern.matches(run):
                if path in copies or leads_inside(run, path):
                    continue
                step = numbers.get("step")
                if step is None:
                    step = self._number(path, content)
                if step is not None:
                    steps.setdefault(step, []).append((path, pattern, numbers))
        return steps

    def _inside(self, folder: Path) -> list[Shard]:
        """The shards of a step that is a folder, by whatever name."""
        within = self.description.within
        depth = within.folder.text.count("/") + 1 if within else 0
        out: list[Shard] = []
        for pattern, content in self.description.files.items():
            rest = "/".join(pattern.text.split("/")[depth:])
            inner = FilePattern(rest, pattern.folder).matches(folder) if rest else [(folder, {})]
            out += [
                (path, pattern, numbers)
                for path, numbers in inner
                if not content.loader or _is_loaded(path, content.loader)
            ]
        return out

    def _folder(self, run: Path, path: Path, pattern: FilePattern) -> Path:
        """What is the step of the shard `path` and nothing else."""
        if within := self.description.within:
            return pattern.above(run, path, within.folder.text.count("/") + 1)
        return pattern.entry(run, path)

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
        left = [(path, numbers) for path, numbers in self._copies(run) if not path.is_symlink()]
        left = [(path, numbers) for path, numbers in left if self.pointed(path) == step]
        if self.description.within:
            return [shard for path, _ in left for shard in self._inside(path)]
        return [(path, pattern, numbers) for path, numbers in left]

    def directory(self, run: Path, step: int) -> Path:
        """The folder of the step, or the run where steps are files."""
        entries = self.entries(run, step)
        return entries[0] if entries and entries[0].is_dir() else run

    def entries(self, run: Path, step: int) -> list[Path]:
        """The folder, or the files but for copies that a restart loads; and what marks them as
        unfinished."""
        shards = self._found(run).get(step, [])
        entries = {self._folder(run, path, pattern) for path, pattern, _ in shards}
        return sorted({*entries, *self._markers(entries)})

    def _markers(self, entries: Collection[Path]) -> list[Path]:
        ending = self.description.unfinished
        beside = [path.with_name(path.name + ending) for path in entries if ending]
        return [path for path in beside if path.is_file()]

    def files(self, run: Path, step: int) -> list[Path]:
        """The shards, what lies beside them in a folder, and the copies of the step."""
        shards = {path for path, _, _ in self._shards(run, step)}
        whole = {*shards, *self.entries(run, step), *self._copies_of(run, step)}
        below = {file for path in whole if path.is_dir() for file in files_below(path)}
        return sorted({path for path in whole if not path.is_dir()} | below)

    def _copies_of(self, run: Path, step: int) -> list[Path]:
        """Copies, not links: what a link leads to is edited where it is."""
        return [
            path
            for path, _ in self._copies(run)
            if not path.is_symlink() and self.pointed(path) == step
        ]

    def missing(self, run: Path, step: int) -> list[str]:
        """A pattern without a file, and the ranks below the world size or the highest one; and a
        mark of the trainer's own."""
        names = [f"{path.name} says so" for path in self._markers(self.entries(run, step))]
        for shards in self._whole(run, step).values():
            names += self._lacking(run, step, shards)
        return list(dict.fromkeys(names))

    def _whole(self, run: Path, step: int) -> dict[Path, list[Shard]]:
        """What a load reads together, by where it lies: each folder, and each copy of one; all
        files of the step where steps are no such folders."""
        shards = self._shards(run, step)
        if not self.description.within:
            return {self.directory(run, step): shards}
        out: dict[Path, list[Shard]] = {}
        for shard in shards:
            out.setdefault(self._folder(run, shard[0], shard[1]), []).append(shard)
        return out | {path: self._inside(path) for path in self._copies_of(run, step)}

    def _lacking(self, run: Path, step: int, shards: Sequence[Shard]) -> list[str]:
        names: list[str] = []
        for pattern, content in self.description.files.items():
            mine = [(path, numbers) for path, each, numbers in shards if each == pattern]
            if not mine and not content.optional:
                names.append(pattern.text.replace("{step}", str(step)))
            for path, _ in mine:
                below = path.relative_to(run).as_posix()
                names += [f"{below}/{name}" for name in _unloaded(path, content.loader)]
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
        return [
            *self._texts(run),
            *(path for pattern in self.description.last for path in _newest(pattern, run)),
        ]

    def _texts(self, run: Path) -> list[Path]:
        """The text file; where a page has copies or links too, if it is there."""
        page = self.description
        file = run / page.pointer[0] if page.pointer else None
        return [file] if file is not None and (file.exists() or not page.last) else []

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """The text, and every copy or link with the shard of its rank that it must be a copy of or
        lead to: whichever a restart picks, it is this step."""
        out: dict[Path, str | Path] = {}
        shards = self._shards(run, step)
        folders = any(pattern.folder for pattern in self.description.last)
        for file in self._texts(run):
            out[file] = self._text(step, shards[0][2] if shards else {})
        for path, numbers in self._copies(run):
            if path.is_dir() or (path.is_symlink() and folders):
                out |= self._repeated(run, path, step)
                continue
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

    def _text(self, step: int, numbers: Mapping[str, int]) -> str:
        """What names the step, with the other numbers in its name."""
        text = self.description.pointer[1] if self.description.pointer else ""
        for name, number in {**numbers, "step": step}.items():
            text = text.replace(f"{{{name}}}", str(number))
        return text

    def _repeated(self, run: Path, copy: Path, step: int) -> dict[Path, str | Path]:
        """A link to a folder with the folder of the step, or each file of a folder that must be a
        copy of it."""
        file, pattern, _ = self._shards(run, step)[0]
        folder = self._folder(run, file, pattern)
        if copy.is_symlink():
            return {copy: folder}
        if self.pointed(copy) == step:
            return {}
        return {copy / file.relative_to(folder): file for file in files_below(folder)}

    def pointed(self, pointer: Path) -> int | None:
        """The step in the text, or in the copy."""
        page = self.description
        if page.pointer and pointer.name == page.pointer[0]:
            named = FilePattern(page.pointer[1].strip()).numbers((text(pointer) or "").strip())
            return named["step"] if named else None
        if page.within:
            return self._within(pointer)
        if page.number:
            return self._number(pointer, next(iter(page.files.values())))
        return self._named(pointer)

    def _named(self, pointer: Path) -> int | None:
        """The step that a link leads to by its name, or that a copy equals: in size and in its
        end, where the checksum of every record is."""
        run = pointer.parent
        shards = [(step, *each) for step, of in self._found(run).items() for each in of]
        found = {self._folder(run, path, pattern): step for step, path, pattern, _ in shards}
        found |= {path: step for step, path, _, _ in shards}
        if pointer.is_symlink():
            real = pointer.resolve()
            return next((step for path, step in found.items() if path.resolve() == real), None)
        end = _end(pointer)
        same = [path for path in found if end is not None and _end(path) == end]
        return found[same[-1]] if same else None

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """A step outside the run, if a link leads there; and a mark that keeps a copy of the step
        from being loaded."""
        copies = [path for path, _ in self._copies(run)]
        marks = self._markers(copies)
        out = [Rival(step, f"{path.name} marks a copy as unfinished", (path,)) for path in marks]
        for path in copies:
            if leads_out(run, path):
                target = self.pointers(run, step).get(path, self.entries(run, step)[0])
                out.append(outside(step, path, Path(target)))
        return out

    def log_folders(self, run: Path) -> Sequence[str]:
        """By the name of the run's folder, as the page says; else the run itself."""
        named = self.description.logs.get(run.name)
        return (".",) if named is None else (named,)

    def idle_paths(self, run: Path, step: int) -> list[str]:
        """Of each file pattern, by dots."""
        shards, contents = self._shards(run, step), self.description.files
        read = (path for path, each, _ in shards if not each.folder and contents[each].paths())
        trees, _ = read_shards(read)
        idle = []
        for pattern, content in self.description.files.items():
            mine = [path for path, each, _ in shards if each == pattern]
            for path in content.paths():
                if not any(_leads(file, trees, content, path) for file in mine):
                    idle.append(f"{pattern.text}: {'.'.join(map(str, path)) or 'all of it'}")
        return idle

    # --- advice ----------------------------------------------------------------------------------

    def advise(self, key: str, value: object) -> str:
        """The sentence of the page; without one, where to write it."""
        template = self.description.options.get(key)
        if template is None:
            return f"set it where the trainer is started; options.{key} of the page is empty"
        return template.replace("{value}", str(value))

    def advise_setting(self, key: str) -> str:
        """The trainer's own place."""
        return f"set {key} where the trainer is started: {self.name}.yaml names no optimizer"

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> str:
        """The sentence of the page, if it has one."""
        words = " ".join(f"{first}-{last}" for first, last in ranges)
        if "skip" in self.description.options:
            return self.advise("skip", words)
        return super().advise_skip(ranges)

    # --- contents --------------------------------------------------------------------------------

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> Checkpoint:
        """Read the tree of every shard, and of every copy of the step."""
        contents = self.description.files
        whole = self._whole(run, step)
        if self.description.within:
            each = [
                opened(self.description, folder, step, _contents(shards, contents), 1, without)
                for folder, shards in whole.items()
            ]
            return each[0] if len(each) == 1 else Copied(tuple(each))
        (shards,) = whole.values()
        ranks = {numbers["rank"] for _, _, numbers in shards if "rank" in numbers}
        inside = _contents(shards, contents)
        first = next(iter(contents.values()))
        copies = self._copies_of(run, step)
        path = self.directory(run, step)
        path = next(iter(inside), run) if path == run else path
        step_files = inside | dict.fromkeys(copies, first)
        checkpoint = opened(self.description, path, step, step_files, len(ranks), without)
        if isinstance(checkpoint, DescribedCheckpoint):
            checkpoint.repeated = self._repeating(run, copies, shards)
        return checkpoint

    def _repeating(
        self, run: Path, copies: Collection[Path], shards: Sequence[Shard]
    ) -> dict[Path, Path]:
        """Each copy with the shard of its rank, but for what is left of a step that has no more."""
        numbers = {path: each.get("rank") for path, each in self._copies(run)}
        first = next(iter(self.description.files))
        ranks = {each.get("rank"): path for path, pattern, each in shards if pattern == first}
        there = {path: ranks.get(numbers[path], path) for path in copies}
        return {path: shard for path, shard in there.items() if path != shard}


def _contents(
    shards: Sequence[Shard], contents: Mapping[FilePattern, Content]
) -> dict[Path, Content]:
    return {path: contents[pattern] for path, pattern, _ in shards}


def _is_loaded(folder: Path, loader: str) -> bool:
    """Whether the loader would take the folder for one of its own."""
    if loader in ("dcp", "megatron"):
        return (folder / METADATA).is_file()
    return any(folder.glob("*_model_states.pt"))


def _unloaded(folder: Path, loader: str) -> list[str]:
    """What the loader would miss in the folder."""
    if loader in ("dcp", "megatron"):
        configs = [] if loader == "dcp" or (folder / CONFIG).is_file() else [CONFIG]
        return [*configs, *absent(folder)]
    return Engine(folder).missing(folder, 0) if loader else []


def _leads(file: Path, trees: Mapping[Path, Any], content: Content, path: KeyPath) -> bool:
    if content.loader == "dcp":
        return bool(beginnings(Saved.open(file), path, rest=r"(\..+)?"))
    if content.loader:
        models = sorted(file.glob(COMMON if content.loader == "megatron" else "*_model_states.pt"))
        return any(list(expanded(Archive.open(model).tree(), path)) for model in models)
    return bool(list(expanded(trees[file], path)))


def _read_number(path: Path, content: Content, number: KeyPath) -> int | None:
    try:
        tree = Archive.open(path).tree()
        if any(not list(expanded(tree, needed)) for needed in content.has):
            return None
        step = get(tree, number) if number else 0
    except (SurgeryError, OSError, ArithmeticError, LookupError, TypeError, ValueError,
            AttributeError):  # fmt: skip
        return None
    return step if is_count(step) else None


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


def _end(path: Path) -> tuple[int, bytes] | None:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - ENDING))
            return size, file.read()
    except OSError:
        return None
