"""Builds the native event file module where a C++ compiler is; without one it is left out, and the
package reads event files in pure Python. Everything else is in pyproject.toml."""

from __future__ import annotations

from setuptools import Extension, setup

try:
    import pybind11
except ImportError:
    extensions = []
else:
    extensions = [
        Extension(
            "ckptsurgeon.files._events",
            ["csrc/events/module.cpp"],
            depends=[f"csrc/events/{name}.hpp" for name in ("crc32c", "file", "message")],
            include_dirs=[pybind11.get_include()],
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        )
    ]

setup(ext_modules=extensions)
