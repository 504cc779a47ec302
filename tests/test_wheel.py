"""What a wheel holds: the surgeon, the trainer under its installed name, and no generic module."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import Trained
from tests.support.launch import REPO


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what is committed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "clone", "-q", str(REPO), str(source)], check=True)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet",
            "--disable-pip-version-check", "--wheel-dir", str(folder), str(source),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return next(folder.glob("ckptsurgeon-*.whl"))


def declared(names: Iterable[str]) -> set[str]:
    """These distributions and all that they need, as installed here, without extras."""
    done: set[str] = set()
    todo = [canonicalize_name(name) for name in names]
    while todo:
        name = todo.pop()
        if name not in done:
            done.add(name)
            needs = map(Requirement, distribution(name).requires or ())
            todo += [
                canonicalize_name(need.name)
                for need in needs
                if need.marker is None or need.marker.evaluate({"extra": ""})
            ]
    return done


def test_a_surgery_needs_nothing_that_the_wheel_does_not_declare(
    wheel: Path, trained: Trained, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA")))
    needs = Metadata.from_email(text, validate=False).requires_dist or ()
    names = [need.name for need in needs if need.marker is None]
    assert not {"torch", "deepspeed", "tensorboard"} & declared(names)

    home = tmp_path / "venv"
    venv.create(home)
    site = next(home.glob("lib/python*/site-packages"))
    for name in declared(names):
        for top in {file.parts[0] for file in distribution(name).files or ()} - {
            "..",
            "__pycache__",
        }:
            (site / top).symlink_to(distribution(name).locate_file(top))
    install = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    subprocess.run([*install, "--no-deps", "--quiet", str(wheel)], check=True, capture_output=True)

    def surgeon(*words: str, status: int = 0) -> str:
        done = subprocess.run(
            [str(home / "bin" / "ckptsurgeon"), *words, "-C", str(root)],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    root = trained()
    before = {p: p.read_bytes() for p in root.glob("global_step8/*")}
    assert "step 9 uses lr" in surgeon("set-lr", "5e-4", "--yes")
    assert {p: p.read_bytes() for p in root.glob("global_step8/*")} != before
    assert "torch is not installed" in surgeon("relaunch", status=1)
    surgeon("undo", "--yes")
    assert {p: p.read_bytes() for p in root.glob("global_step8/*")} == before


def test_the_wheel_holds_the_trainer_as_ckptsurgeon_train(wheel: Path) -> None:
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
    assert "ckptsurgeon = ckptsurgeon.__main__:main" in scripts


def test_every_package_of_the_checkout_is_in_the_build() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 and newer

    listed = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
    packages = set(listed["tool"]["setuptools"]["packages"])
    folders = {
        ".".join(path.parent.relative_to(REPO).parts)
        for path in (REPO / "ckptsurgeon").rglob("__init__.py")
    }
    assert folders <= packages
