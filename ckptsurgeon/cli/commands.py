"""The one table of commands: name, where it is, its line in `--help`, and its exit codes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ckptsurgeon import operations
from ckptsurgeon.operations import Operation
from ckptsurgeon.plans.frozen import frozen

EXIT_CODES = {
    0: "done, or nothing to do",
    1: "failed or declined; the run is exactly as it was",
    2: "wrong usage; the run is exactly as it was",
    3: "diff, or with --exit-code: there are changes; advise, watch: the run needs you",
    4: "verification failed; the message says what differs",
    5: "an interrupted surgery is waiting: ckptsurgeon recover",
    130: "Ctrl-C before the commit point; the run is exactly as it was",
}
LOOKS = (0, 1, 2)
LOOKS_FOR_CHANGES = (*LOOKS, 3)
PLANS = (*LOOKS, 3, 5)
EDITS = (*LOOKS, 4, 5, 130)
WRITES = (*LOOKS, 5, 130)
UNLOCKS = (*LOOKS, 130)
LOOKS_IN_BUCKETS = ("status", "show", "log", "verify", "doctor", "diff", "advise", "report")
OUT_OF_BUCKETS = ("export", "fork", "relaunch")
"""Those that only read the run, and write elsewhere; `relaunch` only prints flags."""
EDITS_IN_BUCKETS = (
    "rollback", "repair-latest", "set", "set-lr", "cooldown", "reset", "skip", "truncate-logs",
    "truncate-tb-events", "undo", "redo", "recover",
)  # fmt: skip
"""Those that tests hold to what they do on a disk. All go through one transaction, which is killed
with rollbacks, cuts, `set`, `reset` and undo, and meets bad servers with `set-lr` and undo."""
IN_BUCKETS = (*LOOKS_IN_BUCKETS, *OUT_OF_BUCKETS, *EDITS_IN_BUCKETS)
"""Commands whose run may lie in a bucket."""


@frozen
class Command:
    """`place` is `module:function` in this package, or the operation whose command it is. Neither
    is imported before the command is asked for."""

    name: str
    place: str | Operation
    help: str
    codes: tuple[int, ...]
    more: str = ""

    @property
    def changes(self) -> bool:
        """Whether it changes something on disk, and --dry-run shows what."""
        return 130 in self.codes

    def function(self) -> Callable[..., None]:
        """What carries it out; its docstring ends with its examples."""
        if isinstance(self.place, Operation):
            from ckptsurgeon.cli.carry_out import one_liner

            return one_liner(self.place, self.name)
        module, _, name = self.place.partition(":")
        function: Callable[..., None] = getattr(import_module(f"{__package__}.{module}"), name)
        return function


BEFORE = (
    Command(
        "status",
        "look:status",
        "Show the run: steps, pointers, values, events, last surgery.",
        LOOKS,
    ),
    Command("show", "look:show", "Show one checkpoint: each field and all its places.", LOOKS),
    Command("log", "look:log", "List the surgeries of this run, newest first.", LOOKS),
    Command("verify", "look:verify", "Check one step and say what is wrong with it.", (*LOOKS, 4)),
    Command(
        "doctor", "look:doctor", "Say what is wrong with the run, and what to do.", (*LOOKS, 4)
    ),
    Command(
        "diff",
        "diff:diff",
        "Compare two steps or two runs, or a run before and after a surgery.",
        LOOKS_FOR_CHANGES,
    ),
    Command(
        "advise", "advise:advise",
        "Say if the loss diverged, where to go back to, and what others did.",
        LOOKS_FOR_CHANGES,
    ),
    Command(
        "report", "picture:picture",
        "Plot the run's history: what was kept, what was abandoned, and why.",
        LOOKS,
    ),
    Command("plan", "recipes:plan", "Show what a recipe would change, and change nothing.", PLANS),
    Command("apply", "recipes:apply", "Carry out a recipe or a saved plan.", EDITS),
    Command("undo", "recipes:undo", "Restore the bytes from before a surgery.", EDITS),
    Command("redo", "recipes:redo", "Take back an undo: the surgery is in force again.", EDITS),
    Command("recover", "recipes:recover", "Finish or discard an interrupted surgery.", EDITS),
)  # fmt: skip
AFTER = (
    Command(
        "ready", "ready:ready", "Say if what the next start loads is sound; start a command if so.",
        (*LOOKS, 4, 5, 130), "otherwise the exit status of the command that it has become",
    ),
    Command(
        "relaunch", "launch:relaunch", "Start the trainer and check its first line.",
        (*LOOKS, 4, 5, 130), "otherwise the trainer's exit status",
    ),
    Command(
        "watch", "watch:watch", "Follow a run, and do by a policy what its trouble needs.",
        (*LOOKS_FOR_CHANGES, 4, 5, 130),
    ),
    Command("fork", "fork:fork", "Make a new run from one step, in a directory of its own.", EDITS),
    Command("export", "export:export", "Write the weights of one step as safetensors.", WRITES),
    Command(
        "draft-format", "draft_format:draft_format",
        "Draft a description of a trainer that is not known.", (*LOOKS, 130),
    ),
    Command(
        "check-format", "check_format:check_format",
        "Try a description of a trainer on a copy of its latest step.", (*LOOKS, 4, 130),
    ),
    Command(
        "check-optimizer", "check_optimizer:check_optimizer",
        "Describe an optimizer by running it, and prove the description.", (*LOOKS, 4, 130),
    ),
    Command("compact", "attic:compact", "Rewrite edited shards without dead bytes.", EDITS),
    Command("shrink", "attic:shrink", "Rewrite shards that were saved with unused bytes.", EDITS),
    Command("prune", "attic:prune", "Delete what past surgeries keep in the attic.", WRITES),
    Command(
        "unlock", "attic:unlock", "Remove the lock of a surgery that died on another machine.",
        UNLOCKS,
    ),
)  # fmt: skip


def commands() -> dict[str, Command]:
    """Every command by its name, in the order in which `--help` lists them."""
    one_liners = [
        Command(name, operation, help, EDITS)
        for operation in operations.OPERATIONS
        for name, help in operation.commands.items()
    ]
    return {command.name: command for command in (*BEFORE, *one_liners, *AFTER)}


def exit_codes(codes: tuple[int, ...], more: str = "") -> str:
    """Exit codes as `--help` shows them."""
    rows = [f"  {code:<4} {EXIT_CODES[code]}" for code in codes]
    return "\n".join(["\b", "Exit codes:", *rows, *([f"  {more}"] if more else [])])


def examples(function: Callable[..., None]) -> list[str]:
    """The commands below `Examples:` in the docstring of a command."""
    _, _, lines = (function.__doc__ or "").partition("Examples:\n")
    return [line.strip() for line in lines.splitlines() if line.strip()]
