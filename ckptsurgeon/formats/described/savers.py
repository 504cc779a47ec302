"""What a saver of Lightning remembers of its files, once some of them have left the run.

`ModelCheckpoint` ranks a new step against the scores of those in `best_k_models`, removes them by
path, and never asks whether they are there: a score whose file is gone keeps its rank for ever.
Source: lightning 2.6.6, `pytorch/callbacks/model_checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.capabilities import Ranks
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Located, Place, Setting
from ckptsurgeon.plans.edits import ABSENT, Key
from ckptsurgeon.plans.frozen import frozen

RANKED, LAST = "best_k_models", "last_model_path"
BEST, WORST = "best_model_path", "kth_best_model_path"
SCORES = {BEST: "best_model_score", WORST: "kth_value"}
"""The path that a saver names → where the score of it is."""


class Saving(Checkpoint, Ranks):
    """A checkpoint with the states of its trainer's savers at `savers`, (file, key path)."""

    savers: tuple[Located, ...]

    def forget(
        self, gone: Collection[Path], resumed: Sequence[Path]
    ) -> tuple[list[Setting], list[str]]:
        """A saver of another folder is left as it is, and named."""
        return _forgotten(self, self.savers, gone, resumed)


def _forgotten(
    checkpoint: Checkpoint,
    savers: Sequence[Located],
    gone: Collection[Path],
    resumed: Sequence[Path],
) -> tuple[list[Setting], list[str]]:
    """What each of `savers` must forget once `gone` has left the folder of the step and a restart
    loads one of `resumed`."""
    settings: list[Setting] = []
    notes: dict[str, None] = {}
    states = [_Saver(checkpoint, file, path) for file, path in savers]
    states = [each for each in states if each.known]
    here = [each for each in states if each.here]
    copies = [path for path in resumed if path.name.startswith("last")]
    # Those that keep no `last` read nothing of it. Of the first step, none knows of one yet.
    makers = [each for each in here if each.text(LAST)] or here
    for each in states:
        if each.here:
            settings += each.forgotten(gone, copies[0].name if copies and each in makers else "")
            lost = ", ".join(sorted(Path(name).name for name in each.lost(gone)))
            note = f"{each.title} no longer ranks {lost}: no such file is in the run"
        else:
            lost = ", ".join(each.names())
            note = (
                f"{each.title} saves into {each.folder}, which this surgery leaves alone: newer "
                "steps there stay"
            )
        if lost:
            notes[note] = None
    return settings, list(notes)


@frozen
class _Saver:
    """The state of one saver at `path` in `file`."""

    checkpoint: Checkpoint
    file: Path
    path: tuple[Key, ...]

    def places(self, *keys: Key) -> list[Place]:
        return self.checkpoint.at(self.file, (*self.path, *keys))

    def text(self, key: str) -> str:
        value = self.checkpoint.value(self.file, (*self.path, key))
        return value if isinstance(value, str) else ""

    @property
    def known(self) -> bool:
        """Whether it is a saver's state and no other callback's."""
        ranked = self._ranked()
        named = isinstance(ranked, Mapping) and all(isinstance(name, str) for name in ranked)
        return named and bool(self.text("dirpath"))

    @property
    def title(self) -> str:
        return str(self.path[-1]).partition("{")[0]

    @property
    def folder(self) -> Path:
        return Path(self.text("dirpath"))

    @property
    def here(self) -> bool:
        """Whether it saves where the step lies. A run that was moved keeps the folder's name."""
        step = self.checkpoint.path.parent.resolve()
        return self.folder == step or (
            self.folder.name == step.name and not disk.is_folder(self.folder)
        )

    def _ranked(self) -> Any:
        try:
            return get(self.checkpoint.trees[self.file], (*self.path, RANKED))
        except KeyError:
            return None

    def names(self) -> list[str]:
        """The paths that it remembers."""
        return [*self._ranked(), *filter(None, map(self.text, (BEST, WORST, LAST)))]

    def lost(self, gone: Collection[Path]) -> list[str]:
        """Those that it ranks and that are not in the run."""
        return [name for name in self._ranked() if not self._stays(name, gone)]

    def scores(self) -> dict[str, float]:
        """By path, as far as they are numbers."""
        places = {name: self.places(RANKED, name) for name in self._ranked()}
        return {
            name: each[0].value
            for name, each in places.items()
            if each and isinstance(each[0].value, (int, float))
        }

    def _stays(self, name: str, gone: Collection[Path]) -> bool:
        path = Path(name)
        if not path.is_relative_to(self.folder):
            return disk.exists(path)
        here = self.checkpoint.path.parent / path.relative_to(self.folder)
        return disk.exists(here) and not any(path in gone for path in (here, *here.parents))

    def forgotten(self, gone: Collection[Path], copy: str) -> Iterator[Setting]:
        """The paths that are not in the run, and the scores that go with them. `copy` is the
        `last` that a restart loads, or nothing."""
        scores, lost = self.scores(), self.lost(gone)
        for name in lost:
            yield from self._set(ABSENT, RANKED, name)
        left = {name: score for name, score in scores.items() if name not in lost}
        best = self.text(BEST)
        rising = best in scores and scores[best] == max(scores.values())
        for key, end in ((BEST, max if rising else min), (WORST, min if rising else max)):
            if (old := self.text(key)) and not self._stays(old, gone):
                new = end(left, key=left.__getitem__) if left else ""
                yield from self._set(new, key)
                yield from self._set(left.get(new), SCORES[key])
        if (old := self.text(LAST)) and self._stays(old, gone):
            return
        if old or copy:
            yield from self._set(str(self.folder / copy) if copy else "", LAST)

    def _set(self, value: Any, *keys: Key) -> Iterator[Setting]:
        for place in self.places(*keys):
            if place.value != value:
                yield Setting(str(keys[0]), place, value)
