"""The kernels compile at first use, once, for any number of processes; or plain torch runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.compiled import SAID, compiled, sources_in
from tests.support.launch import REPO
from tests.train.kernels.torch_headers import NEWEST, OLDEST, headers
from train.kernels.build import (
    LIBRARY,
    CannotBuildError,
    Toolchain,
    build,
    cache_key,
    compile_commands,
    cuda_files,
    find_nvcc,
    find_toolchain,
    forget_failure,
    source_folder,
    wheels_of_cuda,
)
from train.kernels.library import check_code_for, load

PROBE = """
import json, sys, torch
from train.kernels import grad_norm_check, load
result = grad_norm_check([torch.ones(5)])[0].tolist()
print(json.dumps([load(), result]))
"""
NVCC = find_nvcc()
NEEDS_NVCC = pytest.mark.skipif(
    NVCC is None, reason="no nvcc on PATH, in $CUDA_HOME, or from the wheel nvidia-cuda-nvcc"
)
CUDA = cuda_files(source_folder())
# What the sources use of torch: all of it is in the headers of the oldest torch that is promised.
TORCH_NAMES = {
    "AOTI_TORCH_SUCCESS", "STABLE_TORCH_LIBRARY_IMPL", "STD_TORCH_CHECK", "TORCH_BOX",
    "aoti_torch_get_current_cuda_stream", "torch::headeronly::ScalarType", "torch::stable::Tensor",
    "torch::stable::accelerator::DeviceGuard", "torch::stable::accelerator::DeviceIndex",
    "torch::stable::empty_like", "torch::stable::new_empty", "torch::stable::parallel_for",
}  # fmt: skip


def compiler() -> Toolchain:
    try:
        return find_toolchain()
    except CannotBuildError as e:
        pytest.skip(str(e))


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that computes with a kernel and tells why it was not native, if it was not."""
    return subprocess.Popen(
        [sys.executable, "-c", PROBE],
        cwd=REPO,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_processes_that_start_at_once_build_one_library(tmp_path: Path) -> None:
    """By a compiler that is told last not to optimize: it is done in half the time."""
    quick = tmp_path / "quick"
    quick.write_text(f'#!/bin/sh\nexec {compiler().cxx} "$@" -O0\n')
    quick.chmod(0o755)
    started = [start(tmp_path, CXX=str(quick)), start(tmp_path, CXX=str(quick))]
    for process in started:
        out, err = process.communicate(timeout=600)
        assert (json.loads(out), err) == ([None, [5.0, 0.0]], "")
    folders = [path for path in (tmp_path / "ckptsurgeon").iterdir() if path.is_dir()]
    assert [[file.name for file in folder.iterdir()] for folder in folders] == [[LIBRARY]]


@pytest.mark.long
def test_without_a_compiler_plain_torch_computes_and_one_line_says_why(tmp_path: Path) -> None:
    out, err = start(tmp_path, PATH=str(tmp_path), CXX="").communicate(timeout=600)
    reason, result = json.loads(out)
    assert reason == "no C++ compiler on PATH (g++, c++, clang++)"
    assert result == [5.0, 0.0]
    assert err.count(reason) == 1


@pytest.mark.long
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_to_load(tmp_path: Path) -> None:
    compiler()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo fatal error: no luck >&2; exit 1; }")
    broken.chmod(0o755)
    out, err = start(tmp_path, CXX=str(broken)).communicate(timeout=600)
    assert json.loads(out) == [f"{broken} failed: fatal error: no luck", [5.0, 0.0]]
    assert "no luck" in err
    assert list(tmp_path.rglob("*.so")) == []


