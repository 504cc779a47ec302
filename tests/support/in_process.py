"""Training inside the test's own process: no launch, so that every option can be tried."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.launch import REPO
from train import distributed, run_folder
from train.config import load_config

TINY = REPO / "train" / "configs" / "tiny.yaml"


@cache
def freeze_imports() -> None:
    """Once: modules are no garbage, for which DeepSpeed looks at each of its starts in bf16."""
    gc.freeze()


@contextmanager
def one_rank() -> Iterator[Any]:
    """A process group of this process alone; the environment is as it was afterwards, so that
    trainers launched later do not join it. Yields torch's device."""
    before = dict(os.environ)
    distributed.complete_environment()
    try:
        yield distributed.start(1)
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass
class InProcess:
    """Runs of the trainer in this process, on one rank."""

    corpus: Path
    device: Any
    said: list[str] = field(default_factory=list)

    def prepare(self, root: Path, *overrides: str) -> Any:
        """A Training that resumes when the run has a checkpoint, else starts fresh."""
        from train import trainer

        freeze_imports()
        config = load_config(TINY, [f"save={root}", f"data={self.corpus}", *overrides])
        fresh = not (root / run_folder.LATEST).exists()
        return trainer.prepare(config, run_folder.find_checkpoint(root, fresh), self.device)

    def train(self, root: Path, *overrides: str) -> dict[int, str]:
        """Iteration -> loss, in the digits that are printed; `said` has all lines."""
        from train import trainer

        training = self.prepare(root, *overrides)
        self.said = [trainer.first_line(training)]
        trainer.announce(training, self.said.append)
        trainer.train(training, self.said.append)
        found = re.findall(r"iteration +(\d+)/.*\| lm loss: (\S+) \|", "\n".join(self.said))
        return {int(iteration): loss for iteration, loss in found}

    def resumed_line(self, root: Path, *overrides: str) -> str:
        """The first line of a process that resumes now; it trains nothing."""
        from train import trainer

        return trainer.first_line(self.prepare(root, *overrides))
