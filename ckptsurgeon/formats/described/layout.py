"""What a restart of a trainer that a page describes loads, and what is in the files of a step."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import DamagedFile, SurgeryError, first_few
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.files.one_look import once
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.described.checkpoint import DescribedCheckpoint, expanded
from ckptsurgeon.formats.described.copied import Copied
from ckptsurgeon.formats.described.description import FILE, OLDER, RESUME, Content, KeyPath, Pointer
from ckptsurgeon.formats.described.file_pattern import FilePattern
from ckptsurgeon.formats.described.name_pattern import NamePattern
from ckptsurgeon.formats.described.ray_list import NAME, Listed, alone
from ckptsurgeon.formats.described.reading import flattened, opened
from ckptsurgeon.formats.described.sharded import beginnings, begun, weights_of
from ckptsurgeon.formats.described.steps import Shard
from ckptsurgeon.formats.fields.values import Rival
from ckptsurgeon.formats.layout import Paged, leads_out, outside
from ckptsurgeon.formats.megatron.dist import common_state
from ckptsurgeon.formats.places.json_beside import read_beside
from ckptsurgeon.formats.step_folders import files_below
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.remote import reads

ENDING = 1 << 20
"""Bytes at the end of a torch file that hold its directory."""


class Described(Listed, Paged):
    """The format of one page."""

    # --- what a restart loads --------------------------------------------------------------------

    def pointer_files(self, run: Path) -> list[Path]:
        """The text file that names a step, and of each kind of copy the newest; Ray's list."""
        return [
            *self.lists(run),
            *self._texts(run),
            *(path for pattern in self.description.last for path in _newest(pattern, run)),
        ]

    def _texts(self, run: Path) -> list[Path]:
        """The text file; where a page has copies or links too, if it is there."""
        page = self.description
        file = run / page.pointer.file if page.pointer else None
        return [file] if file is not None and (disk.exists(file) or not page.last) else []

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """The text, and every copy or link with the shard of its rank that it must be a copy of or
        lead to: whichever a restart picks, it is this step. Ray's list is led to it too."""
        out: dict[Path, str | Path] = {**self.relisted(run, step)}
        shards = self._shards(run, step)
        folders = any(pattern.folder for pattern in self.description.last)
        for file in self._texts(run):
            out[file] = self._text(run, file, step)
        for path, numbers in self._copies(run):
            if disk.is_folder(path) or (disk.is_link(path) and folders):
                out |= self._repeated(run, path, step)
                continue
            alike = [p for p, _, n in shards if n.get("rank") == numbers.get("rank")]
            if not alike:
                raise SurgeryError(
                    f"{path.name} has no counterpart in step {step}: it was saved by another "
                    "number of ranks",
                    next=command("status", why="the steps that are saved"),
                )
            if path not in alike:
                out[path] = alike[0]
        return out

    def _text(self, run: Path, pointer: Path, step: int) -> str:
        """What names the step, with the other numbers in its name: written as they are there, as in
        `model_0000009.pth`, unless the pointer names its own step in another way."""
        page = self.description.pointer
        assert page is not None
        shards = self._shards(run, step)
        if FILE in page.text:
            said = page.file_in(text(pointer) or "")
            like = next((each for _, _, each in self._called(run, said)), None)
            path = next((path for path, each, _ in shards if each == like), shards[0][0])
            short = bool(said) and "/" not in said
            return page.text.replace(FILE, path.name if short else path.relative_to(run).as_posix())
        numbers = {name: str(number) for name, number in (shards[0][2] if shards else {}).items()}
        if shards and self._as_named(run, pointer):
            numbers |= shards[0][1].texts(run, shards[0][0])
        out = page.text
        for name, number in {"step": str(step), **numbers}.items():
            out = out.replace(f"{{{name}}}", number)
        own = reads.key(run)
        key = _split(page, text(pointer) or "")[0] if own is None else own
        key = str(run.absolute()) if _is_another(key, run) else key
        return f"{key}/{out}" if page.by_key and key else out

    def _called(self, run: Path, name: str) -> list[tuple[int, Path, FilePattern]]:
        """The files of this name, or of this path from the run, each with its step and pattern."""
        return [
            (step, path, pattern)
            for step, shards in self._found(run).items()
            for path, pattern, _ in shards
            if name in (path.name, path.relative_to(run).as_posix())
        ]

    def forked(self, said: str, folder: Path) -> str:
        """Below the key of the fork. On a disk that is its path, where the run's is one; else that
        of the run, but for the last name, which is the folder's. Ray's list has its one step."""
        page = self.description.pointer
        if page is None or not page.by_key:
            return alone(said)
        key, named = _split(page, said)
        own = reads.key(folder)
        if own is None and _is_folder(key):
            own = str(folder.absolute())
        if own is None:
            own = str(PurePosixPath(key).with_name(folder.name)) if key else ""
        return f"{own}/{named}" if own else named

    def _as_named(self, run: Path, pointer: Path) -> bool:
        """Whether the pointer has the zeros that begin the number in the name of its step; true
        where that step is not there."""
        written = self._written(pointer)
        shards = self._shards(run, int(written["step"])) if written else []
        named = shards[0][1].texts(run, shards[0][0]) if shards else {}
        return named.get("step", written.get("step")) == written.get("step")

    def _written(self, pointer: Path) -> dict[str, str]:
        """The numbers by which the pointer names a step of its run; none where it names no such
        step, or one below another key."""
        page = self.description.pointer
        if page is None:
            return {}
        key, said = _split(page, text(pointer) or "")
        own = reads.key(pointer.parent)
        if page.by_key and (own not in (None, key) or _is_another(key, pointer.parent)):
            return {}
        return NamePattern(page.text.strip()).texts(said) or {}

    def _repeated(self, run: Path, copy: Path, step: int) -> dict[Path, str | Path]:
        """A link to a folder with the folder of the step, or each file of a folder that must be a
        copy of it; nothing where there is no such step."""
        shards = self._shards(run, step)
        if not shards:
            return {}
        file, pattern, _ = shards[0]
        folder = self._folder(run, file, pattern)
        if disk.is_link(copy):
            return {copy: folder}
        if self.pointed(copy) == step:
            return {}
        return {copy / file.relative_to(folder): file for file in files_below(folder)}

    @once
    def pointed(self, pointer: Path) -> int | None:
        """The step in the text, or in the copy."""
        page = self.description
        if pointer.name == NAME:
            return self.named_in(pointer)
        if page.pointer and pointer.name == page.pointer.file and FILE in page.pointer.text:
            said = page.pointer.file_in(text(pointer) or "")
            steps = {step for step, _, _ in self._called(pointer.parent, said)}
            return steps.pop() if len(steps) == 1 else None
        if page.pointer and pointer.name == page.pointer.file:
            named = self._written(pointer)
            return int(named["step"]) if named else None
        if page.within:
            return self._within(pointer)
        if page.number:
            return self._number(pointer, next(iter(page.files.values())))
        return self._named(pointer)

    def _named(self, pointer: Path) -> int | None:
        """The step that a link leads to by its name, or that a copy equals: in size and in its
        end, where the checksum of every record is."""
        run = self._above(pointer)
        shards = [(step, *each) for step, of in self._found(run).items() for each in of]
        found = {self._folder(run, path, pattern): step for step, path, pattern, _ in shards}
        found |= {path: step for step, path, _, _ in shards}
        if disk.is_link(pointer):
            real = pointer.resolve()
            return next((step for path, step in found.items() if path.resolve() == real), None)
        end = _end(pointer)
        same = [path for path in found if end is not None and _end(path) == end]
        return found[same[-1]] if same else None

    def _above(self, copy: Path) -> Path:
        """The run that a copy or link is in, by its path in the page."""
        depths = (len(each.parts) for each in self.description.last if each.leads_to(copy))
        return copy.parents[next(depths, 1) - 1]

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """A step outside the run, if a link leads there; and a mark that keeps a copy of the step
        from being loaded."""
        copies = [path for path, _ in self._copies(run)]
        # Inside of what a link leads to, the mark is the step's.
        inside = self.description.unfinished.startswith("/")
        marks = self._marks([path for path in copies if not (inside and disk.is_link(path))])
        out = [Rival(step, f"{path.name} marks a copy as unfinished", (path,)) for path in marks]
        for path in copies:
            if leads_out(run, path):
                own = self.entries(run, step) or self.files(run, step)
                target = self.pointers(run, step).get(path, own[0])
                out.append(outside(step, path, Path(target)))
        return out

    def log_folders(self, run: Path) -> Sequence[str]:
        """By the name of the run's folder, as the page says; else the run itself."""
        named = self.description.logs.get(run.name)
        return (".",) if named is None else (named,)

    @property
    def log_files(self) -> Sequence[str]:
        """As the page says."""
        return self.description.log_files

    @property
    def log_offset(self) -> int | None:
        """As the page says."""
        return self.description.log_offset

    def idle_paths(self, run: Path, step: int) -> list[str]:
        """Of each file pattern, by dots."""
        shards, contents = self._shards(run, step), self.description.files
        read = {p: contents[each] for p, each, _ in shards if not each.folder}
        read = {path: content for path, content in read.items() if content.paths()}
        trees, _, _ = read_beside(read, flattened(read))
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

    def instead_of(self, run: Path, step: int) -> list[str]:
        """Where the run has one step, under a name of any; what helps is in the page."""
        steps = self.steps(run)
        over = self.saved_over(run, steps[0]) if len(steps) == 1 and step < steps[0] else []
        if not over:
            return [""]
        names = first_few([path.relative_to(run).as_posix() for path in over])
        why = f": its trainer saves each step over the one before, in {names}"
        return [why, *(self.advise(key, step) for key in self.description.options if key == OLDER)]

    def resume_option(self, run: Path, step: int) -> str:
        """That of the page, if it has one."""
        said = self.description.options.get(RESUME, "").replace("{value}", str(step))
        if "{entry}" not in said:
            return said
        entry = min(self._own(run, step), default=run)
        return said.replace("{entry}", shlex.quote(str(entry)))

    def advise_setting(self, key: str) -> str:
        """The trainer's own place."""
        return f"set {key} where the trainer is started: {self.name}.yaml names no optimizer"

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
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
        if self.description.within or len(whole) > 1:
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


