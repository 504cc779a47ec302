"""The files that make up each step of a trainer that a page describes, and the copies of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import DamagedFile, SurgeryError
from ckptsurgeon.files import json_text, plain_yaml
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.sniff import begins_as_text
from ckptsurgeon.files.dcp import METADATA
from ckptsurgeon.files.one_look import once
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.dcp.shards import absent
from ckptsurgeon.formats.deepspeed.engine import Engine
from ckptsurgeon.formats.described.checkpoint import expanded
from ckptsurgeon.formats.described.description import Content, Description, KeyPath
from ckptsurgeon.formats.described.file_pattern import FilePattern
from ckptsurgeon.formats.described.sharded import SHARDS, begun
from ckptsurgeon.formats.fields.understood import is_count
from ckptsurgeon.formats.layout import CleansUp, Format, NamesMore, SavesOver, leads_inside
from ckptsurgeon.formats.megatron.dist import CONFIG, common_file, common_state
from ckptsurgeon.formats.places.json_beside import is_json
from ckptsurgeon.formats.places.siblings import Siblings, siblings
from ckptsurgeon.formats.step_folders import files_below
from ckptsurgeon.transaction.home import is_log

Shard = tuple[Path, FilePattern, Mapping[str, int]]
_known: dict[tuple[object, ...], int | None] = {}
"""The step in a file, by the file as it was: names do not tell it."""


class DescribedSteps(Format, NamesMore, SavesOver, CleansUp):
    """The steps of one page; what a restart loads of them is its layout's."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.name = description.name
        self.fresh_optimizer = ""

    @property
    def numbers_inside(self) -> bool:
        """As those on Lightning, whose loops have counters of their own: no name says the step."""
        page = self.description
        return bool(page.number) and any("{step}" not in each.text for each in page.files)

    @property
    def of_forks(self) -> Sequence[str]:
        """What the page says, and that it names no weights where nobody has resumed by it. A loader
        knows its own."""
        page = self.description
        named = any(content.weights or content.loader for content in page.files.values())
        said = [page.in_a_fork] if page.in_a_fork else []
        if named or page.witness or said:
            return said
        return [
            *said,
            f"the description of {self.name} names no weights: if those of the step lie in other "
            "files, as in folders of their own, the fork lacks them",
        ]

    def recognizes(self, run: Path) -> bool:
        """True with a file of a pattern that has what `has` names, or a folder that its loader
        knows: many trainers may save such a folder, so of a page with `has` one does not do."""
        marked = any(content.has for content in self.description.files.values())
        return any(
            _is_loaded(path, content.loader)
            if content.loader
            else self._number(path, content) is not None
            for path, content in self._candidates(run)
            if content.has or not marked
        )

    def _candidates(self, run: Path) -> Iterator[tuple[Path, Content]]:
        """Of each pattern, the newest first: any may be half saved, or another program's."""
        for pattern, content in self.description.files.items():
            if not content.optional:
                yield from ((path, content) for path, _ in reversed(pattern.matches(run)))

    def nameless(self, run: Path) -> str:
        """Why a file that could be a step by its name is none, in a sentence; "" without such."""
        page = self.description
        for path, content in self._candidates(run):
            if page.number and not content.loader and disk.is_file(path):
                return _lacking_step(path, (*content.has, page.number))
        for folder, _ in page.within.folder.matches(run) if page.within else ():
            for path, _ in page.within.file.matches(folder) if page.within else ():
                return _lacking_step(path, (page.number,))
        return ""

    def _number(self, path: Path, content: Content) -> int | None:
        """The step in a file, or 0 where its name or another file has it; None for another
        trainer's file, and for one that can't be read."""
        try:
            status = _holding(path).stat()
        except OSError:
            return None
        key = (self.name, str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in _known:
            within, number = self.description.within, self.description.number
            beside = within and within.file.parts[-1].numbers(path.name) is None
            _known[key] = _read_number(path, content, () if beside else number)
        return _known[key]

    def _within(self, folder: Path) -> int | None:
        """The step in the file of `folder` that has it."""
        within = self.description.within
        matches = within.file.matches(folder) if within else []
        return self._number(matches[0][0], Content()) if matches else None

    @once
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
                if content.loader and content.optional and not begun(path):
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
                if not content.loader
                or (begun(path) if content.optional else _is_loaded(path, content.loader))
            ]
        return out

    def _folder(self, run: Path, path: Path, pattern: FilePattern) -> Path:
        """What is the step of the shard `path` and nothing else."""
        if within := self.description.within:
            return pattern.above(run, path, within.folder.text.count("/") + 1)
        return pattern.entry(run, path)

    @once
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
        left = [(path, numbers) for path, numbers in self._copies(run) if not disk.is_link(path)]
        left = [(path, numbers) for path, numbers in left if self.pointed(path) == step]
        if self.description.within:
            return [shard for path, _ in left for shard in self._inside(path)]
        return [(path, pattern, numbers) for path, numbers in left]

    def directory(self, run: Path, step: int) -> Path:
        """The folder of the step, or the run where steps are files."""
        own = sorted(self._own(run, step))
        return own[0] if own and disk.is_folder(own[0]) else run

    def entries(self, run: Path, step: int) -> list[Path]:
        """The folder, or the files but for copies that a restart loads; what lies beside them and
        marks them as unfinished; and what has their number in its name."""
        own = self._described(run, step)
        return [*sorted(own), *(self._siblings(run).own.get(step, ()) if own else ())]

    def _described(self, run: Path, step: int) -> set[Path]:
        """The entries that the page names."""
        own = self._own(run, step)
        return own | {path for path in self._marks(own) if path.parent not in own}

    @once
    def _siblings(self, run: Path) -> Siblings:
        steps = {step: self._described(run, step) for step in self._found(run)}
        copies = [path for path, _ in self._copies(run)]
        known = {*copies, *self._marks(copies), *self.pointer_files(run)}
        if not self.numbers_inside:  # the folders on the way have no step by the page
            known |= {parent for own in steps.values() for path in own for parent in path.parents}
        return siblings(run, steps, known) if steps else Siblings()

    def begun(self, run: Path, step: int) -> list[Path]:
        """Names of a step above all saved ones."""
        found = self._siblings(run)
        return [path for each in sorted(found.beyond) if each > step for path in found.own[each]]

    def unclear(self, run: Path, step: int) -> list[Path]:
        """Names that are written as a step's and may mean something else."""
        found = self._siblings(run).unclear
        return list(
            dict.fromkeys(path for each in sorted(found) if each > step for path in found[each])
        )

    def _own(self, run: Path, step: int) -> set[Path]:
        shards = self._found(run).get(step, [])
        return {self._folder(run, path, pattern) for path, pattern, _ in shards}

    def _marks(self, entries: Collection[Path]) -> list[Path]:
        """What marks `entries` as unfinished, beside or inside of them."""
        ending = self.description.unfinished
        marks = [Path(f"{path}{ending}") for path in entries if ending]
        return [path for path in marks if disk.exists(path)]

    def files(self, run: Path, step: int) -> list[Path]:
        """The shards, what lies beside them in a folder, and the copies of the step. What the page
        does not name is not read."""
        shards = {path for path, _, _ in self._shards(run, step)}
        whole = {*shards, *self._described(run, step), *self._copies_of(run, step)}
        below = {file for path in whole if disk.is_folder(path) for file in files_below(path)}
        return sorted({path for path in whole if not disk.is_folder(path)} | below)

    def _copies_of(self, run: Path, step: int) -> list[Path]:
        """Copies, not links: what a link leads to is edited where it is."""
        return [
            path
            for path, _ in self._copies(run)
            if not disk.is_link(path) and self.pointed(path) == step
        ]

    def kept_as(self, file: str) -> str:
        """By no name that a page of steps or copies has: some loaders take the highest step of all
        folders below theirs, as LitGPT does (`rglob("step-*/*.pth")`), also of an attic. A log is
        found there by its name."""
        if is_log(file):
            return file
        *folders, name = file.split("/")
        asides = (_aside(each) if any(map(str.isdigit, each)) else each for each in folders)
        return "/".join((*asides, _aside(name)))

    def saved_over(self, run: Path, step: int) -> list[Path]:
        return [path for path, pattern, _ in self._shards(run, step) if pattern.of_any_step]

    def missing(self, run: Path, step: int) -> list[str]:
        """A pattern without a file, and the ranks below the world size or the highest one; and a
        mark of the trainer's own."""
        names = [
            f"end of its save ({path.relative_to(run)} marks it as unfinished)"
            for path in self._marks(self._own(run, step))
        ]
        for shards in self._whole(run, step).values():
            names += self._lacking(run, step, shards)
        return list(dict.fromkeys(names))

    def _whole(self, run: Path, step: int) -> dict[Path, list[Shard]]:
        """What a load reads together, by where it lies: each folder, and each copy of one; all
        files of the step where steps are no such folders. A loader's folder that is there twice,
        as of two epochs, was saved twice."""
        shards = self._shards(run, step)
        if not self.description.within:
            loaded = next((each for each in self.description.files if each.folder), None)
            twice = [shard for shard in shards if shard[1] == loaded]
            if len(twice) < 2:
                return {self.directory(run, step): shards}
            return {shard[0]: [shard, *_beside(shard, shards)] for shard in twice}
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
                names += [f"{below}/{name}" for name in _unloaded(path, content)]
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


