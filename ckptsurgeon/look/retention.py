"""Whether as many steps are left as the trainer's own config keeps. Reads only."""

from __future__ import annotations

from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files import json_text, plain_yaml
from ckptsurgeon.files.pickles.tree import Object
from ckptsurgeon.formats.fields.constants import TRAINER_STATE
from ckptsurgeon.formats.huggingface.later_rates import arguments
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.run.run import CONFIG, Run


def few(run: Run, step: int) -> list[Finding]:
    """A finding where something else than the trainer removed steps: it has saved often enough
    since the lowest one on disk, and fewer are there than it keeps. Nothing is said where no config
    in the run says how many it keeps and how often it saves. An interval that was made shorter
    lately may look the same."""
    try:
        kept, each = _of_config(run) or _of_arguments(run, step) or (0, 0)
    except (SurgeryError, OSError, ValueError):  # what can't be read is found by others
        return []
    saved = [number for number in run.steps() if number <= step]
    if kept < 2 or each < 1 or len(saved) >= kept or saved[0] + (kept - 1) * each > step:
        return []
    listed = ", ".join(map(str, saved))
    what = f"the trainer keeps {count(kept, 'step')} and saves every {each}: "
    what += f"of those up to {step} only {listed} {'is' if len(saved) == 1 else 'are'} left"
    next = f"find out what else removes them: no rollback goes back further than to {saved[0]}"
    return [Finding(what, next)]


def _of_config(run: Run) -> tuple[int, int] | None:
    """How many steps the bundled trainer keeps, and how often it saves one."""
    path = run.root / CONFIG
    config = plain_yaml.read(path) if disk.is_file(path) else {}
    return _numbers(config.get("keep_last"), config.get("save_interval"))


def _of_arguments(run: Run, step: int) -> tuple[int, int] | None:
    """The same of transformers' Trainer, by what it saved of its arguments. It may keep the best
    step in place of one of the newest."""
    folder = run.format.directory(run.root, step)
    given = arguments(folder)
    if _word(given.get("save_strategy")) != "steps":
        return None
    each = json_text.mapping(folder / TRAINER_STATE).get("save_steps")
    found = _numbers(given.get("save_total_limit"), each)
    if found is None or not given.get("load_best_model_at_end"):
        return found
    return found[0] - 1, found[1]


def _word(value: Any) -> Any:
    """What a member of an enumeration stands for."""
    return value.args[0] if isinstance(value, Object) and value.args else value


def _numbers(kept: Any, each: Any) -> tuple[int, int] | None:
    return (kept, each) if type(kept) is int and type(each) is int else None
