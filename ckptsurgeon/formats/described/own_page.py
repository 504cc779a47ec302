"""The format of a page that somebody wrote: what it leaves open about the trainer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ckptsurgeon.files.one_look import once
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.described.checkpoint import DescribedCheckpoint, expanded
from ckptsurgeon.formats.described.layout import Described
from ckptsurgeon.formats.described.strays import Stray, strays
from ckptsurgeon.formats.fields.understood import is_count
from ckptsurgeon.formats.fields.values import HIGHEST, Hazard, Rival
from ckptsurgeon.formats.layout import CountsSaves, HasHazards
from ckptsurgeon.hints import command, shell


class OwnPage(Described, CountsSaves, HasHazards):
    """The format of a page that somebody wrote, or that goes by epochs: its steps may count these,
    and its trainer log anything. What it logs by may be named."""

    @property
    def logs_counter(self) -> bool:
        """By its page."""
        return bool(self.description.logged)

    def counted(self, checkpoint: Checkpoint) -> int:
        """What `logged` leads to, where a page has it."""
        keys = self.description.logged
        if not keys or not isinstance(checkpoint, DescribedCheckpoint):
            return super().counted(checkpoint)
        trees = (tree for tree in checkpoint.trees.values() if list(expanded(tree, keys)))
        numbers = (get(tree, keys) for tree in trees)
        return next((number for number in numbers if is_count(number)), checkpoint.step)

    @property
    def _takes_the_highest(self) -> bool:
        """Whether nothing says which step a restart loads, so that it may go by any number."""
        page = self.description
        return not (page.witness or page.pointer or page.last)

    @once
    def _strays(self, run: Path) -> list[Stray]:
        """What holds a whole step under a name that the page has not."""
        if not self._takes_the_highest:
            return []
        known = {path for step in self.steps(run) for path in self.files(run, step)}
        return strays(run, self.description, known)

    def _later(self, run: Path, step: int) -> list[Stray]:
        own = self.files(run, step)
        return [stray for stray in self._strays(run) if stray.is_after(self.description, step, own)]

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """Whole steps by another name with a later number, too."""
        later = [stray for stray in self._later(run, step) if stray.numbered]
        return [
            *super().rivals(run, step),
            *(
                Rival(
                    stray.step,
                    f"{stray.entry.relative_to(run)} holds a step that no page names, {stray.step}",
                    (stray.entry,),
                    harm=HIGHEST,
                )
                for stray in later
            ),
        ]

    def hazards(self, run: Path) -> list[Hazard]:
        """What a restart may load in place of the newest step."""
        newest = max(self.steps(run), default=0)
        back = command("rollback", "--to", newest, why="moves it aside")
        return [
            Hazard(f"{rival.what}: {rival.harm.format(newest)}", back)
            for rival in self.rivals(run, newest)
            if rival.harm == HIGHEST
        ]

    def unclear(self, run: Path, step: int) -> list[Path]:
        """But for what holds a whole step after `step`."""
        rivals = {path for rival in self.rivals(run, step) for path in rival.paths}
        return [path for path in super().unclear(run, step) if path not in rivals]

    def unnamed(self, run: Path, step: int, leave: Collection[Path]) -> list[str]:
        """Whole steps whose names have no number, and which a restart may load all the same."""
        later = [s for s in self._later(run, step) if not s.numbered and s.entry not in leave]
        aside = run.with_name(f"{run.name}.aside")
        return [
            f"{stray.entry.relative_to(run)} holds {_what(stray, step)}, and stays, as no page "
            "names it; if a restart may load it: "
            f"{shell(['mkdir', '-p', aside], ['mv', stray.entry, aside])}"
            for stray in later
        ]


def _what(stray: Stray, step: int) -> str:
    return f"step {stray.step}" if stray.counted else f"a step that was saved after step {step}"
