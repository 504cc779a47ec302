"""Tokens per second of the whole trainer: with the fused kernels, in eager torch, compiled.

Three trainers take their iterations in turn, so that other load on the machine meets all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.process import REPO
from bench.row import Row, ratio
from bench.stepper import MODEL, write_corpus

THREADS = 2
TOKENS = MODEL["global_batch_size"] * MODEL["seq_length"]


class Trainer:
    """A trainer in a process of its own, which waits between iterations."""

    def __init__(self, folder: Path, kernels: str, *overrides: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.stepper", str(folder), str(THREADS), *overrides],
            cwd=REPO,
            env={
                **os.environ,
                "CKPTSURGEON_KERNELS": kernels,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": str(THREADS),
                "THP_MEM_ALLOC_ENABLE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def iterate(self) -> dict[str, Any]:
        """Train one iteration; its `seconds` and `loss`. Raises RuntimeError if it has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the trainer died: {' '.join(map(str, self._process.args))}")
        return dict(json.loads(answer))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """The median ratio of pairs of iterations; a difference in the first losses is an error."""
    write_corpus(folder, 512 if quick else MODEL["vocab_size"])
    with (
        Trainer(folder, "require") as ours,
        Trainer(folder, "off") as eager,
        Trainer(folder, "off", "compile=true") as compiled,
    ):
        trainers = {"ours": ours, "eager": eager, "compiled": compiled}
        first = {name: trainer.iterate()["loss"] for name, trainer in trainers.items()}
        say(f"first loss {first}")
        if max(first.values()) - min(first.values()) > 5e-6 * first["eager"]:
            raise RuntimeError(f"the losses differ: {first}")
        times: dict[str, list[float]] = {name: [] for name in trainers}
        for turn in range(3 if quick else 25):
            for name, trainer in trainers.items():
                seconds = trainer.iterate()["seconds"]
                if turn:  # once more, to warm up
                    times[name].append(seconds)
            say(", ".join(f"{name} {seen[-1]:.2f} s" for name, seen in times.items() if seen))
    rows = []
    for name, target, what in (("eager", 1.3, "eager torch"), ("compiled", 1.1, "torch.compile")):
        pairs = [other / own for other, own in zip(times[name], times["ours"], strict=True)]
        best = TOKENS / min(times["ours"]), TOKENS / min(times[name])
        note = f"[{min(pairs):.2f}, {max(pairs):.2f}]  {best[0]:,.0f} / {best[1]:,.0f} tokens/s"
        median = sorted(pairs)[len(pairs) // 2]
        rows.append(ratio(f"trainer, h256 L6 V50304, against {what}", median, target, note))
    return rows
