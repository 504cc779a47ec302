"""What `status` costs for each step of a long run, beside each of a short one."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from bench.process import python
from bench.row import Row

FEW, MANY = 500, 5000
RATIO = 1.5
GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """CPU of `status` without that of a run with one step, in runs as Hugging Face saves them."""
    sizes = (1, FEW // 10, MANY // 10) if quick else (1, FEW, MANY)
    cpu = {}
    for steps in sizes:
        root = folder / str(steps)
        _make(root, steps)
        cpu[steps] = min(
            python("ckptsurgeon", "status", "-C", root).cpu for _ in range(3 if quick else 7)
        )
        shutil.rmtree(root)
    one, few, many = (cpu[size] for size in sizes)
    each = [(cpu[size] - one) / (size - 1) for size in sizes[1:]]
    note = f"CPU: {few - one:.2f} s for {sizes[1]} steps, {many - one:.2f} s for {sizes[2]}"
    what = f"a step of {sizes[2]} beside one of {sizes[1]}, status"
    return [Row(what, each[1] / each[0], "×", RATIO, note=note)]


def _make(root: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        folder = root / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        _save(folder / "optimizer.pt", {"state": {}, "param_groups": [GROUP]})
        _save(folder / "scheduler.pt", {"last_epoch": step, "_last_lr": [1e-3], "base_lrs": [1e-3]})
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def _save(path: Path, content: object) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr(f"{path.stem}/version", "3\n")
