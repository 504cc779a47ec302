"""A run whose heads share keys over two tensor ranks, and what the weights say of its logits."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import HasHeads
from ckptsurgeon.formats.tensors.logits import Logits, logits
from ckptsurgeon.formats.tensors.stretches import by_parameter
from tests.support.launch import launch


def train_shared_keys(root: Path, corpus: Path) -> None:
    """Two tensor ranks, each with two heads of one key; step 2 is saved."""
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "train_iters=2", "tensor_model_parallel_size=2", "num_attention_heads=4",
        "num_query_groups=2", "dtype=bf16", ranks=2,
    )  # fmt: skip


def logits_of(checkpoint: Checkpoint) -> list[Logits]:
    """Of every head of every layer."""
    layers, _ = HasHeads.of(checkpoint).attention()
    return list(logits(checkpoint, by_parameter(checkpoint.parts()), layers))
