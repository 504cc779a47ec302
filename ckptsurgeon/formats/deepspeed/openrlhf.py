"""OpenRLHF on DeepSpeed: what lies beside its checkpoints, and what its clean-up makes of that.

Source: `save_ckpt` in `utils/deepspeed/deepspeed.py` of OpenRLHF 0.11.2. It leaves `metric.json` in
each checkpoint, and removes folders without one first. `trainer/ray/ppo_actor.py` and its siblings
have the names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import first_few
from ckptsurgeon.files.one_look import once
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats.step_folders import folders_in
from ckptsurgeon.transaction.home import HOME

METRIC = "metric.json"
KEYS = {"metric_key", "metric_value"}
MORE = re.compile(r"global_step(\d+)_hf|best_global_step(\d+)(?:_hf)?")
"""The weights of a step for Hugging Face, which no restart loads; and a save of a step of its own,
where an evaluation was the best so far, that the clean-up ranks among all."""
ROLES = {"_actor": "_critic", "_critic": "_actor"}
"""Of PPO: the folders of two engines, each with steps and a `latest` of its own."""


@once
def more(folder: Path) -> dict[int, list[Path]]:
    """What else was written of steps, by their numbers, ascending."""
    found: dict[int, list[Path]] = {}
    for name in folders_in(folder):
        if match := MORE.fullmatch(name):
            found.setdefault(int(match[1] or match[2]), []).append(folder / name)
    return dict(sorted(found.items()))


def beside(run: Path, step: int) -> Iterator[str]:
    """What a rollback to `step` leaves outside of the run of one engine of PPO."""
    if run.name not in ROLES:
        return
    other = run.with_name(ROLES[run.name])
    if disk.is_folder(other):
        yield f"{other} has steps and a latest of its own, which stay: roll it back, too"
    listed = more(run.parent).items()
    if later := [path.name for number, paths in listed if number > step for path in paths]:
        yield f"exports of later steps stay in {run.parent}: {first_few(later)}"


def notes(step: Path) -> Iterator[str]:
    """What its next saves do to the undo of a surgery. Nothing of a step that it did not save."""
    try:
        saved = json.loads(text(step / METRIC) or "{}")
    except (ValueError, RecursionError):
        return
    if isinstance(saved, dict) and saved.keys() == KEYS:
        yield (
            f"OpenRLHF takes {HOME} for a checkpoint, and its clean-up removes it with all that "
            "undo needs: relaunch with --ckpt.max_num 1000 for as long as this may be undone"
        )
