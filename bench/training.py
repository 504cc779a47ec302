"""Tokens per second of the whole trainer: with the fused kernels, in eager torch, compiled; in
bf16 and in fp32.

The trainers take their iterations in turn, so that other load on the machine meets all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.pairs import ratios, summary
from bench.process import REPO
from bench.row import Row, ratio
from bench.stepper import BYTES, LARGE_VOCABULARY, write_corpus

THREADS = 2


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
            raise RuntimeError(f"the trainer died: {self._process.args!r}")
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
    """The median ratios of pairs of iterations, of two models."""
    turns = 3 if quick else 25
    rows = []
    model = {**LARGE_VOCABULARY, "vocab_size": 512} if quick else LARGE_VOCABULARY
    kinds = {"ours": ("require",), "eager": ("off",), "compiled": ("off", "compile=true")}
    times = _take_turns(folder / "large-vocabulary", model, kinds, turns, 5e-6, say)
    for name, target, what in (("eager", 1.3, "eager torch"), ("compiled", 1.1, "torch.compile")):
        row = f"trainer, h256 L6 V50304, against {what}"
        rows.append(_row(row, times[name], times["ours"], model, target))
    kinds = {"bf16": ("require", "dtype=bf16"), "fp32": ("require", "dtype=fp32")}
    times = _take_turns(folder / "bytes", BYTES, kinds, turns, 1e-2, say)
    row = "trainer, h384 L6 V256, bf16 against fp32"
    rows.append(_row(row, times["fp32"], times["bf16"], BYTES, 1.4))
    return rows


def _take_turns(
    folder: Path,
    model: Mapping[str, int],
    kinds: Mapping[str, Sequence[str]],
    turns: int,
    rounding: float,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """Seconds of the iterations of a trainer of each kind (its kernels, and keys of its config),
    but of the first two. Raises RuntimeError if the first losses differ by more than `rounding`."""
    folder.mkdir()
    write_corpus(folder, model)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        trainers = {
            name: stack.enter_context(Trainer(folder, kernels, *overrides))
            for name, (kernels, *overrides) in kinds.items()
        }
        first = {name: trainer.iterate()["loss"] for name, trainer in trainers.items()}
        say(f"first loss {first}")
        if max(first.values()) - min(first.values()) > rounding * max(first.values()):
            raise RuntimeError(f"the losses differ: {first}")
        for turn in range(turns):
            for name, trainer in trainers.items():
                seconds = trainer.iterate()["seconds"]
                if turn:  # once more, to warm up
                    times[name].append(seconds)
            say(", ".join(f"{name} {seen[-1]:.2f} s" for name, seen in times.items() if seen))
    return times


def _row(
    what: str, slow: list[float], fast: list[float], model: Mapping[str, int], target: float
) -> Row:
    median, least, most = summary(ratios(slow, fast))
    tokens = model["global_batch_size"] * model["seq_length"]
    note = f"[{least:.2f}, {most:.2f}]  {tokens / min(fast):,.0f} / {tokens / min(slow):,.0f}"
    return ratio(what, median, target, f"{note} tokens/s")
