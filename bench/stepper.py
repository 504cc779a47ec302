"""Trains one iteration for each line on stdin and answers with its time: a trainer to be paced.

Usage: python -m bench.stepper FOLDER THREADS KEY=VALUE…   (FOLDER is made by `write_corpus`)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from train import distributed
from train.config import Config, load_config
from train.indexed_dataset import IndexedDatasetWriter

# A vocabulary of GPT-2's size on a small body: the output matrix is most of the work.
LARGE_VOCABULARY = {
    "num_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 256,
    "vocab_size": 50304,
    "global_batch_size": 4,
    "micro_batch_size": 4,
}
# Bytes for tokens: the matrices of the layers are most of the work.
BYTES = {
    **LARGE_VOCABULARY,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "vocab_size": 256,
    "global_batch_size": 8,
    "micro_batch_size": 8,
}
ENDLESS = {
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "save_interval": 10**6,
    "train_iters": 10**6,
}


def write_corpus(folder: Path, model: Mapping[str, int]) -> None:
    """Random tokens for this model, and the config that trains it on them."""
    tokens = np.random.default_rng(0).integers(0, model["vocab_size"], 300_000)
    with IndexedDatasetWriter(folder / "corpus", model["vocab_size"]) as writer:
        writer.add_document(tokens)
    lines = [f"{key}: {value}" for key, value in {**model, **ENDLESS}.items()]
    (folder / "bench.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def begin(folder: Path, *overrides: str) -> tuple[TextIO, Config, torch.device]:
    """Standard output as the place of answers, the config in `folder` and the device; what
    libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    distributed.complete_environment()
    paths = [f"save={folder / 'run'}", f"data={folder / 'corpus'}"]
    config = load_config(folder / "bench.yaml", [*paths, *overrides])
    return answers, config, distributed.start(config.threads)


def main() -> None:
    folder, threads, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    answers, config, device = begin(folder, f"threads={threads}", *overrides)
    from train import trainer  # after `begin`, which chooses DeepSpeed's accelerator

    training = trainer.prepare(config, None, device)
    for _ in sys.stdin:
        report = trainer.iteration(training, config.global_batch_size)
        print(json.dumps({"seconds": report.seconds, "loss": report.loss}), file=answers)
    distributed.finish()


if __name__ == "__main__":
    main()
