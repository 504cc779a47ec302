"""The flags with which a trainer that is not the bundled one goes on from its checkpoint as it is.

Its loader asserts that the command line says what the file says, or computes from the command line
alone; either way a launch script from before the surgery is wrong.
"""

from __future__ import annotations

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.advice import Advice
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.run.run import Run


def takes_flags(run: Run) -> bool:
    """Whether its launcher takes values from flags. Opens the latest step of a format of which some
    trainers do; False for one that can't be read."""
    if type(run.format).launch_flags is Advice.launch_flags:
        return False
    try:
        return bool(run.format.launch_flags(run.root, run.checkpoint(run.latest())))
    except SurgeryError:
        return False


def launch_flags(run: Run) -> list[str]:
    """Arguments to add to the launch of the latest step, values as the checkpoint has them.

    Raises SurgeryError for a trainer that takes its values from elsewhere."""
    checkpoint = run.checkpoint(run.latest())
    flags = run.format.launch_flags(run.root, checkpoint)
    if not flags:
        read = command("verify", "--log", "FILE")
        start: Hint = f"restart its trainer with the same command; then {read} reads its output"
        if run.launchable:
            start = command("relaunch", why="starts it by the command of this run")
        raise SurgeryError(
            f"this trainer ({checkpoint.state().dialect}) has no launch flags that are known here",
            next=(
                start,
                command(
                    "show",
                    why="what its checkpoint keeps; a plan says which keys of its "
                    "config must follow",
                ),
            ),
        )
    return flags
