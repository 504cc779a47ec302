"""Whether the trainer is right on this device: one JSON object a line.

Usage: python -m bench.gpu_checks machine|build|parity|starts|determinism|codes [--small]
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
from importlib.util import find_spec
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
    """ZeRO x dtype x optimizer: train, operate, and compare the promise with the next trainer."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text"
        python("train", "prepare-data", "--pydoc", "--output", str(data))
        kinds = [
            (f"zero_stage={stage}", f"dtype={dtype}", f"optimizer={optimizer}")
            for optimizer in ("adamw", *(("adamw8bit",) if find_spec("bitsandbytes") else ()))
            for stage in range(4)
            for dtype in ("fp32", "bf16", "fp16")
        ]
        if SMALL:
            kinds = kinds[4:5]
        with ThreadPoolExecutor(1 if SMALL else 8) as pool:
            yield from pool.map(lambda kind: _start(Path(folder), data, *kind), kinds)


def _start(folder: Path, data: Path, *kind: str) -> Line:
    stage, dtype, optimizer = (word.partition("=")[2] for word in kind)
    what = f"ZeRO {stage} {dtype}" + (f" {optimizer}" if optimizer != "adamw" else "")
    root = folder / what.replace(" ", "-")
    trained = _train(root, data, *kind, "train_iters=4", "save_interval=2")
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


def codes() -> Iterator[Line]:
    """Numbers as 8-bit codes: those of ours that lie farther off than bitsandbytes' kernel for this
    device gets. It takes the upper one where a number lies in the middle of two codes."""
    import torch

    try:
        from bitsandbytes.functional import create_dynamic_map, quantize_blockwise
    except ImportError:
        return
    from ckptsurgeon.transaction.coding import codes_of, scales_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = 10_000 if SMALL else 10_000_003
    normal = torch.randn(count, generator=torch.Generator().manual_seed(1))
    moments = {"first moments": normal * 1e-3, "second moments": (normal * 1e-3) ** 4}
    for what, numbers in moments.items():
        book = create_dynamic_map(signed=what == "first moments")
        theirs, state = quantize_blockwise(numbers.to(device), code=book.to(device), blocksize=256)
        ours = torch.from_numpy(codes_of(numbers.numpy(), book.numpy(), 256)).long()
        scales = torch.from_numpy(scales_of(numbers.numpy(), 256))
        shares = numbers.double() / scales.repeat_interleave(256)[:count].double()
        one, other = (
            (book.double()[which] - shares).abs()
            for which in (ours, theirs.cpu().reshape(-1).long())
        )
        farther = (one - other > 2 * 2**-23 * shares.abs()).sum()
        yield {
            "what": what,
            "farther": int(farther + (scales != state.absmax.cpu().reshape(-1)).sum()),
            "differ": int((one != other).sum()),
            "of": count,
        }


CHECKS = {f.__name__: f for f in (machine, build, parity, starts, determinism, codes)}


def main(words: Sequence[str]) -> None:
    for line in CHECKS[words[0]]():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
