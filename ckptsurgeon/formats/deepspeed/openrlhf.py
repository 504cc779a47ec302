"""OpenRLHF on DeepSpeed, whose clean-up takes each folder beside its checkpoints for one of them.

Source: `save_ckpt` in `utils/deepspeed/deepspeed.py` of OpenRLHF 0.11.2. It leaves `metric.json` in
each checkpoint, and removes folders without one first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ckptsurgeon.files.text_file import text
from ckptsurgeon.transaction.home import HOME

METRIC = "metric.json"
KEYS = {"metric_key", "metric_value"}


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
