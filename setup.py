"""Builds the native readers of event files and shards where a C++ compiler is; without one they are
left out, and the package reads both in pure Python. Everything else is in pyproject.toml."""

from __future__ import annotations

from setuptools import Extension, setup

try:
    import pybind11
except ImportError:
    extensions = []
else:
    headers = {
        "events": ("crc32c", "file", "message"),
        "shards": ("directory", "scan", "tensors"),
    }
    extensions = [
        Extension(
            f"ckptsurgeon.files._{name}",
            [f"csrc/{name}/module.cpp"],
            depends=[f"csrc/{name}/{header}.hpp" for header in headers[name]],
            include_dirs=[pybind11.get_include()],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        )
        for name in headers
    ]

setup(ext_modules=extensions)
