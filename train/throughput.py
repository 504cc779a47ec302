"""How fast a run is, and how much of the device it uses."""

from __future__ import annotations

import resource

import torch

from .log import Report
from .training import Training

PEAKS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0}
"""TFLOP/s of bf16 without sparsity, from NVIDIA's data sheets."""


def flops_per_token(training: Training) -> int:
    """Of forward and backward pass, as PaLM counts (Chowdhery et al. 2022, appendix B): 6 for each
    weight of a matrix, the head's among them, and 12 layers x width x length for attention. What is
    computed again counts once."""
    config = training.config
    head = 6 * config.padded_vocab_size * config.hidden_size
    attention = 12 * config.num_layers * config.hidden_size * training.length()
    return training.flops_per_token + head + attention


def throughput_line(report: Report, training: Training, ranks: int) -> str:
    """One line in the form of Megatron's: tokens/s of all ranks; TFLOP/s and their share of the
    peak, and memory, of this one."""
    tokens = report.batch_size * training.length() / report.seconds
    tflops = tokens * flops_per_token(training) / ranks / 1e12
    line = f" tokens per second: {tokens:.1f} | TFLOP/s per rank: {tflops:.3f} |"
    peak = peak_tflops(training)
    if peak is not None:
        line += f" MFU: {100 * tflops / peak:.1f} % |"
    return f"{line} peak memory (GiB): {peak_memory(training.device) / 2**30:.3f} |"


def peak_tflops(training: Training) -> float | None:
    """What the config says or the data sheet of this GPU; None where neither is known."""
    if training.config.peak_tflops is not None or training.device.type != "cuda":
        return training.config.peak_tflops
    name = torch.cuda.get_device_name(training.device)
    return next((peak for gpu, peak in PEAKS.items() if gpu in name), None)


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors took on a GPU, or this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
