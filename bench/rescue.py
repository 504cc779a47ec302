"""Which operations save a run that diverged in its warm-up, and which do not.

The run is that of train/configs/climb.yaml, whose rate climbs past what the model can bear. Each
branch is a copy, rolled back or not, operated on, and trained on by the trainer itself. Nothing is
judged: the losses are printed as they come out. Usage: python -m bench.rescue FOLDER
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.process import REPO

LOSS = re.compile(r"^ iteration +(\d+)/.* lm loss: (\S+) ", re.MULTILINE)
HELD = "set={lr: 3e-3, warmup: 400, decay_style: constant}"
BRANCHES: dict[str, list[str]] = {
    "nothing (control)": ["rollback={to: 50}"],
    "average of 50, 100, 150 at 150": ["rollback={to: 150}", "average={last: 3}"],
    "average, and lr held at 3e-3": ["rollback={to: 150}", "average={last: 3}", HELD],
    "graft the moments of 50 at 150": ["rollback={to: 150}", "graft={step: 50}"],
    "scale queries, keys, values by 0.9": [
        "rollback={to: 50}", "scale={params: query_key_value.weight, by: 0.9}",
    ],
    "cool down to 0 from 50, 50 steps": ["rollback={to: 50}", "cooldown={steps: 50}"],
    "cool down to 3e-3 from 50, 50 steps": [
        "rollback={to: 50}", "cooldown={steps: 50, to: 3e-3}",
    ],
    "clip_moments at 10 × the median at 150": [
        "rollback={to: 150}", "clip_moments={above: 10}",
    ],
    "lr held at 3e-3": [
        "rollback={to: 50}", HELD,
    ],
}  # fmt: skip
"""What is tried → the recipe."""


def main() -> None:
    """Train, branch, print one line for each branch."""
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run("train", "prepare-data", "--pydoc", "--output", f"{folder}/topics")
    run = folder / "run"
    words = ["--config", "train/configs/climb.yaml", "--from-scratch", f"save={run}"]
    said = _run("train", *words, f"data={folder}/topics")
    _tell("the run itself", said)
    for name, recipe in BRANCHES.items():
        branch = folder / "branch"
        shutil.copytree(run, branch, symlinks=True)
        file = folder / "recipe.yaml"
        file.write_text("".join(f"{line.replace('=', ': ', 1)}\n" for line in recipe))
        _run("ckptsurgeon", "apply", str(file), "-C", str(branch), "--yes", "--quiet")
        resume = ["--config", f"{branch}/train.yaml", f"save={branch}", f"data={folder}/topics"]
        _tell(name, _run("train", *resume))
        shutil.rmtree(branch)


def _tell(name: str, said: str) -> None:
    losses = {int(step): float(loss) for step, loss in LOSS.findall(said)}
    last = [loss for _, loss in sorted(losses.items())[-20:]]
    best = min(losses.values())
    print(
        f"{name:<42} steps {min(losses)}-{max(losses)}, lowest {best:.3f}, mean of the last 20 "
        f"{statistics.mean(last):.3f}",
        flush=True,
    )


def _run(module: str, *words: str) -> str:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *words],
        cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{module} {words[0]}: {done.stderr[-2000:]}{done.stdout[-500:]}")
    print(f"  ({module} {words[0]}: {time.monotonic() - began:.0f} s)", file=sys.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
