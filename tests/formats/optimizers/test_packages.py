"""Optimizers of further libraries, as far as they are installed, by the pages that come along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, apply, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.optimizers import pages
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.check_optimizer import FORMAT
from tests.support.optimizer_packages import classes
from train import describe_optimizer

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
DESCRIBED = {
    (entry.source.partition(" ")[0].replace("-", "_"), entry.name) for entry in pages.shipped()
}
SOURCES = {"optimi": "torch_optimi", "timm.optim": "timm"}
CASES = {
    name: cls
    for name, cls in classes()
    for library, _, own in [name.rpartition(".")]
    if (SOURCES.get(library, library), own) in DESCRIBED
}
"""`module.Class` and the class of those that a page describes."""


@pytest.mark.skipif(not CASES, reason="none of the libraries is installed")
@pytest.mark.parametrize("name", CASES or ["none"])
def test_a_reset_is_right_or_refused_by_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls: Any = CASES[name]
    monkeypatch.setattr(describe_optimizer, "load", lambda _: cls)
    monkeypatch.setattr(describe_optimizer, "variants", lambda _, given: [dict(given)])
    describe_optimizer.save(tmp_path, name, {})
    run = Run.open(tmp_path / "0" / "reset", FORMAT)
    try:
        made = plan(run, from_data({"reset": ["moments"]}))
    except SurgeryError as error:
        assert "can't begin anew in place" in error.what, error.what
        return
    if not made.empty:
        apply(run, made)
    (found,) = describe_optimizer.compare(tmp_path, name, {})["variants"]
    assert found["reset"] == ""
