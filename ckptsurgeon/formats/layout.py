"""What the formats have in common: a trainer without pointer files whose flags say it all."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptsurgeon.formats.protocol import Checkpoint
from ckptsurgeon.formats.values import Hazard, Rival, State


class BaseFormat:
    """The answers of a `Format` that most trainers share; a family overrides what differs."""

    options: Mapping[str, str] = {}
    """Key of a recipe → the option of the launch that decides it, where its value comes last."""
    fresh_optimizer: str
    """How the trainer is started so that it loads no optimizer state."""

    def nameless(self, run: Path) -> str:
        """A name has the step, or the file is none."""
        return ""

    def strays(self, run: Path, step: int) -> list[str]:
        """No name is looked for that a load would not ask for."""
        return []

    def pointer_files(self, run: Path) -> list[Path]:
        """No file: the trainer looks at the names of the steps."""
        return []

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """Nothing to write: see `pointer_files`."""
        return {}

    def pointed(self, pointer: Path) -> int | None:
        """No file names a step."""
        return None

    def resumes(self, run: Path) -> int | None:
        """Left to the pointer files, or to the highest complete step."""
        return None

    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """No file but those of `pointers` names a step."""
        return []

    def log_folders(self, run: Path) -> Sequence[str]:
        """The run itself, at any depth."""
        return (".",)

    def idle_paths(self, run: Path, step: int) -> list[str]:
        """No page describes it."""
        return []

    def kept_as(self, file: str) -> str:
        """Under its own name: most trainers look into no folder but their own."""
        return file

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """Most trainers load from one place."""
        return []

    def hazards(self, run: Path) -> list[Hazard]:
        """No such thing is known of most trainers."""
        return []

    def advise(self, key: str, value: object) -> str:
        """The relaunch with the option of `options`, or without the state of another optimizer."""
        if key == "optimizer":
            return f"start the trainer with the new optimizer and {self.fresh_optimizer}"
        if key not in self.options:
            return f"set {key} to {value} where the trainer is started"
        return f"relaunch the trainer with {self.options[key]} {value}"

    def advise_setting(self, key: str) -> str:
        """The command line."""
        return f"set {key} on the trainer's command line"

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> str:
        """Most trainers have no flag for it."""
        return "ckptsurgeon status    the steps to go back to; this trainer can't skip data"

    def advise_rewarm(
        self, state: State, kind: str, until: str, iterations: int
    ) -> tuple[str, ...]:
        """By hand: a small rate, and the usual one at a later checkpoint."""
        return (
            "ckptsurgeon reset moments    without re-warm",
            "ckptsurgeon set-lr 0.1x      a small rate until the moments have filled; set it back "
            "at a later checkpoint",
        )

    def launch_flags(self, run: Path, checkpoint: Checkpoint) -> list[str]:
        """No value is taken from a command line that is known here."""
        return []


def leads_out(run: Path, path: Path) -> bool:
    """Whether `path` is a symbolic link to a name outside the run. What a name in the run leads to
    in turn is its own affair: a step may be a link."""
    if not path.is_symlink():
        return False
    named = path.parent / path.readlink()
    return not (named.parent.resolve() / named.name).is_relative_to(run.resolve())


def leads_inside(run: Path, path: Path) -> bool:
    """Whether `path` is a symbolic link to what is in the run by another name, or to nothing."""
    return path.is_symlink() and not (leads_out(run, path) and path.exists())


def outside(step: int, link: Path, target: Path) -> Rival:
    """What the trainer loads by a link that leads out, and how to lead it to `target` instead."""
    here = shlex.quote(os.path.relpath(target, link.parent))
    return Rival(
        step,
        f"{link.name} is a link to {link.readlink()}, outside the run",
        (),
        f"ln -sfn {here} {shlex.quote(str(link))}    then the same command again",
    )
