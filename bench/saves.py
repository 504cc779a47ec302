"""How long training waits for a checkpoint: one written at once, and one written beside it.

Usage: python -m bench.saves FOLDER ROUNDS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.pairs import ratios, summary
from bench.process import python
from bench.row import Row, ratio
from bench.stepper import BYTES, begin, write_corpus
from train import distributed


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """The median of ratios of wall-clock time, save by save in turns."""
    own = folder / "saves"
    own.mkdir()
    times = python("bench.saves", own, 2 if quick else 7).answer
    median, least, most = summary(ratios(times["at once"], times["beside"]))
    note = f"[{least:.1f}, {most:.1f}]  {min(times['at once']) * 1e3:.0f} ms"
    note += f" / {min(times['beside']) * 1e3:.0f} ms, {times['megabytes']:.0f} MB"
    say(f"{median:.2f}")
    return [ratio("a save, h384 L6 V256: what training waits, at once / beside", median, note=note)]


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    write_corpus(folder, BYTES)
    (folder / "run").mkdir()
    answers, config, device = begin(folder, "micro_batch_size=1", "global_batch_size=1")
    from train import trainer  # after `begin`, which chooses DeepSpeed's accelerator
    from train.saves import Saves

    training = trainer.prepare(config, None, device)
    saves = Saves(training)
    times: dict[str, list[float]] = {"at once": [], "beside": []}
    for turn in range(rounds + 1):
        for name in times:
            trainer.iteration(training, 1)
            training.config.async_save = name == "beside"
            began = time.perf_counter()
            saves.save(None)
            waited = time.perf_counter() - began
            saves.finish()
            if turn:  # once more, to warm up
                times[name].append(waited)
    folders = sorted((folder / "run").glob("global_step*"))
    size = sum(file.stat().st_size for file in folders[-1].iterdir()) / 1e6
    print(json.dumps({**times, "megabytes": size}), file=answers)
    distributed.finish()


if __name__ == "__main__":
    main()
