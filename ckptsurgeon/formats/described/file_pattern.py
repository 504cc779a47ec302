"""Files of one kind by their paths from the run, as a page writes them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.formats.described.name_pattern import NUMBER, NamePattern
from ckptsurgeon.plans.frozen import frozen


@frozen
class FilePattern:
    """A file, or a `folder`, by its path from the run: `*` is any text, `{step}` the number of the
    step, `{rank}` and `{world}` those of the ranks, any other `{name}` some number."""

    text: str
    folder: bool = False

    @cached_property
    def parts(self) -> list[NamePattern]:
        """Its text, a name at a time."""
        return [NamePattern(name) for name in self.text.split("/")]

    @property
    def of_any_step(self) -> bool:
        """Whether its files have the same name at each step: only ranks are told apart by it."""
        return "*" not in self.text and {"{rank}", "{world}"}.issuperset(NUMBER.findall(self.text))

    def entry(self, run: Path, file: Path) -> Path:
        """What is the step and nothing else: the first folder on the way to `file` whose name has
        {step}, or the file."""
        names = self.text.split("/")
        depth = next((i for i, name in enumerate(names) if "{step}" in name), len(names) - 1)
        return self.above(run, file, depth + 1)

    def leads_to(self, path: Path) -> bool:
        """Whether the last names of `path` are those of this pattern, whatever lies there."""
        names = path.parts[-len(self.parts) :]
        found = (part.numbers(name) for part, name in zip(self.parts, names, strict=False))
        return len(names) == len(self.parts) and all(each is not None for each in found)

    def texts(self, run: Path, file: Path) -> dict[str, str]:
        """The numbers in the path of a `file` of this pattern, as they are written there."""
        names = zip(self.parts, file.relative_to(run).parts, strict=True)
        return {key: text for part, name in names for key, text in (part.texts(name) or {}).items()}

    @staticmethod
    def above(run: Path, file: Path, depth: int) -> Path:
        """`file`, or the folder that leads to it, so many names below the run."""
        return run.joinpath(*file.relative_to(run).parts[:depth])

    def matches(self, run: Path) -> list[tuple[Path, dict[str, int]]]:
        """Each file of this pattern below `run` with the numbers in its path, ascending by path."""
        found: list[tuple[Path, dict[str, int]]] = [(run, {})]
        for depth, part in enumerate(self.parts):
            last = depth == len(self.parts) - 1
            deeper: list[tuple[Path, dict[str, int]]] = []
            for folder, numbers in found:
                for path in listed_in(folder):
                    here = part.numbers(path.name)
                    if here is None:
                        continue
                    if not _is(path, self.folder or not last, last):
                        continue
                    if all(numbers.get(name, number) == number for name, number in here.items()):
                        deeper.append((path, numbers | here))
            found = deeper
        return found


def _is(path: Path, folder: bool, last: bool) -> bool:
    """Whether it is of this kind, or `last` on its way and a link that leads nowhere. What nobody
    may look at is neither."""
    try:
        return disk.is_folder(path) is folder or (
            last and disk.is_link(path) and not disk.exists(path)
        )
    except OSError:
        return False


def listed_in(folder: Path) -> list[Path]:
    """What is in a folder, ascending, as `disk.names_in`."""
    return [folder / name for name in disk.names_in(folder)]
