"""Starts Composer's own Trainer (`composer_trainer.py`) and reads what its updates used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.launch import by_step
from tests.support.newest_megatron import beside

needed = pytest.mark.skipif(
    not beside("composer").is_dir(), reason="make test-formats installs Composer"
)


def train(folder: object, stop: int, *words: str, ranks: int = 1, **options: Any) -> dict[int, Any]:
    """To batch `stop`, from where the Trainer resumes by itself: what each update used. `options`
    are those of the Trainer."""
    told = (folder, stop, *words, "--options", json.dumps(options))
    return by_step("tests.support.composer_trainer", *told, ranks=ranks)
