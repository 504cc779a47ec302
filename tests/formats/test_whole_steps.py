"""A rollback moves whole steps: also what no page names, by the number in its name; or refuses."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork
from tests.support.snapshot import snapshot
from tests.support.tiny_run import GROUP, write_torch_file

DESCRIBED = ("optim_{step}.pt", "optim_{step}_rank{rank}.pt", "ckpt/optim-{step}.pt",
             "step_{step}/optim.pt", "epoch={epoch}-step={step}.pt")  # fmt: skip
BESIDE = ("model_{step}.pt", "meta_{step}.json", "ema-{step}/w.bin", "rng{step}_rank1.bin",
          "weights/model_{step}.safetensors", "epoch=1-step={step}-loss=0.25.yaml")  # fmt: skip
OTHER = ("model_{0}b.pt", "clip.mp{0}", "loss_0.{0}.png", "notes/{0}b", "sum.h{0}", ".cache_{0}",
         "config_7777.json", "a/b/c_{0}.txt")  # fmt: skip
"""No step's, whatever number they have; {0} is one of a step that leaves."""


def call(*words: object) -> Result:
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(
        app, [str(word) for word in words]
    )


@dataclass(frozen=True)
class Layout:
    """A run: `width` of its numbers, or 0 for numbers without zeros."""

    described: str
    beside: Sequence[str]
    width: int
    steps: Sequence[int]
    to: int
    half_saved: bool

    @property
    def format(self) -> str:
        return f"torch:{self.described}="

    def name(self, pattern: str, step: int) -> str:
        number = f"{step:0{self.width}}"
        return pattern.replace("{step}", number).replace("{rank}", "0").replace("{epoch}", "1")

    def write(self, root: Path) -> None:
        for step in self.steps:
            adam = {"state": {0: {"step": float(step)}}, "param_groups": [{**GROUP, "params": [0]}]}
            path = root / self.name(self.described, step)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_torch_file(path, adam)
            for pattern in self.beside:
                self.put(root, self.name(pattern, step))
        for pattern in self.beside if self.half_saved else ():
            self.put(root, self.name(pattern, self.beyond))
        for pattern in OTHER:
            self.put(root, pattern.format(self.steps[-1]))

    @property
    def beyond(self) -> int:
        return self.steps[-1] + 5

    def put(self, root: Path, name: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())

    def of(self, step: int) -> set[str]:
        """The names of a step, folders by what is in them."""
        return {self.name(pattern, step) for pattern in (self.described, *self.beside)}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    # Neighbours are 3 apart or more: ranks, epochs and decimals beside them are no steps.
    gaps = draw(st.lists(st.integers(3, 40), min_size=2, max_size=4))
    steps = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    return Layout(
        draw(st.sampled_from(DESCRIBED)),
        draw(st.lists(st.sampled_from(BESIDE), unique=True)),
        draw(st.sampled_from((0, 6))),
        steps,
        draw(st.sampled_from(steps)),
        draw(st.booleans()),
    )


NANOCHAT = Layout("optim_{step}_rank{rank}.pt", BESIDE[:2], 6, (4, 8), 4, half_saved=False)


@example(NANOCHAT)
@settings(max_examples=25)
@given(layouts())
@pytest.mark.long
def test_nothing_of_a_step_that_left_stays_and_undo_is_exact(layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        layout.write(root)
        before = snapshot(root)
        files = {name for name, (kind, *_) in before.items() if kind == "file"}
        run = Run.open(root, layout.format)
        gone = {name for step in layout.steps if step > layout.to for name in layout.of(step)}
        if layout.half_saved:
            gone |= layout.of(layout.beyond) - {layout.name(layout.described, layout.beyond)}
        made = plan(run, from_data({"rollback": {"to": layout.to}}))
        assert made.empty is not bool(gone)
        if made.empty:
            return
        surgery.apply(run, made)
        after = {name for name, (kind, *_) in snapshot(root).items() if kind == "file"}
        assert after == files - gone
        surgery.apply(run, surgery.plan_undo(run))
        assert snapshot(root) == before


@settings(max_examples=10)
@given(layouts())
def test_a_fork_has_the_whole_step(layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, branch = Path(folder) / "run", Path(folder) / "branch"
        layout.write(root)
        fork(Run.open(root, layout.format), layout.to, branch, from_data({}), "copy")
        names = {
            path.relative_to(branch).as_posix() for path in branch.rglob("*") if path.is_file()
        }
        assert names == layout.of(layout.to)


def refused(root: Path, layout: Layout, name: str) -> SurgeryError:
    """The refusal of a rollback, which names `name` and leaves everything."""
    before = snapshot(root)
    with pytest.raises(SurgeryError) as error:
        plan(Run.open(root, layout.format), from_data({"rollback": {"to": layout.to}}))
    assert name in error.value.what
    assert snapshot(root) == before
    return error.value


@pytest.mark.parametrize("name", ["config_000008.json", "optim_000008.txt", "old_000008/w.bin"])
def test_a_number_that_may_be_another_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """No other step has such a name. Both ways on work: a page that has it, and another folder."""
    root = tmp_path / "run"
    NANOCHAT.write(root)
    NANOCHAT.put(root, name)
    first = name.partition("/")[0]
    error = refused(root, NANOCHAT, first)
    page = tmp_path / "own.yaml"
    pattern = name.replace("000008", "{step}")
    page.write_text(
        "name: own\nfiles:\n"
        '  "optim_{step}_rank{rank}.pt": {optimizers: [[]]}\n'
        f'  "{pattern}": {{optional: true}}\n'
    )
    before = snapshot(root)
    run = Run.open(root, str(page))
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 4}})))
    assert not (root / first).exists()
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before
    subprocess.run(["bash", "-ec", error.next[1].split("    ")[0]], check=True, timeout=60)
    done = call("--format", NANOCHAT.format, "rollback", "--to", 4, "--yes", "-C", root)
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in root.glob("*_000008*")} == set()


