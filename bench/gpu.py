"""What waits for a GPU, in one command that may be cut off: each figure is kept as it comes.

The figures lie in bench/gpu.json ($BENCH_GPU names another file); a second call goes on where the
first one was cut off. A step, or a variant of the training, that was measured with other kernels or
another trainer is measured again; until then its figures say so.
Without a GPU, --quick runs all of it in a small form on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

from bench.process import REPO
from bench.row import Row, ratio

LIMIT = 25 * 60.0
"""Seconds for all steps together."""


@dataclass(frozen=True)
class Step:
    """A process that prints one JSON object a line, and after how many seconds it is ended.

    One that can go on where it was cut off takes the names of what it has measured as arguments.
    """

    name: str
    seconds: float
    words: tuple[str, ...]
    goes_on: bool = False


STEPS = (
    Step("machine", 60, ("bench.gpu_checks", "machine")),
    Step("build", 150, ("bench.gpu_checks", "build")),
    Step("parity", 180, ("bench.gpu_checks", "parity")),
    Step("starts", 300, ("bench.gpu_checks", "starts")),
    Step("determinism", 120, ("bench.gpu_checks", "determinism")),
    Step("kernels", 330, ("bench.gpu_kernels",)),
    Step("training", 600, ("bench.gpu_training",), goes_on=True),
    Step("codes", 60, ("bench.gpu_checks", "codes")),
    Step("counters", 200, ("bench.gpu_tools", "counters")),
    Step("sanitizer", 300, ("bench.gpu_tools", "sanitizer")),
)  # fmt: skip


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Run the steps that have not ended yet, within LIMIT, and return the rows of all figures."""
    kept = Path(
        os.environ.get("BENCH_GPU", folder / "gpu.json" if quick else REPO / "bench/gpu.json")
    )
    if not quick and not _has_gpu():
        say("no GPU: what waits for one is not measured (--quick: its small form, on the CPU)")
        return rows(read(kept))
    figures, now = read(kept), sources()
    began = time.monotonic()
    for step in STEPS:
        left = LIMIT - (time.monotonic() - began)
        before = figures.setdefault(step.name, {"lines": [], "ended": False, "sources": now})
        if (before["ended"] and before["sources"] == now) or left < 10:
            continue
        say(step.name)
        measured = before["lines"] if step.goes_on else []
        figures[step.name] = {"lines": list(measured), "ended": False, "sources": now}
        done = [line["what"] for line in measured if line["sources"] == now]
        words = (*step.words, *done)
        words += ("--small",) if quick else ()
        keep = partial(_keep, kept, figures, step.name)
        figures[step.name]["ended"] = _run(words, min(step.seconds, left), keep)
        _write(kept, figures)
    return rows(figures)


