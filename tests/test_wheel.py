"""What a wheel holds: the surgeon, the trainer under its installed name, and no generic module."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPO


def test_the_wheel_holds_the_trainer_as_ckptsurgeon_train(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(REPO), str(source)], check=True)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet",
            "--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(source),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    wheel = next(tmp_path.glob("ckptsurgeon-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        scripts = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".so"))} <= {
        "ckptsurgeon",
        "ckptsurgeon_train",
    }
    for module in (
        "surgery/plan.py",
        "files/archives/append.py",
        "logs/lineage.py",
        "cli/look.py",
    ):
        assert f"ckptsurgeon/{module}" in names
    for module in ("__main__.py", "trainer.py", "configs/demo.yaml", "kernels/build.py"):
        assert f"ckptsurgeon_train/{module}" in names
    for source in ("common.h", "cpu/grad_norm_check.cpp", "cuda/grad_norm_check.cu"):
        assert f"ckptsurgeon_train/kernels/csrc/{source}" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert "ckptsurgeon = ckptsurgeon.cli:main" in scripts


def test_every_package_of_the_checkout_is_in_the_build() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 and newer

    listed = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
    packages = set(listed["tool"]["setuptools"]["packages"])
    folders = {
        ".".join(path.parent.relative_to(REPO).parts)
        for path in (REPO / "ckptsurgeon").rglob("__init__.py")
    }
    assert folders <= packages
