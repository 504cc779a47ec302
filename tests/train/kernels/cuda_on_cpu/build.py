"""Compiles csrc/kernels/cuda with the C++ compiler, against the headers in this folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.compiled import MADE, compiled, sources_in
from train.kernels.build import TARGET, Toolchain, cuda_files

EMULATED = "emulated"
"""Where the headers of this folder lie among the sources."""
LAUNCH = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.+?), kThreads, 0, stream>>>\(")


def build(
    sources: Path,
    toolchain: Toolchain,
    kernel: str = "*",
    change: Callable[[str], str] = lambda text: text,
) -> Path:
    """A library whose ops, registered for the CPU, run the CUDA kernels of `sources`, or one of
    them; `change` edits each source before it is compiled. Fails with the compiler's words.

    Misaligned access, overflow of signed integers and shifts out of range stop the process."""
    files = [*sources.glob("*.h"), *(sources / "cuda").iterdir()]
    texts = {
        path.relative_to(sources).as_posix(): on_cpu(change(path.read_text("utf-8"))).encode()
        for path in files
    }
    headers = sources_in(Path(__file__).parent, "*.h")
    emulated = {f"{EMULATED}/{name}": header for name, header in headers.items()}
    include = Path(torch.__file__).parent / "include"
    # Without the check of longjmp, which takes a jump to another stack for a mistake.
    flags = [
        "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE", TARGET,
        "-fsanitize=alignment,signed-integer-overflow,shift,integer-divide-by-zero",
        "-fsanitize-undefined-trap-on-error", f"-I{EMULATED}", "-isystem", str(include),
        f"-L{include.parent / 'lib'}",
    ]  # fmt: skip
    chosen = [file for file in cuda_files(sources) if file.match(f"{kernel}.c*")]
    names = [file.relative_to(sources).as_posix() for file in chosen]
    command = [toolchain.cxx, *flags, "-x", "c++", *names, "-ltorch_cpu"]
    return compiled(command, texts | emulated, torch.__version__) / MADE


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
