"""Starting: only from a checkpoint that `latest` names, or from scratch when told so."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trained
from tests.support.launch import launch
from tests.support.snapshot import snapshot
from tests.support.trained_run import edit
from train.errors import TrainError
from train.run_folder import find_checkpoint, live_marker, refuse_live_trainer, write_atomically


def steps(root: Path, *numbers: int) -> Path:
    for number in numbers:
        (root / f"global_step{number}").mkdir(parents=True)
    return root


def test_latest_decides(tmp_path: Path) -> None:
    steps(tmp_path, 2, 10, 9)
    (tmp_path / "latest").write_text("global_step9\n")
    assert find_checkpoint(tmp_path, from_scratch=False) == tmp_path / "global_step9"


@pytest.mark.parametrize(
    ("numbers", "latest", "says"),
    [
        ((), None, "no checkpoint and no latest here"),
        ((2, 10), None, "missing, but 2 checkpoints are here, the last global_step10"),
        ((2, 10), "global_step4", "names 'global_step4', which is not here"),
        ((2, 10), "", "names ''"),
        ((2, 10), "../run/global_step2", "which is not here"),
    ],
)
def test_it_never_starts_from_random_weights_by_itself(
    tmp_path: Path, numbers: tuple[int, ...], latest: str | None, says: str
) -> None:
    steps(tmp_path, *numbers)
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    with pytest.raises(TrainError, match=says):
        find_checkpoint(tmp_path, from_scratch=False)


def test_from_scratch_wants_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "new", from_scratch=True) is None
    with pytest.raises(TrainError, match="two runs would mix"):
        find_checkpoint(steps(tmp_path, 2), from_scratch=True)


def test_the_marker_names_this_process_while_it_trains(tmp_path: Path) -> None:
    with live_marker(tmp_path):
        recorded = json.loads((tmp_path / "trainer.pid").read_text())
        assert recorded["pid"] == os.getpid() and recorded["boot_id"]
        assert sorted(recorded) == ["boot_id", "host", "pid", "slurm_job", "start_time"]
        with pytest.raises(TrainError, match=f"pid {os.getpid()}"), live_marker(tmp_path):
            pass
        with pytest.raises(TrainError, match="writing to this run"):
            refuse_live_trainer(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stale", [{"start_time": 1}, {"boot_id": "another"}, {"pid": 2**22 + 1}])
def test_a_marker_of_a_dead_trainer_is_taken_over(tmp_path: Path, stale: dict[str, object]) -> None:
    with live_marker(tmp_path):
        recorded = json.loads((tmp_path / "trainer.pid").read_text())
    (tmp_path / "trainer.pid").write_text(json.dumps({**recorded, **stale}))
    with live_marker(tmp_path):
        assert json.loads((tmp_path / "trainer.pid").read_text()) == recorded


def test_a_marker_of_a_killed_trainer_that_nobody_reaped_is_taken_over(tmp_path: Path) -> None:
    """A container without an init keeps it as a zombie."""
    with live_marker(tmp_path):
        recorded = json.loads((tmp_path / "trainer.pid").read_text())
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    stat = Path(f"/proc/{zombie.pid}/stat").read_text()
    found = {"pid": zombie.pid, "start_time": int(stat.split()[21])}
    (tmp_path / "trainer.pid").write_text(json.dumps({**recorded, **found}))
    refuse_live_trainer(tmp_path)
    zombie.wait()


def test_of_two_that_find_a_dead_trainers_marker_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one takes it over between this one's look at it and its removal."""
    marker = tmp_path / "trainer.pid"
    with live_marker(tmp_path):
        recorded = json.loads(marker.read_text())
    marker.write_text(json.dumps({**recorded, "start_time": 1}))
    start = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    theirs = json.dumps({**recorded, "pid": os.getppid(), "start_time": start})
    monkeypatch.setattr("train.run_folder._say_if_elsewhere", lambda path: path.write_text(theirs))
    with pytest.raises(TrainError, match="writing to this run"), live_marker(tmp_path):
        pass
    assert [path.read_text() for path in tmp_path.iterdir()] == [theirs]


def test_another_trainers_marker_is_not_removed_at_the_end(tmp_path: Path) -> None:
    """On another machine it could not see that this one was alive."""
    marker = tmp_path / "trainer.pid"
    with live_marker(tmp_path):
        theirs = json.dumps({**json.loads(marker.read_text()), "host": "another"})
        marker.write_text(theirs)
    assert marker.read_text() == theirs


def test_a_torn_marker_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "trainer.pid").write_text('{"pid": 1')
    with live_marker(tmp_path):
        assert json.loads((tmp_path / "trainer.pid").read_text())["pid"] == os.getpid()


def test_a_pointer_is_replaced_not_rewritten(tmp_path: Path) -> None:
    pointer = tmp_path / "latest"
    write_atomically(pointer, "global_step2")
    with pointer.open() as reader:
        write_atomically(pointer, "global_step4")
        assert reader.read() == "global_step2"
    assert snapshot(tmp_path).keys() == {"latest"}
    assert pointer.read_bytes() == b"global_step4"


def part_the_groups(content: dict[str, Any]) -> None:
    groups = content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    groups[1]["betas"] = (0.5, 0.9)


@pytest.mark.parametrize(
    "trouble", ["no latest", "live", "shape", "shard", "groups", "ranks", "key"]
)
@pytest.mark.long
def test_a_refusal_is_three_lines_and_leaves_the_run_as_it_was(
    trained: Trained, trouble: str
) -> None:
    run = trained()
    arguments = ["--config", str(run / "train.yaml")]
    marker = run / "trainer.pid"
    if trouble == "no latest":
        (run / "latest").unlink()
    elif trouble == "shape":
        arguments.append("num_layers=3")
    elif trouble == "shard":
        (run / "global_step8/zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    elif trouble == "groups":
        edit(run / "global_step8/zero_pp_rank_0_mp_rank_00_optim_states.pt", part_the_groups)
    elif trouble == "ranks":
        arguments += ["micro_batch_size=3"]
    elif trouble == "key":
        arguments += ["learning_rate=1"]
    elif trouble == "live":
        with live_marker(run):
            mine = marker.read_text()
        marker.write_text(mine)
    before = snapshot(run)
    done = launch(*arguments, status=2 if trouble in ("ranks", "key") else 1)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ") and lines[2].startswith("next:  ")
    assert "Traceback" not in done.stderr
    assert snapshot(run) == before


def test_a_start_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    save = [f"save={tmp_path / 'run'}", f"data={tmp_path / 'absent'}"]
    done = launch("--config=train/configs/tiny.yaml", "--from-scratch", *save, status=1)
    assert "no such file" in done.stderr and list(tmp_path.iterdir()) == []