def _aside(name: str) -> str:
    return f"aside-{name}.aside"


def _beside(own: Shard, shards: Sequence[Shard]) -> list[Shard]:
    """The shards of other patterns whose numbers are those of one that is there several times."""
    return [
        shard
        for shard in shards
        if shard[1] != own[1] and all(own[2].get(k, n) == n for k, n in shard[2].items())
    ]


def _is_loaded(folder: Path, loader: str) -> bool:
    """Whether the loader would take the folder for one of its own."""
    if loader in ("dcp", "megatron"):
        return disk.is_file(folder / METADATA)
    return any(disk.matching(folder, "*_model_states.pt"))


def _unloaded(folder: Path, content: Content) -> list[str]:
    """What the loader would miss in the folder."""
    loader = content.loader
    if content.only_weights and any(disk.matching(folder, SHARDS)):
        return []
    if loader in ("dcp", "megatron"):
        configs = [] if loader == "dcp" or disk.is_file(folder / CONFIG) else [CONFIG]
        return [*configs, *absent(folder)]
    return Engine(folder).missing(folder, 0) if loader else []


def _holding(path: Path) -> Path:
    """The file by which a change of what `_tree` reads is told."""
    return common_file(path) if disk.is_folder(path) else path


def _tree(path: Path) -> Any:
    """Of a torch file, or one of JSON or YAML; of a folder, the common state of Megatron-core."""
    if disk.is_folder(path):
        return common_state(path)
    if is_json(path):
        return json_text.read(path)
    try:
        return Archive.open(path).tree()
    except DamagedFile:
        if not begins_as_text(path):
            raise
        return plain_yaml.read(path)


def _read_number(path: Path, content: Content, number: KeyPath) -> int | None:
    try:
        tree = _tree(path)
        if any(not list(expanded(tree, needed)) for needed in content.has):
            return None
        step = get(tree, number) if number else 0
    except (SurgeryError, OSError, ArithmeticError, LookupError, TypeError, ValueError,
            AttributeError):  # fmt: skip
        return None
    return step if is_count(step) else None


def _lacking_step(path: Path, needed: Sequence[KeyPath]) -> str:
    try:
        tree = _tree(path)
        lacking = [keys for keys in needed if not list(expanded(tree, keys))]
    except KeyError:
        return f"{path} holds no common state of Megatron-core, so its step is not known"
    except (SurgeryError, OSError) as error:
        return f"{error}, so its step is not known"
    names = dict.fromkeys(".".join(map(str, keys)) for keys in lacking)
    return f"{path} holds no {', '.join(names)}, so its step is not known" if names else ""