def _leads(file: Path, trees: Mapping[Path, Any], content: Content, path: KeyPath) -> bool:
    if content.loader == "dcp" and not path:
        return begun(file)
    if content.loader == "dcp" and content.only_weights:
        return bool(weights_of(file, [path]))
    if content.loader == "dcp":
        return bool(beginnings(Saved.open(file).items, path, rest=r"(\..+)?"))
    if content.loader == "megatron":
        return bool(list(expanded(common_state(file), path)))
    if content.loader:
        models = [*disk.matching(file, "*_model_states.pt")]
        return any(list(expanded(Archive.open(model).tree(), path)) for model in models)
    return bool(list(expanded(trees[file], path)))


def _split(page: Pointer, said: str) -> tuple[str, str]:
    """The key of a folder in what a pointer says, where its page has one, and what follows it."""
    names = said.strip().split("/")
    depth = page.text.count("/") + 1 if page.by_key else len(names)
    return "/".join(names[:-depth]), "/".join(names[-depth:])


def _is_folder(key: str) -> bool:
    """Whether the key is the path of a folder which is here: that of a container is not."""
    return key.startswith("/") and disk.is_folder(Path(key))


def _is_another(key: str, run: Path) -> bool:
    """Whether it is that of another folder, as in a copy of a run whose pointer has its path."""
    return _is_folder(key) and not Path(key).samefile(run)


def _newest(pattern: FilePattern, run: Path) -> list[Path]:
    """Of the files of one pattern the newest by its time, for each rank: what a restart picks. A
    link has the time of what it leads to."""
    newest: dict[int | None, Path] = {}
    for path, numbers in pattern.matches(run):
        rank = numbers.get("rank")
        best = newest.get(rank)
        if disk.exists(path) and (
            best is None or path.stat().st_mtime_ns >= best.stat().st_mtime_ns
        ):
            newest[rank] = path
    return list(newest.values())


def _end(path: Path) -> tuple[int, bytes] | None:
    try:
        descriptor = reads.opened(path)
    except OSError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        return size, reads.bytes_at(path, descriptor, max(0, size - ENDING), min(size, ENDING))
    except (OSError, DamagedFile):
        return None
    finally:
        os.close(descriptor)
