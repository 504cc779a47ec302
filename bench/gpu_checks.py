"""Whether the trainer is right on this device: one JSON object a line.

Usage: python -m bench.gpu_checks machine|build|parity|starts|determinism|sanitizer [--small]
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.process import REPO

SMALL = "--small" in sys.argv
TABLE = "tests/train/kernels/test_parity.py"
Line = dict[str, Any]


def run(
    *words: str, seconds: float = 240, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One command in the repository, ended after `seconds`; it never raises for what it says."""
    return subprocess.run(
        words,
        cwd=REPO,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", *words, environment=environment)


def last(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that says something, for a figure that is missing."""
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit {done.returncode}"


def machine() -> Iterator[Line]:
    """Date, GPU, driver, torch and nvcc."""
    import torch

    yield {"date": time.strftime("%Y-%m-%d"), "torch": f"torch {torch.__version__}"}
    if torch.cuda.is_available():
        query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        yield {"gpu": run(*query).stdout.strip()}
    if shutil.which("nvcc"):
        yield {"nvcc": run("nvcc", "--version").stdout.strip().splitlines()[-1]}


def build() -> Iterator[Line]:
    """How long the kernels take to compile; nothing else is worth a GPU when they do not."""
    began = time.monotonic()
    done = python("train", "build-kernels")
    yield {"seconds": time.monotonic() - began, "said": last(done), "built": not done.returncode}


def parity() -> Iterator[Line]:
    """The parity table on this device."""
    device = "cpu" if SMALL else "cuda"
    words = (TABLE, "-q", "-p", "no:cacheprovider", "-k", f"{device} and gives")
    done = python("pytest", *words, CKPTSURGEON_KERNELS="require")
    counts = {
        what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
    }
    failed = counts.get("failed", 0) + counts.get("error", 0)
    yield {"passed": counts.get("passed", 0), "failed": failed, "skipped": counts.get("skipped", 0),
           "said": last(done)}  # fmt: skip


def starts() -> Iterator[Line]:
    """ZeRO x dtype: train, operate, and compare the promise with what the next trainer holds."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text"
        python("train", "prepare-data", "--pydoc", "--output", str(data))
        kinds = [(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16", "fp16")]
        if SMALL:
            kinds = [(1, "bf16")]
        with ThreadPoolExecutor(1 if SMALL else 4) as pool:
            yield from pool.map(lambda kind: _start(Path(folder), data, *kind), kinds)


def _start(folder: Path, data: Path, stage: int, dtype: str) -> Line:
    root = folder / f"z{stage}-{dtype}"
    what = f"ZeRO {stage} {dtype}"
    trained = _train(
        root, data, f"zero_stage={stage}", f"dtype={dtype}", "train_iters=4", "save_interval=2"
    )
    if trained.returncode:
        return {"what": what, "kept": False, "said": last(trained)}
    surgeon = ("ckptsurgeon", "-C", str(root))
    words = ("rollback", "--to", "2", "--set", "lr=5e-4", "--set", "beta2=0.9", "--yes")
    operated = python(*surgeon, *words)
    if operated.returncode:
        return {"what": what, "kept": False, "said": last(operated)}
    relaunched = python(*surgeon, "relaunch", "--check")
    losses = re.findall(r"lm loss: (\S+) ", trained.stdout)
    return {
        "what": what,
        "kept": not relaunched.returncode,
        "said": last(relaunched),
        "losses": losses,
    }


def _train(root: Path, data: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    config = ("--config", "train/configs/tiny.yaml", "--from-scratch")
    return python("train", *config, f"save={root}", f"data={data}", *overrides)


def determinism() -> Iterator[Line]:
    """Two equal runs, and how many losses and norms of the second differ in the digits printed."""
    shape = ["hidden_size=64"] if SMALL else ["hidden_size=512", "num_attention_heads=8"]
    size = ["train_iters=3"] if SMALL else ["seq_length=512", "num_layers=6", "train_iters=30"]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text"
        python("train", "prepare-data", "--pydoc", "--output", str(data))
        for kernels, attention in (("always", "plain"), ("never", "plain"), ("always", "sdpa")):
            said = []
            for turn in ("first", "second"):
                root = Path(folder) / f"{turn}-{kernels}-{attention}"
                words = [f"kernels={kernels}", f"attention={attention}", "dtype=bf16"]
                done = _train(root, data, *words, *shape, *size, "save_interval=1000")
                said.append(re.findall(r"lm loss: \S+ .*grad norm: \S+ ", done.stdout))
            differ = sum(a != b for a, b in zip(*said, strict=True)) if said[0] else -1
            what = f"kernels {kernels}, attention {attention}"
            # The backward of torch's fused attention adds up in any order.
            yield {"what": what, "differ": differ, "exact": attention == "plain"}


def sanitizer() -> Iterator[Line]:
    """compute-sanitizer over the parity table, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or SMALL:
        return
    words = (
        "--tool",
        "memcheck",
        "--error-exitcode",
        "7",
        sys.executable,
        "-m",
        "pytest",
        TABLE,
        "-q",
    )
    done = run(tool, *words, "-p", "no:cacheprovider", "-k", "cuda and gives", seconds=140)
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", done.stdout)
    yield {"errors": sum(map(int, summary)) if summary else -1, "said": last(done)}


CHECKS = {f.__name__: f for f in (machine, build, parity, starts, determinism, sanitizer)}


def main(words: Sequence[str]) -> None:
    for line in CHECKS[words[0]]():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
