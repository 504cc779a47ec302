"""A trainer that goes on from the highest number of all its files loads the step that a plan is of,
also where some of them have a name that no page has: `best_model_24.pth` by `checkpoint_20.pth`."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.look.ready import ready
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back
from tests.support.tiny_run import GROUP, write_torch_file

NAMES = ("best_model_{}.pth", "best-{:08d}.pth", "final_{}.pth", "v2_best_{}.pth")
DIGITS = re.compile(r"\d+")
SET = from_data({"set": {"beta2": 0.9}})


@dataclass(frozen=True)
class Layout:
    """Steps by the page, and whole steps by another name. All are `counted`, or none is."""

    steps: Sequence[int]
    strays: Sequence[tuple[str, int]]
    counted: bool
    folders: bool = False
    weights: int = 0
    to: int = 0

    def write(self, root: Path) -> Run:
        for step in self.steps:
            name = f"step_{step}/optim.pth" if self.folders else f"checkpoint_{step}.pth"
            save(root / name, step, self.counted)
        for name, step in self.strays:
            named = name.format(step)
            named = f"{Path(named).stem}/optim.pth" if self.folders else named
            save(root / named, step, self.counted)
        if self.weights:
            write_torch_file(root / f"weights_{self.weights}.pth", {"model": {}})
        pattern = "step_{step}/optim.pth" if self.folders else "checkpoint_{step}.pth"
        fields = "    fields: {iteration: [[step]]}\n" if self.counted else ""
        (root / "ckptsurgeon.yaml").write_text("format: page.yaml\n")
        (root / "page.yaml").write_text(
            f'name: own\nfiles:\n  "{pattern}":\n    optimizers: [[optimizer]]\n{fields}'
        )
        return Run.open(root)


def save(path: Path, step: int, counted: bool) -> None:
    adam = {"state": {0: {"step": float(step)}}, "param_groups": [{**GROUP, "params": [0]}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_torch_file(path, {"optimizer": adam, **({"step": step} if counted else {})})


def loaded(root: Path) -> int:
    """Adam's step in what such a trainer loads: by its rule, and by no code of the surgeon's."""
    numbered = {
        max(map(int, found)): path
        for path in (*root.glob("*.pth"), *root.glob("*/*.pth"))
        if (found := DIGITS.findall(str(path.relative_to(root)))) and "optimizer" in tree(path)
    }
    return int(tree(numbered[max(numbered)])["optimizer"]["state"][0]["step"])


def tree(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        found: dict[str, Any] = pickle.loads(archive.read(f"{path.stem}/data.pkl"))
    return found


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    steps = sorted(draw(st.sets(st.integers(3, 30), min_size=2, max_size=5)))
    strays = draw(
        st.lists(st.tuples(st.sampled_from(NAMES), st.integers(3, 40)), max_size=3, unique=True)
    )
    counted, folders = draw(st.booleans()), draw(st.booleans())
    to = draw(st.integers(0, len(steps) - 1))
    return Layout(steps, strays, counted, folders, draw(st.integers(0, 40)), to)


def holds(layout: Layout) -> None:
    """The law, for a rollback and for a surgery of the newest step; a refusal names what is so."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "run"
        root.mkdir()
        run = layout.write(root)
        before = snapshot(root)
        to = layout.steps[layout.to]
        recipes: dict[int, dict[str, Any]] = {
            to: {"rollback": {"to": to}, "reset": ["moments"]},
            run.latest(): {"set": {"beta2": 0.9}},
        }
        for step, recipe in recipes.items():
            try:
                surgery.apply(run, plan(run, from_data(recipe)))
            except SurgeryError as refused:
                names = [name.format(number).split(".")[0] for name, number in layout.strays]
                names += [f"weights_{layout.weights}"]
                assert any(name in refused.what for name in names)
                assert refused.next and snapshot(root) == before
                continue
            assert loaded(root) == (0 if "reset" in recipe else step)
            take_back(root, before)
            run = Run.open(root)


BEST = "best_model_{}.pth"
FIRST = (
    Layout((4, 8, 12), ((BEST, 13),), counted=True),
    Layout((4, 8, 12), ((BEST, 13),), counted=False),
    Layout((4, 8, 12), ((BEST, 10), (BEST, 12)), counted=True),
    Layout((4, 8, 12), ((BEST, 13),), counted=True, folders=True),
)


@pytest.mark.parametrize("layout", FIRST, ids=str)
def test_a_restart_by_the_highest_number_loads_what_a_plan_is_of(layout: Layout) -> None:
    holds(layout)


@pytest.mark.long
@settings(max_examples=60)
@given(layouts())
def test_so_it_does_with_other_names(layout: Layout) -> None:
    holds(layout)


def test_what_has_no_number_is_named(tmp_path: Path) -> None:
    run = Layout((4, 8), (("best.pth", 8),), counted=True).write(tmp_path)
    made = plan(run, from_data({"rollback": {"to": 4}}))
    (said,) = [text for text in made.warnings if text.startswith("best.pth holds step 8")]
    assert "mv" in said
    assert not [text for text in plan(run, SET).warnings if "best.pth" in text]


def test_so_is_what_counts_nothing(tmp_path: Path) -> None:
    """By when it was saved: as the newest epoch's, which each saves over."""
    run = Layout((4, 8), (("checkpoint.pth", 8),), counted=False).write(tmp_path)
    for name, when in (
        ("checkpoint_4.pth", 100),
        ("checkpoint_8.pth", 200),
        ("checkpoint.pth", 300),
    ):
        os.utime(tmp_path / name, (when, when))
    made = plan(run, from_data({"rollback": {"to": 4}}))
    assert [text for text in made.warnings if text.startswith("checkpoint.pth holds a step")]
    os.utime(tmp_path / "checkpoint.pth", (100, 100))
    made = plan(Run.open(tmp_path), from_data({"rollback": {"to": 4}}))
    assert not [text for text in made.warnings if text.startswith("checkpoint.pth")]


def test_a_whole_step_that_is_newer_is_told(tmp_path: Path) -> None:
    """By doctor and ready, with the command that helps."""
    run = Layout((4, 8), ((BEST, 9),), counted=True).write(tmp_path)
    with pytest.raises(SurgeryError, match="best_model_9\\.pth holds a step that no page names, 9"):
        plan(run, SET)
    told = [finding.what for finding in (*diagnose(run), *ready(run).found)]
    assert sum("best_model_9.pth" in what for what in told) == 2
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 8}})))
    assert not plan(Run.open(tmp_path), SET).empty and not ready(Run.open(tmp_path)).found


def test_a_pointer_says_what_a_restart_loads(tmp_path: Path) -> None:
    Layout((4, 8), ((BEST, 9),), counted=True).write(tmp_path)
    with (tmp_path / "page.yaml").open("a") as page:
        page.write('pointer: {file: latest.txt, text: "{step}"}\n')
    (tmp_path / "latest.txt").write_text("8")
    assert not plan(Run.open(tmp_path), SET).empty
