"""Builds the native readers of event files and shards where a C++ compiler is; without one they are
left out, and the package reads both in pure Python. Everything else is in pyproject.toml."""

from __future__ import annotations

from setuptools import Extension, setup

try:
    import pybind11
except ImportError:
    extensions = []
else:
    # Each lies beside its half in Python: the folder of its sources, and their headers.
    modules = {
        "ckptsurgeon.logs.tensorboard._events": ("events", ("crc32c", "file", "message")),
        "ckptsurgeon.files._shards": (
            "shards",
            ("chunks", "directory", "metadata", "numbered", "opcodes", "scan", "stack", "tensors"),
        ),
    }
    extensions = [
        Extension(
            name,
            [f"csrc/{folder}/module.cpp"],
            depends=[f"csrc/{folder}/{header}.hpp" for header in headers],
            include_dirs=[pybind11.get_include()],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        )
        for name, (folder, headers) in modules.items()
    ]

setup(ext_modules=extensions)
