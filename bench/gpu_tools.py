"""What NVIDIA's tools say of the kernels: one JSON object a line.

Usage: python -m bench.gpu_tools counters|sanitizer [--small]

Each tool looks at our kernels alone, by their namespace. That it sees them is shown by a kernel of
the same namespace with two mistakes, one for memcheck and one for racecheck.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.gpu_checks import SMALL, TABLE, Line, last, run

OURS = "ckptsurgeon"
"""The namespace of the kernels, a part of each mangled name."""
WRONG = """
namespace ckptsurgeon {
__global__ void wrong(int* numbers, int count) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  numbers[count + threadIdx.x] = shared[63 - threadIdx.x];
}
}
int main() {
  int* numbers;
  cudaMalloc(&numbers, 64 * sizeof(int));
  ckptsurgeon::wrong<<<1, 64>>>(numbers, 1 << 20);
  return cudaDeviceSynchronize() != cudaSuccess;
}
"""
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
SCALE = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}


def counters() -> Iterator[Line]:
    """ncu's view of each kernel's longest launch: time, and percent of what the chip can do."""
    tool = shutil.which("ncu")
    if tool is None or SMALL:
        return
    done = run(
        tool, "--clock-control", "none", "--kernel-name-base", "mangled", "--print-kernel-base",
        "mangled", "--kernel-name", f"regex:{OURS}",
        "--metrics", ",".join(METRICS.values()), "--csv",
        sys.executable, "-m", "bench.gpu_kernels", "--once",
        seconds=190, environment={"CKPTSURGEON_KERNELS": "require"},
    )  # fmt: skip
    launches: dict[str, dict[str, Line]] = {}
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    for row in csv.DictReader(lines):
        of = launches.setdefault(row["Kernel Name"], {}).setdefault(row["ID"], {})
        for key, metric in METRICS.items():
            if row["Metric Name"] == metric:
                value = float(row["Metric Value"].replace(",", ""))
                of[key] = value * SCALE.get(row["Metric Unit"], 1.0)
    if not launches:
        sys.exit(last(done))
    for name, seen in launches.items():
        longest = max(seen.values(), key=lambda launch: launch["us"])
        yield {"what": _readable(name), **longest}


def _readable(mangled: str) -> str:
    """File and function, from what nvcc makes of a function in an unnamed namespace:
    `_ZN11ckptsurgeon41_GLOBAL__N__0e13ee4d_12_bias_gelu_cu_0e1ac0e17forwardIfEEvPT_`."""
    file = re.search(r"_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+)_cu_[0-9a-f]{8}", mangled)
    rest = mangled[file.end() :] if file else mangled.partition(OURS)[2]
    parts = re.match(r"L?(\d+)(\w+)", rest)
    return f"{file[1] if file else ''} {parts[2][: int(parts[1])]}".strip() if parts else mangled


def sanitizer() -> Iterator[Line]:
    """compute-sanitizer's memcheck and racecheck, over each kernel of the parity table."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or SMALL:
        return
    words = (sys.executable, "-m", "pytest", TABLE, "-q", "-p", "no:cacheprovider", "-k",
             "cuda and gives")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        wrong = _wrong(Path(folder))
        checks = ("memcheck", "racecheck")
        seen = pool.map(lambda check: _errors(tool, check, str(wrong)), checks)
        of_ours = pool.map(lambda check: _errors(tool, check, *words), checks)
        for check, (planted, _), (errors, said) in zip(checks, seen, of_ours, strict=True):
            if planted < 1:
                errors, said = -1, f"{check} does not see the mistake that was planted"
            yield {"tool": check, "errors": errors, "said": said}


def _wrong(folder: Path) -> Path:
    source = folder / "wrong.cu"
    source.write_text(WRONG, encoding="utf-8")
    done = run("nvcc", "-arch=sm_90", str(source), "-o", str(folder / "wrong"))
    if done.returncode:
        sys.exit(last(done))
    return folder / "wrong"


def _errors(tool: str, check: str, *words: str) -> tuple[int, str]:
    """How many the check counts in a program, -1 where it says nothing, and its last line."""
    command = (tool, "--tool", check, "--target-processes", "all", "--kernel-regex", f"kns={OURS}")
    done = run(*command, *words, seconds=290, environment={"CKPTSURGEON_KERNELS": "require"})
    summaries = re.findall(r"SUMMARY: (\d+) (?:error|hazard)", done.stdout)
    said = [line for line in done.stdout.splitlines() if " passed" in line]
    return sum(map(int, summaries)) if summaries else -1, said[-1] if said else last(done)


TOOLS = {f.__name__: f for f in (counters, sanitizer)}


def main(words: Sequence[str]) -> None:
    for line in TOOLS[words[0]]():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
