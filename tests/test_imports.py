"""What a start of the command line loads, and what tests import."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tomllib

from ckptsurgeon import report
from tests.conftest import LONGEST
from tests.support.launch import REPO
from tests.support.tiny_run import make_run

HEAVY = ("torch", "deepspeed", "tensorboard", "numpy", "omegaconf", "yaml")


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPO
    )
    return set(done.stdout.splitlines())


def after_command(*words: str) -> set[str]:
    """What `ckptsurgeon WORDS` loads."""
    return loaded_after(
        f"import contextlib, sys; sys.argv = ['ckptsurgeon', *{words}]\n"
        "from ckptsurgeon.cli import main\n"
        "with contextlib.suppress(SystemExit): main()"
    )


def test_the_command_line_loads_no_heavy_library() -> None:
    assert not loaded_after("import ckptsurgeon.cli") & set(HEAVY)


def test_help_loads_neither_runs_nor_formats() -> None:
    loaded = after_command("--help")
    assert "ckptsurgeon.cli.options" in loaded
    rooms = ("formats", "logs", "look", "plans", "run", "surgery", "transaction")
    heavy = {name for name in loaded if name.startswith(tuple(f"ckptsurgeon.{r}." for r in rooms))}
    assert heavy == {"ckptsurgeon.plans.frozen"}, "which makes the classes of the options"


@pytest.mark.parametrize("words", [["status"], ["ready"], ["ready", "--quick", "--json"]])
def test_a_look_loads_nothing_that_edits_and_no_log(tmp_path: Path, words: list[str]) -> None:
    """`ready` is in prologs, and its time is that of its imports."""
    root = make_run(tmp_path / "run")
    loaded = after_command(*words, "-C", str(root))
    assert "ckptsurgeon.formats.huggingface.checkpoint" in loaded
    editing = {"files.archives.append", "files.archives.retype", "surgery"}
    editing |= {f"transaction.{name}" for name in ("journal", "redo", "staging")}
    assert not loaded & {f"ckptsurgeon.{name}" for name in editing}
    shown = {"attics", "copies", "differences", "format_checks", "optimizer_checks"}
    assert not loaded & {f"ckptsurgeon.report.{name}" for name in shown}
    if words[0] == "ready":
        assert not {name for name in loaded if name.startswith("ckptsurgeon.logs")}
        assert not loaded & {"socket", "tempfile", "decimal"}


def test_the_report_has_each_of_its_names_whatever_is_loaded() -> None:
    """A module that is called as a function is would be in its place once it is loaded."""
    modules = [
        f"ckptsurgeon.report.{path.stem}" for path in (REPO / "ckptsurgeon/report").glob("*.py")
    ]
    for name in modules:
        if not name.endswith("_"):
            importlib.import_module(name)
    assert len(report.__all__) > 30
    found = {name: getattr(report, name) for name in report.__all__}
    assert [name for name, it in found.items() if isinstance(it, types.ModuleType)] == []


def test_no_module_of_the_surgeon_loads_what_executes_checkpoints() -> None:
    modules = [
        ".".join(path.relative_to(REPO).with_suffix("").parts)
        for path in (REPO / "ckptsurgeon").rglob("*.py")
        if path.name != "__main__.py"
    ]
    loaded = loaded_after("\n".join(f"import {name}" for name in modules))
    assert not loaded & {"torch", "deepspeed", "tensorboard"}


def test_no_test_module_imports_another() -> None:
    """What two of them need lies in tests/support, or beside them in a module that is no test."""
    modules = {path: imported(path) for path in sorted((REPO / "tests").rglob("*.py"))}
    assert any("tests.support.launch" in names for names in modules.values())
    found = [
        f"{path.relative_to(REPO)}: {name}"
        for path, names in modules.items()
        for name in names
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert found == []


def test_every_test_is_collected_without_the_libraries_of_make_test_formats() -> None:
    """`make test` collects them all, and installs none of these."""
    extras = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = extras["optional-dependencies"]["formats"] + ["megatron", "olmo_core", "nemo", "verl"]
    absent = {name.partition(">=")[0].replace("-", "_") for name in wanted}
    assert {"transformers", "accelerate", "torchtitan"} < absent
    modules = [
        ".".join(path.relative_to(REPO).with_suffix("").parts)
        for path in sorted((REPO / "tests").rglob("test_*.py"))
        if "mark.formats" in path.read_text("utf-8")
    ]
    code = f"""
import importlib, sys, pytest
sys.modules.update(dict.fromkeys({sorted(absent)!r}))
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except pytest.skip.Exception:
        pass
    except ModuleNotFoundError as error:
        print(name, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO
    )
    assert len(modules) > 20
    assert done.stdout == ""


@pytest.mark.parametrize(("folder", "most"), [("ckptsurgeon", 22), ("ckptsurgeon/formats", 18)])
def test_a_reader_can_survey_the_rooms(folder: str, most: int) -> None:
    inside = {
        path.parent.name if path.name == "__init__.py" else path.stem
        for pattern in ("*.py", "*/__init__.py")
        for path in (REPO / folder).glob(pattern)
    }
    assert len(inside - {Path(folder).name, "__main__"}) <= most


def test_no_file_is_longer_than_a_reader_keeps_in_mind() -> None:
    """400 lines, in what we write by hand."""
    folders = ("ckptsurgeon", "train", "tests", "bench")
    paths = [path for folder in folders for path in (REPO / folder).rglob("*.py")]
    longer = {str(path) for path in paths if len(path.read_text("utf-8").splitlines()) > 400}
    assert len(paths) > 500 and not longer


def test_the_rooms_lie_on_at_most_eleven_layers_with_eight_modules_beside_them() -> None:
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    assert len(contracts["contracts"][0]["layers"]) <= 11
    beside = {path.name for path in (REPO / "ckptsurgeon").glob("*.py")}
    assert len(beside - {"__init__.py", "__main__.py"}) <= 8


def imported(path: Path) -> set[str]:
    """Every module that `path` imports, and every name in it that may be a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = path.relative_to(REPO).parts[: -node.level] if node.level else ()
            module = ".".join([*parent, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def test_the_longest_modules_are_there() -> None:
    """A name that leads nowhere would put its module last again."""
    assert [name for name in LONGEST if not (REPO / "tests" / name).is_file()] == []


@pytest.mark.parametrize("words", [["status"], ["set", "lr=5e-4", "--yes"]])
def test_a_small_surgery_loads_no_yaml_and_no_pydantic(tmp_path: Path, words: list[str]) -> None:
    root = make_run(tmp_path / "run")
    loaded = after_command(*words, "-C", str(root))
    assert "ckptsurgeon.formats.huggingface.checkpoint" in loaded
    assert not loaded & {*HEAVY, "pydantic"}
