"""JSON files beside a checkpoint's shards: their fields are found and edited as a shard's are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.files import json_text
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.safetensors import FlattenedFile, SafetensorsFile
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.columns import Places
from ckptsurgeon.formats.fields.constants import SAFE
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.fields.understood import problem
from ckptsurgeon.formats.fields.values import Place
from ckptsurgeon.plans.edits import Append, Change, Content


@dataclass
class JsonBeside(Checkpoint):
    """`texts` are the JSON files as they are; their values are among the trees."""

    texts: Mapping[Path, str] = field(kw_only=True, default_factory=dict)

    def check(
        self,
        name: str,
        places: Sequence[Place],
        problem: Callable[[str, Any], str] = problem,
    ) -> None:
        """As `Checkpoint` does, for the values in JSON with the path in it."""
        columns = Places.of(places).columns
        super().check(name, Places(c for c in columns if c.file not in self.texts), problem)
        for place in Places(column for column in columns if column.file in self.texts):
            if reason := problem(name, place.value):
                raise self.refused(name, place, reason)

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """The text of a JSON file with its new values; the shards as ever."""
        mine = {file: edits for file, edits in changes.items() if root / file in self.texts}
        rest = {file: edits for file, edits in changes.items() if file not in mine}
        out: dict[str, Append | Content] = {}
        for file, edits in mine.items():
            values = {path: change.new for change in edits for path in change.paths()}
            text = json_text.edited(self.texts[root / file], values)
            out[file] = Content((text.encode(),))
        return {**super().render(rest, root), **out}


def transformers_config(folder: Path) -> Mapping[str, Any] | None:
    """`config.json` in a step's folder or beside it; None where neither has one. Raises
    SurgeryError for one that is none."""
    found = (each / "config.json" for each in (folder, folder.parent))
    path = next((path for path in found if disk.is_file(path)), None)
    return None if path is None else json_text.mapping(path)


def is_json(path: Path) -> bool:
    """By its name."""
    return path.suffix == ".json"


def read_beside(
    paths: Iterable[Path], flattened: Collection[Path] = ()
) -> tuple[dict[Path, Any], dict[Path, Archive], dict[Path, str]]:
    """Of torch files, safetensors and JSON files the trees, the archives of all but the last, and
    the texts of these. What is `flattened` among the safetensors is read as a dict of dicts. Raises
    SurgeryError for a file that is none of its kind."""
    paths = list(paths)
    safe = [path for path in paths if path.suffix == SAFE]
    values, texts = read([path for path in paths if is_json(path)])
    trees, archives = read_shards(p for p in paths if p not in safe and p not in texts)
    for path in safe:
        kind = FlattenedFile if path in flattened else SafetensorsFile
        archives[path] = kind.open(path)
        trees[path] = archives[path].tree()
    return {**trees, **values}, archives, texts


def read(paths: Sequence[Path]) -> tuple[dict[Path, Any], dict[Path, str]]:
    """The value and the text of each JSON file. Raises SurgeryError for one that is none."""
    texts = {path: json_text.text(path) for path in paths}
    return {path: json_text.parsed(path, text) for path, text in texts.items()}, texts
