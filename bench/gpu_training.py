"""Tokens/s, MFU and memory of the trainer at 1.3 B, a process a variant, the most telling first.

Usage: python -m bench.gpu_training [NAME…] [--small]   all variants but those named
   or: python -m bench.gpu_training one NAME FOLDER KEY=VALUE…   one of them
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.process import REPO
from bench.stepper import ENDLESS

MODEL = {
    "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048,
    "vocab_size": 50304, "dtype": "bf16", "zero_stage": 1, "micro_batch_size": 8,
    "global_batch_size": 8, "threads": 8,
}  # fmt: skip
TINY = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 64,
    "vocab_size": 512, "micro_batch_size": 2, "global_batch_size": 2, "threads": 1,
}  # fmt: skip
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""bf16 without sparsity, from NVIDIA's data sheets."""
VARIANTS = {
    "default": (),
    "micro-batch of 16": ("micro_batch_size=16", "global_batch_size=16"),
    "BLOOM's vocabulary": ("vocab_size=250880",),
    "torch's own layers": ("kernels=never",),
    "BLOOM's vocabulary, torch's own layers": ("vocab_size=250880", "kernels=never"),
    "torch.compile": ("compile=true",),
    "8 micro-batches": ("global_batch_size=64",),
    "recomputed": ("checkpoint_activations=true",),
    "cuDNN attention": (),
    "DeepSpeed's own step": ("fused_optimizer=never",),
    "ZeRO 0": ("zero_stage=0",),
}
WARM_UP, COUNTED = 5, 12


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        one(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
        return
    small, failed = "--small" in sys.argv, 0
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        for name, overrides in list(VARIANTS.items())[: 2 if small else None]:
            if name in sys.argv[1:]:
                continue
            words = [f"{key}={value}" for key, value in TINY.items()] if small else []
            command = ["bench.gpu_training", "one", name, folder, *words, *overrides]
            done = subprocess.run(
                [sys.executable, "-m", *command], cwd=REPO, capture_output=True, text=True,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            said = json.dumps({"failed": name, "said": done.stderr[-500:]})
            print(lines[-1] if lines else said, flush=True)
            failed += not lines
    sys.exit(failed)


def write_corpus(folder: Path) -> None:
    import numpy as np

    from train.indexed_dataset import IndexedDatasetWriter

    tokens = np.random.default_rng(0).integers(0, 512, 4_000_000)
    with IndexedDatasetWriter(folder / "corpus", 50304) as writer:
        writer.add_document(tokens)
    lines = [f"{key}: {value}" for key, value in {**MODEL, **ENDLESS}.items()]
    (folder / "bench.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def one(name: str, folder: Path, overrides: list[str]) -> None:
    """Train some iterations of one variant, and print what they took."""
    import torch

    from train import distributed
    from train.config import load_config

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not answer
    distributed.complete_environment()
    paths = [f"save={folder / 'run'}", f"data={folder / 'corpus'}"]
    config = load_config(folder / "bench.yaml", [*paths, *overrides])
    device = distributed.start(config.threads)
    if name == "cuDNN attention" and device.type == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        sdpa_kernel(SDPBackend.CUDNN_ATTENTION).__enter__()
    from train import trainer  # after `start`, which chooses DeepSpeed's accelerator

    training = trainer.prepare(config, None, device)
    counted = 1 if device.type == "cpu" else COUNTED
    reports = [
        trainer.iteration(training, config.global_batch_size)
        for _ in range((1 if device.type == "cpu" else WARM_UP) + counted)
    ]
    seconds = statistics.median(report.seconds for report in reports[-counted:])
    tokens = config.global_batch_size * config.seq_length
    matrices = training.parameters - config.seq_length * config.hidden_size
    flops = 6 * matrices + 12 * config.num_layers * config.hidden_size * config.seq_length
    on_gpu = device.type == "cuda"
    known = [peak for gpu, peak in PEAKS.items() if on_gpu and gpu in torch.cuda.get_device_name()]
    answer = {
        "what": name,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": flops * tokens / seconds / known[0] if known else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": [report.loss for report in reports[:3]],
    }
    print(json.dumps(answer), file=answers)
    distributed.finish()


if __name__ == "__main__":
    main()
