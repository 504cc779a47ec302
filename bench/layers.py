"""The kernels of the model's layers against eager torch, forward and backward, in pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.pairs import ratios, summary
from bench.process import python
from bench.row import Row, ratio

# Kernel, what it is measured on, the least it must reach.
TIMED = (
    ("bias_gelu", "bias_gelu, 1024 x 1024, forward and backward", 1.7),
    ("bias_gelu-large", "bias_gelu, 8192 x 1024 (32 MB)", None),
    ("add_norm", "bias_dropout_add_layer_norm, 1024 x 1024, forward and backward", 1.25),
    ("add_norm-large", "bias_dropout_add_layer_norm, 8192 x 1024 (32 MB)", None),
    ("add_norm-dropout", "the same with dropout 0.1, 1024 x 1024", None),
    ("loss", "linear_cross_entropy, 2048 x 512, V 50304, forward and backward", 1.1),
    ("softmax", "causal_softmax, [4, 4, 256, 256]", 2.5),
    ("softmax-long", "causal_softmax, [2, 8, 1024, 1024]", 2.5),
)


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Times on all cores in one process; the memory of the loss in two."""
    rounds = 3 if quick else 15
    rows = []
    for name, what, target in TIMED:
        answer = python("bench.layer_times", name, rounds).answer
        median, low, high = summary(ratios(answer["eager"], answer["ours"]))
        least = min(answer["eager"]), min(answer["ours"])
        note = f"[{low:.2f}, {high:.2f}]  {least[0] * 1e3:.3g} / {least[1] * 1e3:.3g} ms"
        rows.append(ratio(what, median, target, note))
        say(f"{name} {median:.2f}")
    eager, ours = (
        python("bench.layer_times", "memory", kind).answer["mb"] for kind in ("eager", "ours")
    )
    note = f"{ours:.0f} / {eager:.0f} MB"
    rows.append(Row("linear_cross_entropy, peak memory of it", ours / eager, "", 1 / 3, note=note))
    return rows
