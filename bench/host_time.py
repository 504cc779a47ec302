"""The trainer's work on the host, for a model that has next to nothing to compute.

Times iterations of the trainer and of a bare loop over the same model in turns, and prints their
CPU seconds as JSON. Usage: python -m bench.host_time FOLDER ROUNDS [KEY=VALUE…]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.pairs import seconds
from bench.stepper import write_corpus
from train import distributed
from train.config import load_config

MODEL = {
    "num_layers": 24, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8,
    "vocab_size": 128, "micro_batch_size": 1, "global_batch_size": 1,
}  # fmt: skip


def bare(config: Any, tokens: Tensor, targets: Tensor) -> Callable[[], object]:
    """The loop that every tutorial has: bf16 weights, clipping, AdamW, the loss read once."""
    from train.model import GPT

    model = GPT(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def iterate() -> float:
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return iterate


def main() -> None:
    folder, rounds, overrides = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not answer
    write_corpus(folder, MODEL)
    distributed.complete_environment()
    paths = [f"save={folder / 'run'}", f"data={folder / 'corpus'}", "dtype=bf16"]
    config = load_config(folder / "bench.yaml", [*paths, *overrides])
    device = distributed.start(config.threads)
    from train import trainer  # after `start`, which chooses DeepSpeed's accelerator
    from train.kernels import choose
    from train.loader import Part

    training = trainer.prepare(config, None, device)
    iterate = bare(config, *training.loader.take(Part(0, 1, config.seq_length)))

    def plain() -> None:
        choose("never")
        iterate()
        choose(config.kernels)

    functions = {"bare": plain, "trainer": lambda: trainer.iteration(training, 1)}
    print(json.dumps(seconds(functions, rounds)), file=answers)
    distributed.finish()


if __name__ == "__main__":
    main()
