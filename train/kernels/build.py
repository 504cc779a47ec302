"""Compiles csrc/kernels against the installed torch, into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..device import device_kind

LIBRARY = "kernels.so"
REMEMBERED = 600.0
OLDEST_TORCH = (2, 10)  # its headers' stable ABI has everything that csrc/kernels uses
TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Not -ffast-math, which would delete the tests for nan.
CXX_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", TARGET,
)  # fmt: skip
NVCC_FLAGS = (
    "-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", TARGET,
    "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]",
)  # fmt: skip


class CannotBuildError(Exception):
    """Why there is no native library: no compiler, an old torch, or what the compiler said."""


@dataclass(frozen=True)
class Toolchain:
    """What compiles here. `nvcc` is None for a library without CUDA code."""

    cxx: str
    nvcc: str | None
    versions: tuple[str, ...]  # of the compilers, in their own words


def build() -> Path:
    """The compiled library: from the cache when it is there, else compiled now (seconds).

    Any number of processes may call it at once: one compiles, the others wait. A library appears by
    a rename, so a killed build leaves nothing that would be loaded. What has failed is not tried
    again for REMEMBERED seconds. Raises CannotBuildError.
    """
    sources = source_folder()
    toolchain = find_toolchain()
    library = cache_folder() / cache_key(sources, toolchain) / LIBRARY
    if library.is_file():
        return library
    failure = library.parent.with_suffix(".failed")
    with _lock(library.parent.with_suffix(".lock")):
        if not library.is_file():
            _refuse_a_recent(failure)
            try:
                _compile_into(library.parent, sources, toolchain)
            except CannotBuildError as e:
                failure.write_text(str(e), encoding="utf-8")
                raise
    return library


def forget_failure() -> None:
    """Let the next `build` try what has failed minutes ago. Raises CannotBuildError."""
    key = cache_key(source_folder(), find_toolchain())
    (cache_folder() / f"{key}.failed").unlink(missing_ok=True)


def _refuse_a_recent(failure: Path) -> None:
    """The ranks of one start take turns: what failed for the first one fails for all, at once."""
    with suppress(FileNotFoundError):
        if time.time() - failure.stat().st_mtime < REMEMBERED:
            raise CannotBuildError(failure.read_text("utf-8"))


def source_folder() -> Path:
    """csrc/kernels: beside train/ in a checkout, inside the package where a wheel is installed."""
    here = Path(__file__).resolve()
    for folder in (here.parents[2] / "csrc" / "kernels", here.parent / "csrc"):
        if (folder / "common.h").is_file():
            return folder
    raise CannotBuildError(f"the sources of the kernels are not beside {here.parent}")


def cache_folder() -> Path:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as e:
        raise CannotBuildError(f"no XDG_CACHE_HOME is set, and no home directory: {e}") from e
    return base / "ckptsurgeon"


def find_toolchain() -> Toolchain:
    """$CXX or the first C++ compiler on PATH; nvcc too where a GPU computes and this torch is of
    its CUDA major."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise CannotBuildError(f"torch {torch.__version__} is older than 2.10")
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    cxx = next((path for name in names if name and (path := shutil.which(name))), None)
    if cxx is None:
        raise CannotBuildError("no C++ compiler on PATH (g++, c++, clang++)")
    versions = [_output([cxx, "--version"]).partition("\n")[0]]
    nvcc = find_nvcc() if torch.version.cuda and device_kind() == "cuda" else None
    if nvcc is not None:
        said = _output([nvcc, "--version"])
        if f"release {str(torch.version.cuda).partition('.')[0]}." in said:
            versions.append(said.splitlines()[-1])
        else:
            nvcc = None
    return Toolchain(cxx, nvcc, tuple(versions))


def find_nvcc() -> str | None:
    """nvcc on PATH, in $CUDA_HOME, where CUDA installs it by itself, or of its wheel from PyPI."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda", *wheels_of_cuda())
    names = ("nvcc", *(f"{home}/bin/nvcc" for home in homes if home))
    return next((path for name in names if (path := shutil.which(name))), None)


def wheels_of_cuda() -> list[Path]:
    """The CUDA that `pip install nvidia-cuda-nvcc` puts beside torch, the newest first."""
    return sorted((Path(torch.__file__).parents[1] / "nvidia").glob("cu[0-9]*"), reverse=True)


def cache_key(sources: Path, toolchain: Toolchain) -> str:
    """Changes with every source, flag, compiler, torch and machine architecture."""
    digest = hashlib.sha256()
    told = (*CXX_FLAGS, *NVCC_FLAGS, *toolchain.versions, torch.__version__, platform.machine())
    for text in told:
        digest.update(text.encode() + b"\0")
    for path in sorted(p for p in sources.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(sources)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def cuda_files(sources: Path) -> list[Path]:
    return sorted(p for p in (sources / "cuda").iterdir() if p.suffix in (".cu", ".cpp"))


def compile_commands(
    sources: Path, toolchain: Toolchain, objects: Path, headers: Path | None = None
) -> tuple[list[list[str]], list[str]]:
    """One command per source, and the command that links their objects into `objects`/LIBRARY.

    `headers` is the include folder of another torch than the installed one."""
    torch_folder = Path(torch.__file__).parent
    include = ["-isystem", str(headers or torch_folder / "include")]
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
    compile_cxx = [toolchain.cxx, *CXX_FLAGS, *include]
    chosen = [(compile_cxx, file) for file in sorted((sources / "cpu").glob("*.cpp"))]
    linker = toolchain.cxx
    if toolchain.nvcc is not None:
        compile_cuda = [toolchain.nvcc, *NVCC_FLAGS, "-DUSE_CUDA", *include]
        chosen += [(compile_cuda, file) for file in cuda_files(sources)]
        libraries.append("-ltorch_cuda")
        linker = toolchain.nvcc  # it knows where its runtime library lies, but for the wheel's
        libraries.append(f"-L{Path(toolchain.nvcc).parents[1] / 'lib'}")
    outputs = [objects / f"{file.parent.name}-{file.name}.o" for _, file in chosen]
    commands = [
        [*compiler, "-c", str(file), "-o", str(output)]
        for (compiler, file), output in zip(chosen, outputs, strict=True)
    ]
    link = [linker, "-shared", "-o", str(objects / LIBRARY), *map(str, outputs), *libraries]
    return commands, link


def _compile_into(folder: Path, sources: Path, toolchain: Toolchain) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        objects = Path(temporary)
        commands, link = compile_commands(sources, toolchain, objects)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # The last ones first: what nvcc compiles takes longest, and fails most.
            outputs = [pool.submit(_output, command) for command in reversed(commands)]
            wait(outputs, return_when=FIRST_EXCEPTION)
            pool.shutdown(wait=False, cancel_futures=True)
            for output in outputs:
                if not output.cancelled():
                    output.result()
        _output(link)
        folder.mkdir(exist_ok=True)
        (objects / LIBRARY).replace(folder / LIBRARY)


def _output(command: Sequence[str]) -> str:
    """Its stdout. Raises CannotBuildError with the line that says why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        raise CannotBuildError(f"{command[0]}: {e.strerror}") from e
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        reasons = [line for line in lines if "error" in line or "fatal" in line]
        said = next(iter([*reasons, *lines]), f"exit code {done.returncode}")
        raise CannotBuildError(f"{command[0]} failed: {said.strip()}")
    return done.stdout


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path` locked; the kernel lets go of it when a process dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as e:
        raise CannotBuildError(f"{path.parent}: {e.strerror}") from e
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
