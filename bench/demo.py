"""The main job, end to end: a run diverges, is rolled back, operated on, relaunched, and recovers.

Everything is real: text, trainer, checkpoints, event files, and the commands of README.md in its
order. Exits non-zero unless the run and the control (rolled back without surgery) diverged and the
operated branch recovered. Usage: python -m bench.demo [FOLDER]
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
"""Diverged: for the last 50 iterations the trailing mean is this far above the best of the run."""
GAIN = 0.4
"""Recovered: the last 20 iterations are on average this far below the control's."""
LOSS = re.compile(r"^ iteration +(\d+)/.* lm loss: (\S+) ")
DIVERGED = 3
"""The exit code with which `advise` says so."""


def main() -> int:
    """Run the demo in a fresh folder and judge it."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else REPO / "demo").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()

    run = folder / "run"
    _say("A GPT is trained on Python's own manual. At step 150 it meets bad data.")
    _type("python -m train prepare-data --pydoc --output", f"{folder}/topics")
    start = "python -m train --config train/configs/demo.yaml --from-scratch"
    diverged = _type(start, f"save={run}", f"data={folder}/topics")
    control = shutil.copytree(run, folder / "control", symlinks=True)

    _say("What happened, and what helps? The advice is a recipe: look at its plan, apply it.")
    print(f"$ cd {_short(run)}")
    _type("ckptsurgeon status", cwd=run)
    _type("ckptsurgeon advise -o recipe.yaml", cwd=run, exits=DIVERGED)
    _type("ckptsurgeon plan recipe.yaml", cwd=run)
    operated = _type("ckptsurgeon apply recipe.yaml --relaunch --yes", cwd=run)

    _say("Control: a copy of the diverged run goes back to the same step, and changes nothing.")
    repeated = _type("ckptsurgeon rollback --to 140 --relaunch --yes", "-C", str(control))

    _say("One picture of the run; docs/ keeps the two SVGs, which README.md shows.")
    for name, more in (("run.svg", []), ("run-dark.svg", ["--dark"]), ("run.html", [])):
        _type("ckptsurgeon report", "-C", str(run), "-o", f"{folder}/{name}", *more)
    status = _judge(diverged, repeated, operated)

    _say("All of it is on record, and can be taken back.")
    _type("ckptsurgeon log", cwd=run)
    _type("ckptsurgeon undo -n", cwd=run)
    print(f"\n{time.monotonic() - began:.0f} s on {os.cpu_count()} cores")
    return status


def _say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def _short(text: object) -> str:
    return str(text).replace(f"{REPO}/", "")


def _type(words: str, *more: str, cwd: Path = REPO, exits: int = 0) -> list[float]:
    """Run a command as a user would, show it and its output (few loss lines), return its losses."""
    shown = f"{words} {shlex.join(more)}".rstrip()
    print(f"$ {_short(shown)}", flush=True)
    program, *rest = words.split()
    python = [sys.executable, "-m", "ckptsurgeon"] if program == "ckptsurgeon" else [sys.executable]
    losses = []
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*python, *rest, *more],
            cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            match = LOSS.match(line)
            if match:
                losses.append(float(match[2]))
            if match is None or int(match[1]) % 50 == 0:
                print(_short(line.rstrip()), flush=True)
        if process.wait() != exits:
            errors.seek(0)
            print(errors.read()[-4000:], file=sys.stderr)
            sys.exit(f"failed with exit code {process.returncode}: {shown}")
    return losses


def _judge(diverged: list[float], control: list[float], operated: list[float]) -> int:
    best = min(_means(diverged))
    print(f"\n{'branch':<10} {'lowest mean':>12} {'last 20':>9}   verdict")
    verdicts = {
        "diverged": _has_diverged(diverged, best),
        "control": _has_diverged(control, best),
        "operated": _tail(operated) <= _tail(control) - GAIN and not _has_diverged(operated, best),
    }
    table = {"diverged": diverged, "control": control, "operated": operated}
    for name, losses in table.items():
        expected = "recovered" if name == "operated" else "diverged"
        verdict = expected if verdicts[name] else f"NOT {expected}"
        print(f"{name:<10} {min(_means(losses)):>12.3f} {_tail(losses):>9.3f}   {verdict}")
    return 0 if all(verdicts.values()) else 1


def _means(losses: list[float]) -> list[float]:
    return [sum(losses[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(losses) + 1)]


def _tail(losses: list[float]) -> float:
    return sum(losses[-20:]) / 20


def _has_diverged(losses: list[float], best: float) -> bool:
    return all(mean > best + RISE for mean in _means(losses)[-50:])


if __name__ == "__main__":
    sys.exit(main())
