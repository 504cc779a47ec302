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
from tests.support.snapshot import snapshot

pytestmark = pytest.mark.long


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
    assert {top for top in tops if not top.endswith((".dist-info", ".data", ".so"))} <= {
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


@pytest.mark.slow
def test_what_make_dist_builds_installs_into_bare_environments(
    trained: Trained, tmp_path: Path
) -> None:
    """By each Python that is here, from 3.10 on: its own wheel, and the one without compiled
    readers. What they need comes from the index."""
    dist = tmp_path / "dist"
    subprocess.run(["make", "dist", f"DIST={dist}"], cwd=REPO, check=True, capture_output=True)
    wheels = {wheel.name.split("-")[2]: wheel for wheel in dist.glob("*.whl")}
    assert len(list(dist.glob("*.tar.gz"))) == 1
    assert len(wheels) > 1 and "py3" in wheels
    root = trained()
    before = snapshot(root)
    for tag, wheel in wheels.items():
        python = sys.executable if tag == "py3" else f"python3.{tag[3:]}"
        home = tmp_path / tag
        subprocess.run([python, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)

        def surgeon(*words: str, home: Path = home) -> str:
            command = [str(home / "bin" / "ckptsurgeon"), *words]
            return subprocess.run(
                command, cwd=tmp_path, check=True, capture_output=True, text=True
            ).stdout

        kind = "readers in Python: slower" if tag == "py3" else "compiled readers"
        assert surgeon("--version").rstrip().endswith(kind)
        assert "step 9 uses lr" in surgeon("set-lr", "5e-4", "--yes", "-C", str(root))
        surgeon("undo", "--yes", "-C", str(root))
        surgeon("prune", "--keep", "0", "--yes", "-C", str(root))
        assert {k: v for k, v in snapshot(root).items() if ".ckptsurgeon" not in str(k)} == {
            k: v for k, v in before.items() if ".ckptsurgeon" not in str(k)
        }
        assert (home / "share" / "man" / "man1" / "ckptsurgeon.1").is_file()
