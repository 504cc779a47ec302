"""What the trainer's signals cost beside a step: the norm of the activations, and the events.

What the fused optimizer counts in its one pass (zeros, norms, the update) has no call of its own to
be timed; `kernels` measures the whole pass. Usage: python -m bench.signals FOLDER ROUNDS
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bench.pairs import seconds
from bench.process import python
from bench.row import Row
from bench.stepper import BYTES, begin, write_corpus
from train import distributed

LIMIT = 0.01


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Medians of CPU time, as a share of the time of a step."""
    own = folder / "signals"
    own.mkdir()
    times = python("bench.signals", own, 3 if quick else 20).answer
    step, norm, with_them, without = (
        statistics.median(times[name]) for name in ("step", "norm", "events", "fewer events")
    )
    cost = norm + with_them - without
    note = f"{norm * 1e3:.2f} ms the norm, {(with_them - without) * 1e3:.2f} ms the events, of "
    say(f"{cost / step:.4f}")
    return [
        Row("signals, h384 L6 V256: share of a step", cost / step, "", LIMIT,
            note=f"{note}{step * 1e3:.0f} ms")
    ]  # fmt: skip


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    write_corpus(folder, BYTES)
    answers, config, device = begin(folder, "dtype=bf16")
    from train import trainer  # after `begin`, which chooses DeepSpeed's accelerator
    from train.activation_norm import ActivationNorm
    from train.log import EventLog

    training = trainer.prepare(config, None, device)
    report = trainer.iteration(training, config.global_batch_size)
    fewer = replace(report, activation_norm=None, clipped=None, statistics=None)
    events, layer = EventLog(folder), nn.Identity()
    activations = ActivationNorm(layer, device)
    handed_on = torch.randn(
        config.micro_batch_size, config.seq_length, config.hidden_size, dtype=torch.bfloat16
    )

    def norm() -> None:
        for _ in range(config.global_batch_size // config.micro_batch_size):
            layer(handed_on)
        activations.take()

    functions = {
        "step": lambda: trainer.iteration(training, config.global_batch_size),
        "norm": norm,
        "events": lambda: events.iteration(report, training.progress),
        "fewer events": lambda: events.iteration(fewer, training.progress),
    }
    print(json.dumps(seconds(functions, rounds)), file=answers)
    distributed.finish()


if __name__ == "__main__":
    main()
