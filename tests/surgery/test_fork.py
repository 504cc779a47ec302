"""A fork is a run of its own that trains, and the run that it came from never changes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from ckptsurgeon import Run, disk, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.look.logged import own
from ckptsurgeon.plans.edits import Rewrite
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork
from tests.conftest import Trained
from tests.faults import cut
from tests.support.launch import first_line, launch
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

RESTART = from_data({"set": {"consumed_samples": 0, "iteration": 0}})
"""What BigScience patched into its loader for experiment 11 of tr8."""


@pytest.mark.parametrize("how", ["hard-link", "copy"])
@pytest.mark.long
def test_a_branch_starts_from_its_own_counters(trained: Trained, tmp_path: Path, how: str) -> None:
    root = trained()
    before = snapshot(root)
    done = fork(Run.open(root), 4, tmp_path / "branch", RESTART, how)
    assert done.receipt is not None
    told = json.loads(first_line(tmp_path / "branch"))
    assert (told["step"], told["consumed_samples"], told["adam_step"]) == (1, 0, 4)
    launch(f"--config={tmp_path / 'branch' / 'train.yaml'}", "train_iters=2", "save_interval=2")
    branch = Run.open(tmp_path / "branch")
    assert (branch.latest(), branch.steps()) == (2, [2, 4])
    assert snapshot(root) == before


@pytest.mark.parametrize("how", ["copy", "hard-link"])
def test_a_fork_has_what_lies_in_folders_of_the_step(
    trained: Trained, tmp_path: Path, how: str
) -> None:
    """As the configs that GPT-NeoX saves in each: no fork of its runs could be made."""
    root = trained()
    config = root / "global_step4" / "configs" / "neox.yml"
    config.parent.mkdir()
    config.write_text("{}")
    files = Run.open(root).format.files(root, 4)
    assert config in files and all(path.is_file() for path in files)
    fork(Run.open(root), 4, tmp_path / "branch", from_data({}), how)
    assert (tmp_path / "branch" / config.relative_to(root)).read_text() == "{}"


def test_an_edit_of_hard_linked_shards_leaves_the_parent(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    before = snapshot(root)
    fork(Run.open(root), 8, tmp_path / "branch", from_data({}), "hard-link")
    shard = "global_step8/mp_rank_00_model_states.pt"
    assert (root / shard).samefile(tmp_path / "branch" / shard)
    branch = Run.open(tmp_path / "branch")
    surgery.apply(branch, plan(branch, from_data({"set": {"lr": 1e-4}, "reset": ["moments"]})))
    assert not (root / shard).samefile(tmp_path / "branch" / shard)
    assert snapshot(root) == before
    assert Run.open(root).receipts() == []


def test_a_hard_link_is_to_the_shard_that_a_symbolic_link_leads_to(
    trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    shard = root / "global_step8/mp_rank_00_model_states.pt"
    shard.rename(root / "elsewhere.pt")
    shard.symlink_to("../elsewhere.pt")
    fork(Run.open(root), 8, tmp_path / "branch", from_data({}), "hard-link")
    assert (root / "elsewhere.pt").samefile(tmp_path / "branch" / shard.relative_to(root))


def test_where_blocks_can_not_be_shared_the_choice_is_the_users(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(trained())

    def refuse(operation: str, path: str, details: Any) -> None:
        if operation == "clone":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(disk.calls, "hook", refuse)
    with pytest.raises(SurgeryError, match="can't share blocks") as caught:
        fork(run, 4, tmp_path / "branch", from_data({}))
    assert [hint.split()[4] for hint in caught.value.next] == ["--hard-link", "--copy"]
    assert all(hint.startswith("the same command with --") for hint in caught.value.next)
    assert not list(tmp_path.glob("branch*"))


def test_a_surgery_that_is_refused_leaves_no_branch(trained: Trained, tmp_path: Path) -> None:
    run = Run.open(trained())
    with pytest.raises(SurgeryError, match="no dynamic loss scale"):
        fork(run, 4, tmp_path / "branch", from_data({"set": {"loss_scale": 2}}), "copy")
    assert not list(tmp_path.glob("branch*"))
    (tmp_path / "branch").mkdir()
    with pytest.raises(UsageError, match="branch already exists"):
        fork(run, 4, tmp_path / "branch", from_data({}), "copy")


def test_a_reflink_shares_the_blocks_on_xfs(trained: Trained, tmp_path: Path) -> None:
    reason = cut.unavailable("xfs")
    if reason:
        pytest.skip(reason)
    image, disk_ = tmp_path / "image", tmp_path / "xfs"
    disk_.mkdir()
    cut.format(image, "xfs")
    with cut.mounted(image, disk_):
        shutil.copytree(trained(), disk_ / "run")
        os.sync()
        before, free = snapshot(disk_ / "run"), shutil.disk_usage(disk_).free
        done = fork(Run.open(disk_ / "run"), 8, disk_ / "branch", RESTART, "reflink")
        os.sync()
        assert free - shutil.disk_usage(disk_).free < done.size / 2
        branch = Run.open(disk_ / "branch")
        assert look.verify(branch, level=3).findings == ()
        assert branch.checkpoint(8).state().promise.step == 1
        assert snapshot(disk_ / "run") == before


def test_a_branch_inside_the_run_is_refused(trained: Trained) -> None:
    root = trained()
    before = snapshot(root)
    with pytest.raises(UsageError, match="lies inside the run"):
        fork(Run.open(root), 8, root / "branch", from_data({}), "copy")
    assert snapshot(root) == before


def test_a_fork_sees_the_logs_that_it_was_given_and_those_that_follow(
    trained: Trained, tmp_path: Path
) -> None:
    """What a surgery made of the logs of another run is no branch that was cut."""
    root = trained()
    (root / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 2 / step}) + "\n" for step in range(1, 9))
    )
    fork(Run.open(root), 4, tmp_path / "branch", from_data({"logs": {"of": str(root)}}), "copy")
    branch = Run.open(tmp_path / "branch")
    given = {path.relative_to(branch.root).as_posix() for path in branch.logs.all()}
    assert "metrics.jsonl" in given and any(name.startswith("tensorboard/") for name in given)
    assert own(branch, {}).kept["loss"].steps[-1] == 4
    with SummaryWriter(str(branch.root / "tensorboard")) as writer:
        writer.add_scalar("lm loss", 1.0, 5)
    assert len(Run.open(branch.root).logs.files()) == len(given)
    cut_ = plan(branch, from_data({"logs": {"after": 2}}))
    assert {change.file for change in cut_.changes if isinstance(change, Rewrite)} > {
        "metrics.jsonl"
    }


@pytest.mark.parametrize("how", ["hard-link", "reflink"])
def test_what_goes_to_another_file_system_can_only_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(disk, "link", refuse)
    monkeypatch.setattr(disk, "clone", refuse)
    run = Run.open(make_run(tmp_path / "run"))
    with pytest.raises(SurgeryError) as refused:
        fork(run, 4, tmp_path / "branch", from_data({}), how)
    assert "--copy" in str(refused.value.next) and "--hard-link" not in str(refused.value.next)
