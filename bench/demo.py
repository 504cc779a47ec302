"""The main job, end to end: a run diverges, is rolled back, operated on, relaunched, and recovers.

Everything is real: text, trainer, checkpoints, event files, and the commands a user types. Exits
non-zero unless the run and the control (rolled back without surgery) diverged and the operated
branch recovered. Usage: python -m bench.demo [FOLDER]
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parent.parent
WINDOW = 25
"""Iterations of the trailing mean, by which a divergence is judged."""
RISE = 0.25
"""Diverged: the trailing mean stays this far above its minimum for the last 50 iterations."""
GAIN = 0.4
"""Recovered: the last 20 iterations are on average this far below the control's."""
LOSS = re.compile(r"^ iteration +(\d+)/.* lm loss: (\S+) ")


def main() -> int:
    """Run the demo in a fresh folder and judge it."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else REPO / "demo").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()

    python = [sys.executable, "-m"]
    train = [*python, "train"]
    run = folder / "run"
    surgeon = [*python, "ckptsurgeon"]
    _say("A GPT is trained on Python's own manual. Its warm-up climbs past what it can bear.")
    _type([*train, "prepare-data", "--pydoc", "--output", f"{folder}/topics"])
    diverged = _type(
        [
            *train, "--config", "train/configs/demo.yaml", "--from-scratch",
            f"save={run}", f"data={folder}/topics",
        ]
    )  # fmt: skip
    _type([*surgeon, "status", "-C", str(run)])
    _type([*surgeon, "advise", "-C", str(run)])

    _say("Control: back to step 50 and go on as before.")
    control = _type(
        [
            *surgeon, "rollback", "--to", "50", "-C", str(run), "--keep-tb", "tb-diverged",
            "--why", "control: roll back and change nothing", "--yes", "--relaunch",
        ]
    )  # fmt: skip

    _say("Surgery: back to step 50, hold the learning rate at 3e-3.")
    operated = _type(
        [
            *surgeon, "apply", "recipes/roll-back-and-lower-lr.yaml", "-C", str(run), "--yes",
            "--relaunch",
        ]
    )  # fmt: skip
    _type([*surgeon, "log", "-C", str(run)])
    _say("One picture of it; docs/ keeps the two SVGs, which README.md shows.")
    for name, more in (("run.svg", []), ("run-dark.svg", ["--dark"]), ("run.html", [])):
        _type([*surgeon, "report", "-C", str(run), "-o", f"{folder}/{name}", *more])
    return _judge(diverged, control, operated, time.monotonic() - began)


def _say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def _type(command: list[str]) -> list[float]:
    """Run a command as a user would, show it and its output (few loss lines), return its losses."""
    shown = shlex.join(command).replace(f"{sys.executable} -m ckptsurgeon", "ckptsurgeon")
    shown = shown.replace(f"{sys.executable} -m", "python -m").replace(f"{REPO}/", "")
    print(f"$ {shown}", flush=True)
    losses = []
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            match = LOSS.match(line)
            if match:
                losses.append(float(match[2]))
            if match is None or int(match[1]) % 50 == 0:
                print(line.rstrip().replace(f"{REPO}/", ""), flush=True)
        if process.wait() != 0:
            errors.seek(0)
            print(errors.read()[-4000:], file=sys.stderr)
            sys.exit(f"failed with exit code {process.returncode}: {shown}")
    return losses


def _judge(
    diverged: list[float], control: list[float], operated: list[float], seconds: float
) -> int:
    table = {"diverged": diverged, "control": control, "operated": operated}
    print(f"\n{'branch':<10} {'lowest mean':>12} {'last 20':>9}   verdict")
    verdicts = {
        "diverged": _has_diverged(diverged),
        "control": _has_diverged(control),
        "operated": _tail(operated) <= _tail(control) - GAIN and not _has_diverged(operated),
    }
    for name, losses in table.items():
        word = {"operated": "recovered"}.get(name, "diverged")
        verdict = word if verdicts[name] else f"NOT {word}"
        print(f"{name:<10} {min(_means(losses)):>12.3f} {_tail(losses):>9.3f}   {verdict}")
    print(f"\n{seconds:.0f} s on {os.cpu_count()} cores")
    return 0 if all(verdicts.values()) else 1


def _means(losses: list[float]) -> list[float]:
    return [sum(losses[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(losses) + 1)]


def _tail(losses: list[float]) -> float:
    return sum(losses[-20:]) / 20


def _has_diverged(losses: list[float]) -> bool:
    means = _means(losses)
    return all(mean > min(means) + RISE for mean in means[-50:])


if __name__ == "__main__":
    sys.exit(main())
