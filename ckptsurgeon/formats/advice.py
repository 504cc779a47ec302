"""What a user does in the trainer where its checkpoints do not decide, in the words of a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import State
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.remote import reads


class Advice:
    """What holds for most trainers; a family overrides what differs."""

    options: Mapping[str, str] = {}
    """Key of a recipe → the option of the launch that decides it, where its value comes last."""
    fresh_optimizer: str
    """How the trainer is started so that it loads no optimizer state."""
    makes_schedule: str = ""
    """What makes a schedule that is in its code, and must be as it was."""
    asks_late: bool = False
    """Whether an engine inside makes the step of the schedule before it asks for its rate."""

    def advise(self, key: str, value: object) -> str:
        """A sentence: what to do in this trainer so that it uses `value` for `key` (clip_grad,
        seed, optimizer), which its checkpoints do not decide."""
        if key == "optimizer":
            return f"start the trainer with the new optimizer and {self.fresh_optimizer}"
        if key == "consumed_samples":
            return f"let its data begin with sample {value}"
        if key not in self.options:
            return f"set {key} to {value} where the trainer is started"
        return f"relaunch the trainer with {self.options[key]} {value}"

    def advise_setting(self, key: str) -> str:
        """A sentence: where the trainer takes `key` of the param groups from, which a checkpoint
        without them does not keep."""
        return f"set {key} on the trainer's command line"

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
        """How this trainer is made to pass over ranges of iterations, ends included."""
        return command("status", why="the steps to go back to; this trainer can't skip data")

    def advise_rewarm(
        self, state: State, kind: str, until: str, iterations: int
    ) -> tuple[Hint, ...]:
        """What to do in this trainer in place of a re-warm window of `kind` that is over after
        `iterations`, once `until` samples are consumed, a line for each step."""
        return (
            command("reset", "moments", why="without re-warm"),
            command(
                "set-lr",
                "0.1x",
                why="a small rate until the moments have filled; set it back at a later checkpoint",
            ),
        )

    def resume_option(self, run: Path, step: int) -> str:
        """How a start names `step`, which it is to load; "" where it finds it by itself."""
        return ""

    def launch_flags(self, run: Path, checkpoint: Checkpoint) -> list[str]:
        """The arguments with which its launcher goes on from `checkpoint` as it is; none where the
        trainer takes no values from its command line."""
        return []


def loaded(option: str, path: Path) -> list[str]:
    """The option that names what is loaded. None in a bucket: trainers have addresses of their own,
    and those that do not know an address as it is written begin anew."""
    return [option, str(path)] if reads.key(path) is None else []