@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("echo; echo \"nvcc fatal   : Unsupported gpu architecture 'compute_90'\" >&2; exit 1",
         "nvcc fatal   : Unsupported gpu architecture 'compute_90'"),
        ("echo In file included from x.h: >&2; echo 'x.h(3): error: no luck' >&2; exit 2",
         "x.h(3): error: no luck"),
        ("kill -9 $$", "exit code -9"),
    ],
)  # fmt: skip
def test_a_nvcc_that_fails_is_quoted_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, says: str
) -> None:
    """Only what is asked of the GPU is faked: that there is one, and torch's CUDA."""
    compiler()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo 'release 13.0, V13' && exit\n{act}\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("train.kernels.build.device_kind", lambda: "cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(CannotBuildError) as told:
        build()
    assert str(told.value) == f"{nvcc} failed: {says}"
    assert list(tmp_path.rglob("*.so")) == []


def test_a_build_that_failed_is_not_repeated_by_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(folder: Path, *_: object) -> None:
        tried.append(folder)
        raise CannotBuildError("no luck")

    compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("train.kernels.build._compile_into", fail)
    for _ in range(2):
        with pytest.raises(CannotBuildError, match="no luck"):
            build()
    assert len(tried) == 1
    forget_failure()  # what `python -m train build-kernels` does first
    with pytest.raises(CannotBuildError, match="no luck"):
        build()
    monkeypatch.setattr("train.kernels.build.REMEMBERED", 0.0)
    with pytest.raises(CannotBuildError, match="no luck"):
        build()
    assert len(tried) == 3


@pytest.mark.long
def test_required_kernels_that_cannot_be_built_stop_the_start(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "CXX": "", "CKPTSURGEON_KERNELS": "require"}
    process = start(tmp_path, **environment)
    _, err = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "RankError: the native kernels can't be used: no C++ compiler on PATH" in err


@pytest.mark.long
def test_switched_off_kernels_are_not_built_and_not_mentioned(tmp_path: Path) -> None:
    out, err = start(tmp_path, CKPTSURGEON_KERNELS="off").communicate(timeout=600)
    assert (json.loads(out), err) == (["CKPTSURGEON_KERNELS=off", [5.0, 0.0]], "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_user_without_a_home_gets_plain_torch_and_a_reason(tmp_path: Path) -> None:
    """A container that runs under a number which its /etc/passwd does not have."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    become = "import os, train.kernels; os.setuid(54321)"
    done = subprocess.run(
        [sys.executable, "-c", f"{become}\n{PROBE}"],
        cwd=REPO,
        env={k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reason, result = json.loads(done.stdout)
    assert "home directory" in reason and result == [5.0, 0.0]


def test_a_library_without_code_for_the_gpu_is_not_taken_for_native() -> None:
    """Where torch finds a GPU and no nvcc is, what `auto` chooses must not be slower than torch."""
    if load() is not None or torch.version.cuda:
        pytest.skip("needs native kernels of a torch for CPUs")
    check_code_for("cpu")
    with pytest.raises(CannotBuildError, match="no nvcc of CUDA"):
        check_code_for("cuda")


def test_nvcc_is_found_in_cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == str(nvcc)


def test_a_changed_source_is_another_library(tmp_path: Path) -> None:
    toolchain = compiler()
    copy = Path(shutil.copytree(source_folder(), tmp_path / "kernels"))
    before = cache_key(copy, toolchain)
    assert before == cache_key(source_folder(), toolchain)
    (copy / "common.h").write_text("// changed")
    assert cache_key(copy, toolchain) != before


@NEEDS_NVCC
@pytest.mark.long
def test_the_grid_of_four_million_rows_can_be_launched(tmp_path: Path) -> None:
    """CUDA has 2^31 - 1 blocks in x, but 65535 in y. It is computed on the host: no GPU needed."""
    source = tmp_path / "grid.cu"
    source.write_text(
        '#include <cstdio>\n#include "rows.cuh"\nint main() {\n'
        "  const dim3 g = ckptsurgeon::column_grid(int64_t{1} << 22, 1000, 1);\n"
        '  std::printf("%u %u %u", g.x, g.y, g.z);\n}\n'
    )
    words = [NVCC, "-std=c++20", f"-I{source_folder() / 'cuda'}", str(source), "-o", "grid"]
    subprocess.run([word for word in words if word], cwd=tmp_path, check=True)
    told = subprocess.run([tmp_path / "grid"], capture_output=True, text=True, check=True)
    x, y, z = map(int, told.stdout.split())
    assert (x < 2**31, y < 2**16, z) == (True, True, 1)
    assert x * y == 4 * 256  # columns of 256 threads, times the strips


@pytest.mark.thinned(9)
@NEEDS_NVCC
@pytest.mark.parametrize("source", CUDA, ids=[file.name for file in CUDA])
@pytest.mark.long
def test_the_cuda_code_compiles(source: Path, tmp_path: Path) -> None:
    toolchain = Toolchain(compiler().cxx, NVCC, ())
    commands, _ = compile_commands(source_folder(), toolchain, tmp_path)
    (command,) = [words[:-2] for words in commands if str(source) in words]  # without -o FILE
    if source.suffix == ".cu":  # one architecture is enough to see that it compiles
        command = [*(w for w in command if "-gencode" not in w), "-arch=sm_90"]
    made = compiled(command, sources_in(source_folder()), torch.__version__)
    assert "warning" not in (made / SAID).read_text("utf-8")


def test_the_sources_use_of_torch_what_its_oldest_release_has() -> None:
    """A new name here: `make torch-headers`, see the test below pass, then add it to the list."""
    used = set()
    for file in source_folder().rglob("*"):
        if file.suffix in (".h", ".cpp", ".cu", ".cuh"):
            text = re.sub(r"//.*|#include.*", "", file.read_text("utf-8"))
            used |= set(re.findall(r"\btorch(?:::\w+)+|\baoti_torch_\w+", text))
            used |= set(re.findall(r"\b(?:AOTI|STABLE|STD|TORCH|C10|AT)_[A-Z]\w*", text))
    assert used == TORCH_NAMES


@NEEDS_NVCC
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_all_sources_compile_against_the_headers_of(version: str, tmp_path: Path) -> None:
    include = headers(version)
    if include is None:
        pytest.skip(f"the headers of torch {version} are not here: make torch-headers")
    toolchain = Toolchain(compiler().cxx, NVCC, ())
    commands, _ = compile_commands(source_folder(), toolchain, tmp_path, include)
    for command in commands:
        if not any(word.endswith(".cu") for word in command):  # these include no header of torch
            quick = ["-O0" if word == "-O3" else word for word in command]
            done = subprocess.run(quick, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_nvcc_of_the_wheel_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install nvidia-cuda-nvcc` puts it beside torch; its runtime library lies in `lib`."""
    site = tmp_path / "site-packages"
    nvcc = site / "nvidia" / "cu13" / "bin" / "nvcc"
    for file in (nvcc, site / "torch" / "__init__.py"):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    monkeypatch.setattr("torch.__file__", str(site / "torch" / "__init__.py"))
    assert nvcc.parents[1] in wheels_of_cuda()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert find_nvcc() == str(nvcc)
    _, link = compile_commands(source_folder(), Toolchain("c++", str(nvcc), ()), tmp_path)
    assert f"-L{site}/nvidia/cu13/lib" in link
