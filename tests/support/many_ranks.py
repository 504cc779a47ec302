"""Several trainings one after another on the same ranks: one launch and one import for all."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.launch import REPO, run_module

UNIVERSAL = "--universal"
TINY = REPO / "train" / "configs" / "tiny.yaml"


@dataclass(frozen=True)
class Ran:
    """What one training said: its first line, and the loss of each iteration."""

    line: str
    losses: dict[int, float]


def run_all(ranks: int, jobs: Mapping[str, Sequence[str]], folder: Path) -> dict[str, Ran]:
    """Train every job on `ranks` processes: name → overrides, `save=` among them.

    A job resumes when its run has a checkpoint, or its universal form with `--universal`.
    Nothing is mocked: only the launch is shared."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, told = folder / "jobs.json", folder / "ran.json"
    asked.write_text(json.dumps({name: list(job) for name, job in jobs.items()}))
    run_module("tests.support.many_ranks", asked, told, ranks=ranks)
    return {
        name: Ran(line, {int(i): loss for i, loss in losses.items()})
        for name, (line, losses) in json.loads(told.read_text()).items()
    }


def losses(said: Sequence[str]) -> dict[int, float]:
    """Iteration → loss, from the lines of a trainer."""
    found = re.findall(r"iteration +(\d+)/.*\| lm loss: (\S+) \|", "\n".join(said))
    return {int(iteration): float(loss) for iteration, loss in found}


def train_one(overrides: Sequence[str], device: Any) -> tuple[str, dict[int, float]]:
    """On every rank: one training to its end, its first line and its losses."""
    from train import trainer
    from train.config import load_config
    from train.run_folder import LATEST, find_checkpoint
    from train.universal_source import find_universal

    config = load_config(TINY, [item for item in overrides if item != UNIVERSAL])
    root = Path(config.save)
    checkpoint = find_checkpoint(root, not (root / LATEST).exists())
    if UNIVERSAL in overrides and checkpoint is not None:
        checkpoint = find_universal(checkpoint)
    training = trainer.prepare(config, checkpoint, device)
    said: list[str] = []
    line = trainer.first_line(training)
    trainer.train(training, said.append)
    return line, losses(said)


def main() -> None:
    """On every rank: all jobs, then what they said as JSON, written by rank 0."""
    from deepspeed.utils import groups

    from train import distributed

    device = distributed.start(1)
    ran = {}
    for name, overrides in json.loads(Path(sys.argv[1]).read_text()).items():
        groups.mpu = None  # DeepSpeed remembers the groups of the engine before
        ran[name] = train_one(overrides, device)
    if distributed.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(ran))
    distributed.finish()


if __name__ == "__main__":
    main()
