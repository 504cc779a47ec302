"""The drafted page of a trainer that nobody here knows leads to all that the trainer saved."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.described.draft import draft
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report import draft_page
from ckptsurgeon.surgery.fork import fork
from tests.support.described_runs import fairseq2, stepped_cosine
from tests.support.snapshot import snapshot

NAMES = (
    "model_{step:07d}.pth", "ckpt_{step}.pt", "step_{step}/optim.pt", "it{step:05d}/state.bin",
    "{step}/opt_rank{rank}.pt", "out/epoch_{epoch}-step_{step}.pt", "run2/v1_iter_{step}.pt",
    "state-{step}-of-3.pt", "CKPT+ep{step}/opt.ckpt", "weights/{step}/rank_{rank}_of_2.pt",
    "ck/e{epoch}_step={step}-val_loss={loss}.pt", "{step}-loss={loss}.pth",
    "checkpoint-{step}.pth.tar", "snap_{step}.th", "{step}/training_state",
)  # fmt: skip
AT: tuple[tuple[str | int, ...], ...] = (
    (), ("optimizer",), ("state", "optim"), ("trainer", "optimizers", 0), ("a.b", "c"),
)  # fmt: skip
UPDATES = 2
POINTERS = (
    "", "{name}", "{step}", "step {step}\n", "{entry}", "best = {name}\n", "{root}/{path}",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How an invented trainer saves. `at` leads to the optimizer, the scheduler lies beside it."""

    name: str
    at: tuple[str | int, ...]
    scheduler: bool
    counter: str
    pointer: str
    steps: tuple[int, ...]

    def path(self, step: int, rank: int) -> str:
        loss = "nan" if step == self.steps[-1] else f"{9 / (step + 1):.4f}"
        return self.name.format(step=step, rank=rank, epoch=step // 7, loss=loss)

    def save(self, root: Path) -> None:
        for step in self.steps:
            for rank in range(2 if "{rank}" in self.name else 1):
                model = torch.nn.Sequential(torch.nn.Linear(4, 2))
                adam, schedule = stepped_cosine(model, UPDATES)
                file = root / self.path(step, rank)
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(self._tree(adam.state_dict(), schedule.state_dict(), step), file)
        newest = Path(self.path(self.steps[-1], 0))
        if self.pointer:
            (root / "last_checkpoint").write_text(self.says(root, newest, self.steps[-1]))

    def says(self, root: Path, file: Path, step: int) -> str:
        """What its pointer says when it names this file of a step."""
        names = {"name": file.name, "entry": file.parts[0], "path": file, "root": root}
        return self.pointer.format(step=step, **names)

    def _tree(self, adam: Any, schedule: Any, step: int) -> Any:
        if not self.at:
            return adam
        tree: Any = adam
        for key in reversed(self.at[1:]):
            tree = [tree] if key == 0 else {key: tree}
        out = {self.at[0]: tree, "note": {"loss": 2.5}, "version": "1.2"}
        if self.scheduler:
            out["lr_sched"] = schedule
        if self.counter:
            out[self.counter] = step
        return out


layouts = st.builds(
    Layout,
    name=st.sampled_from(NAMES),
    at=st.sampled_from(AT),
    scheduler=st.booleans(),
    counter=st.sampled_from(["", "iteration", "global_step"]),
    pointer=st.sampled_from(POINTERS),
    steps=st.lists(st.integers(1, 60), min_size=2, max_size=3, unique=True).map(
        lambda steps: tuple(sorted(steps))
    ),
)


@given(layouts)
@settings(max_examples=25, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
@pytest.mark.long
def test_a_drafted_page_reads_rolls_back_edits_and_is_undone(layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "run"
        layout.save(root)
        page = Path(folder) / "page.yaml"
        page.write_text(draft_page(draft(root)))
        run = Run.open(root, str(page))
        assert run.steps() == list(layout.steps)
        last = layout.steps[-1]
        assert look.inspect(run, last).promise.adam_step == UPDATES
        before = snapshot(root)
        to = layout.steps[-2]
        recipe = from_data({"rollback": {"to": to}, "set": {"beta2": 0.9}, "reset": ["moments"]})
        receipt = surgery.apply(run, surgery.plan(run, recipe))
        _resumes(root, layout, to)
        again = Run.open(root, str(page))
        surgery.apply(again, surgery.plan_undo(again, receipt.id))
        assert snapshot(root) == before


def _resumes(root: Path, layout: Layout, to: int) -> None:
    """What the trainer would load: the file of the step, which the pointer names as it did."""
    for rank in range(2 if "{rank}" in layout.name else 1):
        tree = torch.load(root / layout.path(to, rank), weights_only=False)
        for key in layout.at:
            tree = tree[key]
        assert [group["betas"] for group in tree["param_groups"]] == [(0.9, 0.9)]
        for state in tree["state"].values():
            assert float(state["step"]) == 0
            assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    assert not (root / layout.path(layout.steps[-1], 0)).exists()
    if layout.pointer:
        if "{loss}" in layout.name and "{path}" in layout.pointer:
            return  # no page can say it, and the draft says so
        text = layout.says(root, Path(layout.path(to, 0)), to)
        if "{name}" not in layout.pointer or "{step" in layout.name.rpartition("/")[2]:
            assert (root / "last_checkpoint").read_text() == text


def test_files_beside_the_optimizer_are_named_and_optional_where_a_step_lacks_them(
    tmp_path: Path,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    for step in (10, 20):
        adam, schedule = stepped_cosine(model, step)
        torch.save(adam.state_dict(), tmp_path / f"optim_{step}.pt")
        torch.save(model.state_dict(), tmp_path / f"model_{step}.pt")
    torch.save(schedule.state_dict(), tmp_path / "sched_20.pt")
    torch.save({"model": model.state_dict()}, tmp_path / "best.pt")
    files = draft(tmp_path).page["files"]
    assert list(files) == ["optim_{step}.pt", "model_{step}.pt", "sched_{step}.pt"]
    assert files["model_{step}.pt"] == {"weights": [[]]}
    assert files["sched_{step}.pt"] == {"schedulers": [[]], "optional": True}


def test_a_copy_counts_where_its_name_says_that_a_restart_loads_it(tmp_path: Path) -> None:
    """A rollback makes such copies anew; the best model is no such copy."""
    adam, _ = stepped_cosine(torch.nn.Sequential(torch.nn.Linear(4, 2)), 2)
    for name in ("epoch10.pt", "epoch20.pt", "last.pt", "best.pt"):
        torch.save({"optimizer": adam.state_dict()}, tmp_path / name)
    drafted = draft(tmp_path)
    assert list(drafted.page["files"]) == ["epoch{step}.pt"]
    assert drafted.page["last"] == ["last.pt"]
    assert any(sentence.startswith("best.pt is of no step") for sentence in drafted.unsure)


def test_a_pointer_names_a_file_whose_name_has_a_loss_and_no_step(tmp_path: Path) -> None:
    for step, loss in ((7, 0.5), (9, 0.123)):
        adam, _ = stepped_cosine(torch.nn.Sequential(torch.nn.Linear(4, 2)), step)
        file = tmp_path / f"model_loss={loss}.pt"
        torch.save({"optim": adam.state_dict(), "iter_num": step}, file)
    (tmp_path / "best").write_text("best = model_loss=0.123.pt\n")
    drafted = draft(tmp_path)
    assert drafted.page["pointer"] == {"file": "best", "text": "best = {file}\n"}
    page = tmp_path / "page.yaml"
    page.write_text(draft_page(drafted))
    before, run = snapshot(tmp_path), Run.open(tmp_path, str(page))
    assert (run.steps(), run.latest()) == ([7, 9], 9)
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": 7}})))
    assert (tmp_path / "best").read_text() == "best = model_loss=0.5.pt\n"
    again = Run.open(tmp_path, str(page))
    surgery.apply(again, surgery.plan_undo(again))
    assert snapshot(tmp_path) == before


def epochs(root: Path, files: dict[str, int]) -> Run:
    """Files that hold these epochs, of three updates each, by the page that is drafted of them."""
    for name, epoch in files.items():
        adam, _ = stepped_cosine(torch.nn.Linear(4, 2), 3 * epoch)
        (root / name).parent.mkdir(exist_ok=True)
        torch.save({"epoch": epoch, "optimizer": adam.state_dict()}, root / name)
    (root / "own.yaml").write_text(draft_page(draft(root)))
    return Run.open(root, str(root / "own.yaml"))


@pytest.mark.parametrize("first", ["w/epoch{}.pt", "checkpoint-{}.pth.tar", "w/best.pt"])
def test_a_copy_that_is_newer_than_each_other_file_is_a_step(tmp_path: Path, first: str) -> None:
    """As YOLO's and timm's, which save it at each epoch and the others now and then."""
    last = f"{first.rpartition('/')[0] or '.'}/last{''.join(Path(first).suffixes)}"
    saved = {first.format(2): 2, first.format(4): 4, last: 5}
    run = epochs(tmp_path, saved)
    assert run.steps() == sorted(saved.values())
    assert run.latest() == 5
    assert look.inspect(run, 5).promise.adam_step == 15
    before = snapshot(tmp_path)
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": 4}})))
    assert (tmp_path / last).read_bytes() == (tmp_path / first.format(4)).read_bytes()
    again = Run.open(tmp_path, str(tmp_path / "own.yaml"))
    assert again.latest() == 4
    surgery.apply(again, surgery.plan_undo(again))
    assert snapshot(tmp_path) == before


DATES = ("2026-11-29+14-59-58+00", "2026-11-29+15-00-03+00", "2026-11-29+15-00-59+00")
"""The seconds begin anew, and so does the minute."""


@pytest.mark.parametrize("beside", [True, False])
def test_a_date_is_no_step(tmp_path: Path, beside: bool) -> None:
    """SpeechBrain's folders: what counts is in another file, and not torch's."""
    for number, date in enumerate(DATES, start=1):
        adam, _ = stepped_cosine(torch.nn.Linear(4, 2), 5 * number)
        folder = tmp_path / f"CKPT+{date}"
        folder.mkdir()
        tree = adam.state_dict() if beside else {"opt": adam.state_dict(), "step": 5 * number}
        torch.save(tree, folder / "optimizer.ckpt")
        torch.save(torch.nn.Linear(4, 2).state_dict(), folder / "model.ckpt")
        (folder / "CKPT.yaml").write_text(f"end-of-epoch: true\nunixtime: {1.7e9 + number}\n")
        if beside:
            (folder / "brain.ckpt").write_text(f"optimizer_step: {5 * number}\nstep: 5\n")
    page = tmp_path / "own.yaml"
    page.write_text(draft_page(draft(tmp_path)))
    assert "15" not in page.read_text() and "CKPT+*/optimizer.ckpt" in page.read_text()
    run = Run.open(tmp_path, str(page))
    assert run.steps() == [5, 10, 15]
    before = snapshot(tmp_path)
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": 10}})))
    assert sorted(path.name for path in tmp_path.glob("CKPT+*")) == [f"CKPT+{d}" for d in DATES[:2]]
    again = Run.open(tmp_path, str(page))
    surgery.apply(again, surgery.plan_undo(again))
    assert snapshot(tmp_path) == before


def test_a_file_without_a_number_is_numbered_by_its_counter(tmp_path: Path) -> None:
    adam, _ = stepped_cosine(torch.nn.Sequential(torch.nn.Linear(4, 2)), 7)
    torch.save({"optim": adam.state_dict(), "iter_num": 7}, tmp_path / "ckpt.pt")
    page = tmp_path / "page.yaml"
    drafted = draft(tmp_path)
    page.write_text(draft_page(drafted))
    assert drafted.page["number"] == ["iter_num"]
    assert Run.open(tmp_path, str(page)).steps() == [7]
    (tmp_path / "ckpt.pt").unlink()
    torch.save({"optim": adam.state_dict()}, tmp_path / "ckpt.pt")
    with pytest.raises(UsageError, match="has no step in its name"):
        draft(tmp_path)


@pytest.mark.parametrize("name", ["epoch={:02d}-loss={}.pth", "at_{}_{}.pt", "w/ep{}-acc_{}.pt"])
def test_a_file_that_is_named_by_its_epoch_is_numbered_by_its_counter(
    tmp_path: Path, name: str
) -> None:
    """Logs count updates: to be cut at the number of an epoch would be their end."""
    for epoch in (1, 2, 3):
        adam, schedule = stepped_cosine(torch.nn.Linear(4, 2), UPDATES)
        tree = {"opt": adam.state_dict(), "sched": schedule.state_dict(), "step": 20 * epoch}
        loss = "nan" if epoch == 3 else f"{3.4 / epoch:.3f}"
        file = tmp_path / name.format(epoch, loss if "{}_{}" not in name else 5)
        file.parent.mkdir(exist_ok=True)
        torch.save({**tree, "epoch": epoch}, file)
    (tmp_path / "own.yaml").write_text(draft_page(draft(tmp_path)))
    run = Run.open(tmp_path, str(tmp_path / "own.yaml"))
    assert run.steps() == [20, 40, 60]
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": 40}})))
    assert Run.open(tmp_path, str(tmp_path / "own.yaml")).steps() == [20, 40]


def test_a_pointer_with_a_path_names_the_run_in_which_it_lies(tmp_path: Path) -> None:
    """As MMEngine's: in a fork or a copy it would lead to a step of the first run."""
    root = tmp_path / "run"
    root.mkdir()
    for step in (2, 4):
        adam, _ = stepped_cosine(torch.nn.Linear(4, 2), step)
        torch.save({"optimizer": adam.state_dict()}, root / f"iter_{step}.pth")
    (root / "last_checkpoint").write_text(f"{root}/iter_4.pth")
    (root / "own.yaml").write_text(draft_page(draft(root)))
    (root / "ckptsurgeon.yaml").write_text("format: own.yaml\n")
    branch = tmp_path / "deeper" / "branch"
    branch.parent.mkdir()
    fork(Run.open(root), 2, branch, from_data({}), "copy")
    assert (branch / "last_checkpoint").read_text() == f"{branch}/iter_2.pth"
    copy = shutil.copytree(root, tmp_path / "copy")
    with pytest.raises(SurgeryError, match="last_checkpoint is missing or names no step"):
        Run.open(copy).latest()
    surgery.apply(Run.open(copy), surgery.plan(Run.open(copy), from_data({"rollback": {"to": 2}})))
    assert (copy / "last_checkpoint").read_text() == f"{copy}/iter_2.pth"
    elsewhere = "/in/a/container/iter_4.pth"
    (root / "last_checkpoint").write_text(elsewhere)
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data({"rollback": {"to": 2}})))
    assert (root / "last_checkpoint").read_text() == elsewhere.replace("4", "2")


def test_a_fork_says_that_no_page_names_weights(tmp_path: Path) -> None:
    """torchtune's lie in folders of their own, and its recipe state is saved over."""
    root = tmp_path / "run"
    for epoch in (1, 2):
        adam, _ = stepped_cosine(torch.nn.Linear(4, 2), 3 * epoch)
        (root / "recipe_state").mkdir(parents=True, exist_ok=True)
        state = {"optimizer": adam.state_dict(), "epochs_run": epoch}
        torch.save(state, root / "recipe_state" / "recipe_state.pt")
        (root / f"epoch_{epoch - 1}").mkdir()
    (root / "own.yaml").write_text(draft_page(draft(root)))
    run = Run.open(root, str(root / "own.yaml"))
    assert run.steps() == [2]
    with pytest.raises(SurgeryError, match="step 1 is not saved"):
        surgery.plan(run, from_data({"rollback": {"to": 1}}))
    done = fork(run, 2, tmp_path / "branch", from_data({}), "copy")
    assert done.files == 1 and "names no weights" in done.warnings[0]


def test_a_damaged_file_and_another_programs_are_left_out_by_name(tmp_path: Path) -> None:
    adam, _ = stepped_cosine(torch.nn.Sequential(torch.nn.Linear(4, 2)), 7)
    torch.save({"optim": adam.state_dict()}, tmp_path / "state_7.pt")
    (tmp_path / "tokens.bin").write_bytes(b"\0" * 4096)
    drafted = draft(tmp_path)
    assert list(drafted.page["files"]) == ["state_{step}.pt"]
    assert any("tokens.bin can't be read as torch saves it" in each for each in drafted.unsure)


def test_nothing_without_an_optimizer_is_a_run(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model_7.pt")
    with pytest.raises(UsageError, match="holds the state of an optimizer"):
        draft(tmp_path)


def test_an_optimizer_of_fastais_own_is_named(tmp_path: Path) -> None:
    """`learn.save` of fastai 2.8.12: no state_dict() of torch's, and no numbers of parameters."""
    opt = {"state": [{"grad_avg": torch.ones(2), "step": 3}], "hypers": [{"lr": 1e-3, "wd": 0.01}]}
    torch.save({"model": {"weight": torch.ones(2)}, "opt": opt}, tmp_path / "model_2.pth")
    with pytest.raises(UsageError, match="an optimizer of fastai's own") as refused:
        draft(tmp_path)
    assert "give fit or fit_one_cycle the lr" in str(refused.value.next[0])


def test_a_step_with_folders_of_its_own_is_read_to_its_last_file(tmp_path: Path) -> None:
    """fairseq2 has its optimizer five names below the run."""
    drafted = draft(fairseq2(tmp_path / "run"))
    deep = "step_{step}/optimizer/pp_00/tp_00/sdp_{number3}.pt"
    assert drafted.page["files"][deep] == {"optimizers": [[]]}
    counted = {"schedulers": [["_lr_scheduler"]], "fields": {"iteration": [["_step_nr"]]}}
    assert drafted.page["files"]["step_{step}/trainer/rank_{rank}.pt"] == counted
