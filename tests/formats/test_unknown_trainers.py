"""Trainers that no format knows, operated on by the page that `draft-format` writes: trained and
resumed by the libraries themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.formats.described.draft import draft
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report import draft_page
from tests.support.launch import run_module
from tests.support.snapshot import snapshot
from tests.support.unknown_trainers import FOLDER

pytestmark = pytest.mark.formats


@pytest.fixture(params=["fvcore", "torchtnt"])
def library(request: pytest.FixtureRequest) -> str:
    if not FOLDER.is_dir():
        pytest.skip("make test-formats installs these trainers")
    return str(request.param)


def program(library: str, root: Path, *options: str) -> str:
    return run_module("tests.support.unknown_trainers", library, root, *options).stdout


def drafted(library: str, folder: Path) -> tuple[Run, str]:
    """A run of the library, opened by the page that is drafted of it, and the page."""
    root = folder / "run"
    root.mkdir()
    program(library, root)
    page = folder / "page.yaml"
    page.write_text(draft_page(draft(root)))
    return Run.open(root, str(page)), str(page)


def test_what_the_draft_promises_is_what_the_library_loads(library: str, tmp_path: Path) -> None:
    run, page = drafted(library, tmp_path)
    root = run.root
    before = snapshot(root)
    to = run.steps()[-2]
    adam_step = look.inspect(run, to).promise.adam_step
    recipe = {"rollback": {"to": to}, "set": {"lr": "0.5x", "beta2": 0.97, "eps": 1e-6}}
    plan = surgery.plan(run, from_data(recipe))
    receipt = surgery.apply(run, plan)
    resumed = loaded(library, root)
    assert plan.promise is not None
    assert resumed["lr"] == pytest.approx(plan.promise.lr, rel=1e-12)
    assert resumed["betas"] == [0.9, 0.97] and resumed["eps"] == 1e-6
    assert resumed["adam_step"] == plan.promise.adam_step == adam_step
    assert resumed["norm"] > 0
    run = Run.open(root, page)
    surgery.apply(run, surgery.plan_undo(run, receipt.id))
    assert snapshot(root) == before


def test_a_reset_is_loaded_too(library: str, tmp_path: Path) -> None:
    run, _ = drafted(library, tmp_path)
    surgery.apply(run, surgery.plan(run, from_data({"reset": ["moments"]})))
    resumed = loaded(library, run.root)
    assert resumed["adam_step"] == 0 and resumed["norm"] == 0


def loaded(library: str, root: Path) -> dict[str, Any]:
    """What the library loads, in a copy: it trains on and saves there."""
    copy = root.with_name("copy")
    shutil.copytree(root, copy, symlinks=True)
    said: dict[str, Any] = json.loads(program(library, copy, "--resume").splitlines()[0])
    shutil.rmtree(copy)
    return said