def read(kept: Path) -> dict[str, Any]:
    """The figures that are there; none, where the file is missing or was cut off."""
    try:
        return dict(json.loads(kept.read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def sources() -> str:
    """A digest of what the figures are of: the kernels and the trainer."""
    digest = hashlib.sha256()
    for folder in ("csrc/kernels", "train"):
        for path in sorted((REPO / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def rows(figures: dict[str, Any]) -> list[Row]:
    """What the figures say, in the rows of the other benches."""
    found: list[Row] = []
    now = sources()

    def age(line: dict[str, Any]) -> str:
        return "" if line["sources"] == now else ", older kernels"

    lines = {name: step["lines"] for name, step in figures.items()}
    on = [value for line in lines.get("machine", []) for value in list(line.values())[:-1]]
    machine = " · ".join(map(str, on))
    cut = [name for name, step in figures.items() if not step["ended"]]
    if cut:
        found.append(
            Row("gpu: steps that failed or were cut off", len(cut), "", 0, note=", ".join(cut))
        )
    older = [name for name in lines if figures[name]["sources"] != now]
    if older:
        what = "gpu: steps measured with older kernels, or an older trainer"
        found.append(Row(what, len(older), "", note=", ".join(older)))
    for line in lines.get("parity", []):
        note = f"of {line['passed'] + line['failed']}  {machine}"
        found.append(
            Row("gpu: rows of the parity table that fail", line["failed"], "", 0, note=note)
        )
    starts = lines.get("starts", [])
    if starts:
        broken = [line for line in starts if not line["kept"]]
        note = "; ".join(f"{line['what']}: {line['said']}" for line in broken)
        what = f"gpu: of {len(starts)} starts with a surgery, promises that are broken"
        found.append(Row(what, len(broken), "", 0, note=note))
    for line in lines.get("determinism", []):
        target = 0 if line["exact"] else None
        found.append(
            Row(f"gpu: second run, {line['what']}: bits that differ", line["differ"], "", target)
        )
    for line in lines.get("codes", []):
        what = f"gpu: {line['what']}: 8-bit codes farther off than bitsandbytes' kernel's"
        note = f"of {line['of']:,}; {line['differ']} lie between two codes"
        found.append(Row(what, line["farther"], "", 0, note=note))
    for line in lines.get("sanitizer", []):
        what = f"gpu: errors that {line['tool']} of compute-sanitizer sees"
        found.append(Row(what, line["errors"], "", 0, note=line["said"]))
    for line in lines.get("counters", []):
        if line["us"] < 10:  # no work for a GPU
            continue
        note = f"{line['us']:,.0f} µs, warps {line['warps']:.0f} %, issue {line['issue']:.0f} %"
        what = f"gpu: {line['what']}: of DRAM's bandwidth"
        found.append(Row(what, line["dram"], "%", note=note + age(line)))
    for line in lines.get("kernels", []):
        if "ours" in line.get("ms", {}):
            others = {who: ms for who, ms in line["ms"].items() if not who.startswith("ours")}
            best = min(others, key=others.__getitem__)
            note = f"{line['ms']['ours']:.3g} / {others[best]:.3g} ms"
            found.append(
                ratio(
                    f"gpu: {line['what']} against {best}",
                    others[best] / line["ms"]["ours"],
                    None,
                    note + age(line),
                )
            )
        elif "ms" in line:
            note = ", ".join(f"{who} {ms:.3g}" for who, ms in line["ms"].items())
            found.append(Row(f"gpu: {line['what']}", min(line["ms"].values()), "ms", note=note))
    for line in lines.get("training", []):
        note = f"{line['tokens_per_second']:,.0f} tokens/s, {line['peak_gib']:.1f} GiB"
        goal = 42.0 if line["what"] == "default" and line["mfu"] is not None else None
        found.append(
            Row(
                f"gpu: 1.3 B, {line['what']}: MFU",
                100 * (line["mfu"] or 0.0),
                "%",
                goal,
                True,
                note + age(line),
            )
        )
    return found


def _has_gpu() -> bool:
    asked = "import sys; from train.device import device_kind; sys.exit(device_kind() != 'cuda')"
    return subprocess.run([sys.executable, "-c", asked], cwd=REPO).returncode == 0


def _run(words: tuple[str, ...], seconds: float, keep: Callable[[dict[str, Any]], None]) -> bool:
    """Hand over each line of the process as it comes; False if it failed, or at its limit."""
    command = [sys.executable, "-u", "-m", *words]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        late = Timer(seconds, process.kill)
        late.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    keep(json.loads(line))
        except BaseException:
            process.kill()
            raise
        finally:
            late.cancel()
    return process.returncode == 0


def _keep(kept: Path, figures: dict[str, Any], step: str, line: dict[str, Any]) -> None:
    if isinstance(line.get("failed"), str):  # a variant, of which the step says so, too
        return
    measured = figures[step]
    others = [old for old in measured["lines"] if "what" not in old or old["what"] != line["what"]]
    measured["lines"] = [*others, {**line, "sources": measured["sources"]}]
    _write(kept, figures)


def _write(kept: Path, figures: dict[str, Any]) -> None:
    """A reader finds the old figures or the new ones, whenever this is cut off."""
    partial = kept.with_name(kept.name + ".tmp")
    partial.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    partial.replace(kept)
