"""Builds the native readers of event files and shards where a C++ compiler is; without one, or with
CKPTSURGEON_PURE set, they are left out, and the package reads both in pure Python. Everything else
is in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

try:
    import pybind11
except ImportError:
    pybind11 = None
if pybind11 is None or os.environ.get("CKPTSURGEON_PURE"):
    extensions = []
else:
    # Each lies beside its half in Python: the folder of its sources, and their headers.
    modules = {
        "ckptsurgeon.logs.tensorboard._events": Path("csrc", "events"),
        "ckptsurgeon.files._shards": Path("csrc", "shards"),
    }
    extensions = [
        Extension(
            name,
            [str(folder / "module.cpp")],
            depends=sorted(map(str, folder.glob("*.hpp"))),
            include_dirs=[pybind11.get_include()],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        )
        for name, folder in modules.items()
    ]

setup(ext_modules=extensions, options={"build_ext": {"parallel": True}})