def test_the_plan_lists_what_leaves_by_its_name(tmp_path: Path) -> None:
    root = tmp_path / "run"
    NANOCHAT.write(root)
    shown = call("--format", NANOCHAT.format, "rollback", "--to", 4, "-n", "-C", root)
    assert all(name in shown.stdout for name in NANOCHAT.of(8)), shown.stdout
    assert not any(name in shown.stdout for name in NANOCHAT.of(4))


def test_numbers_with_others_between_them_are_refused(tmp_path: Path) -> None:
    """Parts of data that are counted, or weights that are saved more often: not to be told."""
    root = tmp_path / "run"
    NANOCHAT.write(root)
    for number in range(10):
        NANOCHAT.put(root, f"part_{number:06}.bin")
    refused(root, NANOCHAT, "part_000008.bin")


def test_counted_parts_in_another_folder_stay(tmp_path: Path) -> None:
    """They are no trainer's steps, and nothing there is refused: it need not be the trainer's."""
    root = tmp_path / "run"
    NANOCHAT.write(root)
    for number in range(10):
        NANOCHAT.put(root, f"data/part_{number:06}.bin")
    parts = snapshot(root / "data")
    run = Run.open(root, NANOCHAT.format)
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 4}})))
    assert snapshot(root / "data") == parts
    assert not (root / "model_000008.pt").exists()


def test_a_folder_around_a_described_file_is_refused(tmp_path: Path) -> None:
    """The page names one file in it, and the folder is what its trainer looks for."""
    page = tmp_path / "own.yaml"
    page.write_text('name: own\nnumber: [it]\nfiles: {"at_*/o.pt": {optimizers: [[adam]]}}\n')
    root = tmp_path / "run"
    for step in (4, 8):
        (root / f"at_{step}").mkdir(parents=True)
        adam = {"state": {}, "param_groups": [{**GROUP, "params": []}]}
        write_torch_file(root / f"at_{step}/o.pt", {"it": step, "adam": adam})
        (root / f"at_{step}/model.bin").write_bytes(b"w")
    before = snapshot(root)
    with pytest.raises(SurgeryError) as error:
        plan(Run.open(root, str(page)), from_data({"rollback": {"to": 4}}))
    assert "at_8" in error.value.what
    page.write_text('name: own\nfiles: {"at_{step}/o.pt": {optimizers: [[adam]]}}\n')
    run = Run.open(root, str(page))
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 4}})))
    assert sorted(path.name for path in root.glob("at_*")) == ["at_4"]
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before


def test_a_name_of_two_steps_is_refused(tmp_path: Path) -> None:
    """`rng_1_rank2` may be of step 1, which stays, or of step 2, which leaves."""
    layout = Layout("optim_{step}.pt", (), 0, (1, 2), 1, half_saved=False)
    root = tmp_path / "run"
    layout.write(root)
    for step in (1, 2):
        for rank in (1, 2):
            layout.put(root, f"rng_{step}_rank{rank}.bin")
    refused(root, layout, "rng_1_rank2.bin")


def test_a_page_whose_iteration_is_its_number_is_checked_and_forked(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    page = root / "own.yaml"
    page.write_text(
        "name: own\nnumber: [iter_num]\n"
        "files: {ckpt.pt: {optimizers: [[optimizer]], fields: {iteration: [[iter_num]]}}}\n"
    )
    adam = {"state": {0: {"step": 8.0}}, "param_groups": [{**GROUP, "params": [0]}]}
    write_torch_file(root / "ckpt.pt", {"iter_num": 8, "optimizer": adam})
    before = snapshot(root)
    checked = call("check-format", page, "-C", root)
    assert checked.exit_code == 0, checked.stderr
    assert re.search(r"set iteration +1 change, done and undone", checked.stdout)
    branch = tmp_path / "branch"
    words = shlex.split("--copy --set iteration=4")
    forked = call("--format", page, "fork", branch, *words, "-C", root)
    assert forked.exit_code == 0, forked.stderr
    assert Run.open(branch, str(page)).steps() == [4]
    assert snapshot(root) == before
