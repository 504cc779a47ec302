"""Optimizers of ten further libraries, each by the page that comes along: it is proven again here.

How the pages were proven when they were written is `ckptsurgeon.surgery.check_optimizer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, apply, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.optimizers import pages
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.check_optimizer import FORMAT
from tests.support.optimizer_packages import NOT_RUN, PACKAGES, classes
from train import describe_optimizer as described

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
REFUSED = {(entry.source.partition(" ")[0], entry.name): entry.refused for entry in pages.shipped()}
"""(package, class) of each shipped page → why it can't be reset; empty where it can."""
CLASSES = dict(classes())
PROJECTED = {"rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
"""What the Trainer puts into the group of the matrices for `optim="galore_adamw"`."""


def described_as(name: str) -> tuple[str, str]:
    """The package and the class of `module.Class`."""
    module, _, own = name.rpartition(".")
    return PACKAGES[module], own


def test_each_class_is_described_or_it_is_said_why_not() -> None:
    assert {described_as(name) for name in CLASSES} - {*map(described_as, NOT_RUN)} == {*REFUSED}
    assert {*NOT_RUN} <= {*CLASSES}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted({*CLASSES} - {*NOT_RUN})),
    *((name, PROJECTED) for name in sorted({*CLASSES} - {*NOT_RUN}) if ".GaLore" in name),
]


@pytest.mark.parametrize(("name", "of_matrices"), CASES)
def test_a_reset_is_right_or_refused_by_name(
    tmp_path: Path, name: str, of_matrices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    make = described.maker(CLASSES[name], of_matrices)
    net, optimizer = described.trained(make, described.SECOND)
    file = tmp_path / "step-9" / "optimizer.pt"
    file.parent.mkdir()
    torch.save(optimizer.state_dict(), file)
    run = Run.open(tmp_path, FORMAT)
    if reason := REFUSED[described_as(name)]:
        with pytest.raises(SurgeryError) as refused:
            plan(run, from_data({"reset": ["moments"]}))
        assert "can't be made anew in place" in refused.value.what and reason in refused.value.what
        return
    made = plan(run, from_data({"reset": ["moments"]}))
    if not made.empty:
        apply(run, made)
    saved = torch.load(file, weights_only=False)
    weights = net.state_dict()
    mine, new = (described.following(weights, make, state) for state in (saved, None))
    assert described.differ(mine, new) == ""
