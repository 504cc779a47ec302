"""Optimizers of ten further libraries, each by the page that comes along: it is proven again here.

How the pages were proven when they were written is `ckptsurgeon.surgery.check_optimizer`.
"""

from __future__ import annotations

from collections import Counter
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
from tests.support.optimizer_page import DOCUMENT
from train import optimizer_runs as described

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


FOUND: dict[tuple[str, str], str] = {}
"""Each class that was run → right, refused, or what is wrong."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "of_matrices"), CASES)
def test_a_reset_is_right_or_refused_by_name(
    tmp_path: Path, name: str, of_matrices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    found = outcome(tmp_path, name, of_matrices)
    if FOUND.get(described_as(name)) in (None, "right"):  # GaLore is run twice
        FOUND[described_as(name)] = found
    assert found == ("refused" if REFUSED[described_as(name)] else "right")


def outcome(folder: Path, name: str, of_matrices: dict[str, Any]) -> str:
    """The next update after a reset is that of a new optimizer, or the refusal names the reason."""
    make = described.maker(CLASSES[name], of_matrices)
    net, optimizer = described.trained(make, described.SECOND)
    file = folder / "step-9" / "optimizer.pt"
    file.parent.mkdir()
    torch.save(optimizer.state_dict(), file)
    run = Run.open(folder, FORMAT)
    try:
        made = plan(run, from_data({"reset": ["moments"]}))
    except SurgeryError as error:
        by_name = f"{described_as(name)[1]} can't be made anew in place" in error.what
        return "refused" if by_name and REFUSED[described_as(name)] in error.what else error.what
    if not made.empty:
        apply(run, made)
    saved = torch.load(file, weights_only=False)
    weights = net.state_dict()
    mine, new = (described.following(weights, make, state) for state in (saved, None))
    return f"wrong: {differing}" if (differing := described.differ(mine, new)) else "right"


def test_the_count_is_that_of_the_docs() -> None:
    """Of all classes that were run above: docs/optimizers.md has the same table."""
    if len(FOUND) < len({*CLASSES} - {*NOT_RUN}):
        pytest.skip("only some classes were run")
    for package in sorted(PACKAGES.values()):
        count = Counter(found for (of, _), found in FOUND.items() if of == package)
        wrong = {*count} - {"right", "refused"}
        print(
            f"{package:18}{count['right']:4} right{count['refused']:4} refused{len(wrong):4} wrong"
        )
    count = Counter(FOUND.values())
    assert {*count} <= {"right", "refused"}
    (row,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| together |")]
    assert row == f"| together | {count['right']} | {count['refused']} | 0 | {len(NOT_RUN)} |"
