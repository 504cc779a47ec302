"""A section of a recipe, and the recipe that operations read: what is wanted, and may it be meant.

A recipe holds the wanted state, not steps: the order of its keys means nothing, what is absent
stays as it is, and applying it twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ckptsurgeon.errors import UsageError
from ckptsurgeon.operations.fields import Fields, converted
from ckptsurgeon.plans.edits import AnyChange

if TYPE_CHECKING:
    from ckptsurgeon.formats import Checkpoint, State
    from ckptsurgeon.run.run import Run

Changes = tuple[list[AnyChange], list[str]]
"""What an operation changes, and its warnings: a sentence each."""
S = TypeVar("S", bound="Section")


class Section(Fields):
    """What one operation takes from a recipe: a frozen dataclass, and the operation itself.

    Each hook below has a default that does nothing."""

    on_logs: ClassVar[bool] = False
    """Whether it works on a log folder without checkpoints."""
    fills_parameters: ClassVar[bool] = False
    """Whether it fills each parameter from one of another run."""
    computes: ClassVar[bool] = False
    """Whether it makes tensors of others, which the workers of a cluster may do."""
    leaves_newer: ClassVar[bool] = False
    """Whether the steps after `target` leave the run."""
    leads: ClassVar[bool] = False
    """Whether the trainer is to load `target` next, even where nothing of it changes."""

    def check(self, recipe: Recipe) -> None:
        """Raise UsageError for values that can't be meant together, or beside the other sections:
        each alone is checked by what its Key says."""

    def target(self, run: Run) -> int | None:
        """The step whose checkpoint is edited, if this section says so; else the latest is."""
        return None

    def settled(self: S, state: State) -> S:
        """The same with absolute values for relative ones, from the state before the surgery."""
        return self

    def title(self, run: Run, step: int) -> list[str]:
        """What the surgery does at `step`, in the words of plan, receipt and log."""
        return []

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        """What becomes of `checkpoint` and the rest of the run. It reads, and never writes.

        Raises SurgeryError, with the trainer's flag to use instead, for what the format can't
        keep."""
        return [], []

    def refuse_untaken(self, changes: Sequence[AnyChange], after: Checkpoint) -> None:
        """Raise SurgeryError where the next step would not use what was asked for. `changes` are
        those of this section, and `after` is the checkpoint after all of the recipe."""

    def reads(self, run: Run, step: int) -> list[Path]:
        """The files beside those of the edited `step` that `changes` relies on. A plan keeps what
        they were before the first of them is read."""
        return []

    def log_changes(self, run: Run, recipe: Recipe) -> Changes:
        """The same in a log folder without checkpoints, for a section that is `on_logs`."""
        return [], []

    def record(self, run: Run, recipe: Recipe, step: int | None, title: str) -> list[AnyChange]:
        """What is added to a surgery that changes something: a note of it. `step` is None where
        there are no checkpoints."""
        return []


class Recipe:
    """Everything that one surgery is asked for. `why` is the line that the receipt and `log` keep.

    `Recipe(Rollback(to=6210), Hyperparameters(lr=3e-5), why="loss spike")`; it checks what it is
    given, and raises UsageError."""

    def __init__(self, *sections: Section, name: str = "", why: str = "") -> None:
        for section in sections:
            if not isinstance(section, Section):
                raise UsageError(f"{section!r} is not a section of a recipe", next="docs/api.md")
        self.given: dict[type[Section], Section] = {type(item): item for item in sections}
        self.name: str = converted(str, name, "name")
        self.why: str = converted(str, why, "why")
        if len(self.given) < len(sections):
            raise UsageError("a recipe has one section of each kind", next="merge them")
        for section in sections:
            section.check(self)
            section.check_values()

    def get(self, kind: type[S]) -> S | None:
        """The section of this kind, if the recipe has it."""
        section = self.given.get(kind)
        return section if isinstance(section, kind) else None

    def __getitem__(self, kind: type[S]) -> S:
        """The section of this kind, or one with its defaults."""
        section = self.get(kind)
        return kind() if section is None else section

    def but(self, *sections: Section, why: str | None = None) -> Recipe:
        """The same recipe with these sections in place of its own."""
        kinds = {**self.given, **{type(item): item for item in sections}}
        return Recipe(*kinds.values(), name=self.name, why=self.why if why is None else why)

    @property
    def leaves_newer(self) -> bool:
        """Whether newer steps leave the run."""
        return any(section.leaves_newer for section in self.given.values())

    @property
    def leads(self) -> bool:
        """Whether the trainer is to load the step that a section names."""
        return any(section.leads for section in self.given.values())
