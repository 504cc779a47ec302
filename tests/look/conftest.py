"""What the tests of vital signs share: a real engine's run, and what is found in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import Run, look
from tests.conftest import once

LAST, EARLIER = 240, 200


def facts(root: Path, step: int | None = None, against: int | None = None) -> tuple[str, ...]:
    """What the vital signs of a step say against it."""
    return look.verify(Run.open(root), step, level=4, against=against).findings


@pytest.fixture(scope="session")
def engines(shared: Path) -> Path:
    """A bf16 run of a real engine; every step around the last two is saved. Nobody changes it."""
    from tests.support import deepspeed_engine

    def train(folder: Path) -> None:
        with deepspeed_engine.process_group():
            engine = deepspeed_engine.build(deepspeed_engine.Options(dtype="bf16", model="wide"))
            for step in (*range(1, 7), EARLIER, *range(LAST - 2, LAST + 1)):
                deepspeed_engine.train(engine, step - engine.global_steps)
                client = deepspeed_engine.client(step)
                engine.save_checkpoint(str(folder / "run"), client_state=client)

    return once(shared / "vitals", train) / "run"
