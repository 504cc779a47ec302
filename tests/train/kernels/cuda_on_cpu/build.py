"""Compiles csrc/kernels/cuda with the C++ compiler, against the headers in this folder."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from train.kernels.build import TARGET, Toolchain, cuda_files

LAUNCH = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.+?), kThreads, 0, stream>>>\(")


def build(
    sources: Path,
    toolchain: Toolchain,
    folder: Path,
    kernel: str = "*",
    change: Callable[[str], str] = lambda text: text,
) -> Path:
    """A library in `folder` whose ops, registered for the CPU, run the CUDA kernels of `sources`,
    or one of them; `change` edits each source before it is compiled. Raises CalledProcessError.

    Misaligned access, overflow of signed integers and shifts out of range stop the process."""
    for path in [*sources.glob("*.h"), *(sources / "cuda").iterdir()]:
        target = folder / path.relative_to(sources)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(on_cpu(change(path.read_text("utf-8"))), encoding="utf-8")
    include = Path(torch.__file__).parent / "include"
    flags = [
        "-std=c++20", "-O1", "-fPIC", "-shared", "-w", TARGET,
        "-fsanitize=alignment,signed-integer-overflow,shift,integer-divide-by-zero",
        "-fsanitize-undefined-trap-on-error",
        f"-I{Path(__file__).parent}", "-isystem", str(include),
    ]  # fmt: skip
    files = [folder / path.relative_to(sources) for path in cuda_files(sources)]
    chosen = [str(file) for file in files if file.match(f"{kernel}.c*")]
    library = folder / "cuda_on_cpu.so"
    libraries = [f"-L{include.parent / 'lib'}", "-ltorch_cpu"]
    command = [toolchain.cxx, *flags, "-x", "c++", *chosen, "-o", str(library), *libraries]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def on_cpu(text: str) -> str:
    """A CUDA source as C++: each launch a call, and the ops registered for the CPU."""
    text = text.replace("_IMPL(ckptsurgeon, CUDA,", "_IMPL(ckptsurgeon, CPU,")
    while match := LAUNCH.search(text):
        end = _closing(text, match.end())
        kernel, grid = match.groups()
        call = f"emulated::launch({grid}, kThreads, [=] {{ {kernel}({text[match.end() : end]}); }})"
        text = text[: match.start()] + call + text[end + 1 :]
    assert "<<<" not in text
    return text


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes that was opened right before `start`."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError("a parenthesis is not closed")
