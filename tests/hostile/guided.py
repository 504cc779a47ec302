"""Coverage-guided fuzzing of what reads files; any error but a SurgeryError stops it.

Usage: python -m tests.hostile.guided KIND SEED_FILE -runs=N [libFuzzer options] [CORPUS_DIR]
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ckptsurgeon"]):
    from ckptsurgeon.errors import SurgeryError
    from ckptsurgeon.files.archives import legacy
    from ckptsurgeon.files.archives.archive import Archive
    from ckptsurgeon.files.pickles import reader, scan, splice, tree
    from ckptsurgeon.logs.tensorboard import event_file
    from ckptsurgeon.recipe.file import load

assert legacy  # instrumented: archives that are no zip go there


def pickles(data: bytes) -> None:
    """The reader and the splicer."""
    reader.read_with_globals(scan.scan(data))
    with contextlib.suppress(KeyError):
        splice.splice(data, {("lr",): 1.0, ("new",): 2})


def archives(data: bytes) -> None:
    """Directory, pickle and extents of a torch file."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        file.write(data)
        file.flush()
        archive = Archive.open(Path(file.name))
        with archive.reading():
            for _, tensor in tree.tensors(archive.tree()):
                archive.storage(tensor)
            for name in archive.records:
                archive.payload(name)


def events(data: bytes) -> None:
    """The index of an event file, strict and salvaging."""
    for salvage in (True, False):
        event_file.index(data, Path("events"), salvage=salvage)


def recipes(data: bytes) -> None:
    """A recipe file."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        load(Path(file.name))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "pickles": pickles,
    "archives": archives,
    "events": events,
    "recipes": recipes,
}


def main() -> None:
    kind, options = sys.argv[1], sys.argv[2:]
    target = TARGETS[kind]

    def once(data: bytes) -> None:
        with contextlib.suppress(SurgeryError):
            target(data)

    atheris.Setup([sys.argv[0], *options], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
