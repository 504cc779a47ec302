"""The examples of docs/api.md, and the one of the package, run as they stand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptsurgeon
from tests.conftest import Trained
from tests.support.launch import REPO
from tests.support.tiny_run import make_run


def blocks() -> list[str]:
    """The examples of the page."""
    page = (REPO / "docs" / "api.md").read_text("utf-8")
    found = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(found) > 5
    return found


def test_the_page_runs_from_top_to_bottom(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained())
    names: dict[str, object] = {}
    for block in blocks():
        exec(block, names)
    assert "run [2, 4, 6, 8] 8\n" in capsys.readouterr().out


def test_the_first_example_of_the_package_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run(tmp_path / "run"))
    _, _, example = (ckptsurgeon.__doc__ or "").partition("\n\n")
    names: dict[str, object] = {}
    exec(example, names)
    receipt = names["receipt"]
    assert isinstance(receipt, ckptsurgeon.Receipt)
    assert (receipt.title, receipt.why) == ("set lr=3e-05", "loss spike")


def test_every_public_name_is_there() -> None:
    assert [name for name in ckptsurgeon.__all__ if not hasattr(ckptsurgeon, name)] == []


def test_no_public_name_is_that_of_a_module() -> None:
    """An import of the module would put it in the place of the function."""
    package = Path(ckptsurgeon.__file__).parent
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    own = {
        name for name in ckptsurgeon.__all__ if getattr(ckptsurgeon, name).__class__ is not type(re)
    }
    assert own & modules == set()


def test_a_type_checker_sees_every_public_name() -> None:
    """The sections are public by the table of operations, which it can't read."""
    tree = ast.parse(Path(ckptsurgeon.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = [name.asname for node in ast.walk(block) if isinstance(node, ast.ImportFrom)
            for name in node.names]  # fmt: skip
    assert sorted(map(str, seen)) == ckptsurgeon.__all__


def test_the_names_are_seen_before_they_are_loaded() -> None:
    code = "import ckptsurgeon; print(set(ckptsurgeon.__all__) <= set(dir(ckptsurgeon)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.stdout == "True\n", done.stderr


def test_the_page_type_checks_as_a_callers_code(tmp_path: Path) -> None:
    caller = tmp_path / "caller.py"
    caller.write_text("\n".join(blocks()))
    words = [sys.executable, "-m", "mypy", "--strict", str(caller)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPO)
    assert done.stdout.startswith("Success"), done.stdout + done.stderr
