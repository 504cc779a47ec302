"""What Megatron-LM would load in place of a step: it goes aside, or the plan is refused by name.

The checkpoint that a launch goes on from is picked by `megatron.training` itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.guard.ready import decide
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support import megatron_flat, megatron_legacy, newest_megatron
from tests.support.launch import REPO
from tests.support.megatron_dist import save
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

TRACKER = "latest_checkpointed_iteration.txt"
BACK: dict[str, Any] = {"rollback": {"to": 20}}
Picker = Callable[..., int]


@pytest.fixture
def pick() -> Picker:
    """Megatron's own answer; a test that asks for it runs with the libraries only."""

    def ask(root: Path, **flags: object) -> int:
        if not newest_megatron.FOLDER.is_dir():
            pytest.skip("make test-formats installs the newest megatron-core")
        options = [
            text
            for name, value in flags.items()
            for text in (
                f"--{name.replace('_', '-')}",
                *(map(str, value) if isinstance(value, list) else [str(value)]),
            )
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        program = [sys.executable, "-W", "ignore", "-m", "tests.support.megatron_picker"]
        done = subprocess.run(
            [*program, str(root), *options], cwd=REPO, env=environment, capture_output=True,
            text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return int(done.stdout.splitlines()[-1])

    return ask


def local(folder: Path, *iterations: int) -> None:
    """Files as NVIDIA's manager names them, for two ranks."""
    for rank in range(2):
        (folder / str(rank)).mkdir(parents=True, exist_ok=True)
        for iteration in iterations:
            (folder / str(rank) / f"iter_{iteration:07d}_{rank}_local.pt").write_bytes(b"state")


def plan(root: Path, recipe: dict[str, Any]) -> Any:
    return surgery.plan(Run.open(root), from_data(recipe))


def test_local_checkpoints_in_the_run_go_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "local"
    flags = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": str(folder)}
    root = save(tmp_path / "run", **flags)
    local(folder, 10, 30, 40)
    before = snapshot(root)
    (hazard,) = [item for item in diagnose(Run.open(root)) if "local checkpoints" in item.what]
    assert "up to iteration 40" in hazard.what and "rollback --to 30" in str(hazard.next)
    with pytest.raises(SurgeryError, match="iteration 40, and the trainer loads it") as error:
        plan(root, {"set": {"beta2": 0.99}})
    assert "rollback --to 30" in error.value.next[0]
    operate(root, {"rollback": {"to": 30}})
    assert [path.name[:12] for path in sorted(folder.rglob("*.pt"))] == ["iter_0000010"] * 2
    take_back(root, before)


def test_local_checkpoints_outside_the_run_are_refused_by_their_path(tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    flags = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": str(folder)}
    root = save(tmp_path / "run", **flags)
    local(folder, 30)
    with pytest.raises(SurgeryError, match="ssd holds local checkpoints") as error:
        plan(root, BACK)
    command = error.value.next[0].partition("    ")[0]
    assert command == f"mv {folder} {folder}.aside"
    subprocess.run(command.split(), check=True)
    told = "\n".join(plan(root, BACK).warnings)
    assert "each node keeps local checkpoints" in told and str(folder) in told


@pytest.mark.parametrize("inside", [True, False])
def test_a_global_tier_in_a_folder_of_its_own(tmp_path: Path, inside: bool) -> None:
    root = tmp_path / "run"
    folder = root / "fast" if inside else tmp_path / "fast"
    flags = {"non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": str(folder)}
    save(root, **flags)
    save(folder, (40,), **flags)
    if inside:
        before = snapshot(root)
        operate(root, BACK)
        assert not (folder / TRACKER).exists() and not (folder / "iter_0000040").exists()
        take_back(root, before)
        return
    with pytest.raises(SurgeryError, match="fast holds iteration 40") as error:
        plan(root, BACK)
    subprocess.run(error.value.next[0].split(), check=True)
    assert plan(root, BACK).changes


@pytest.mark.parametrize("inside", [True, False])
def test_what_the_clean_up_would_keep_leaves_with_what_is_loaded(
    tmp_path: Path, inside: bool
) -> None:
    """Megatron-LM keeps the highest number in the folder, whatever its tracker says. The second
    one is of an asynchronous save that no tracker ever named."""
    root = tmp_path / "run"
    folder = root / "fast" if inside else tmp_path / "fast"
    flags = {"non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": str(folder)}
    save(root, **flags)
    save(folder, (10, 25, 40), **flags)
    (folder / TRACKER).write_text("25")
    if inside:
        before = snapshot(root)
        operate(root, BACK)
        assert [path.name for path in folder.iterdir()] == ["iter_0000010"]
        take_back(root, before)
        (folder / TRACKER).unlink()
        told = "keeps it and removes what is saved after step 30"
        assert told in "\n".join(item.what for item in diagnose(Run.open(root)))
        with pytest.raises(SurgeryError, match=told) as error:
            plan(root, {"set": {"beta2": 0.99}})
        assert "rollback --to 30" in error.value.next[0]
        return
    with pytest.raises(SurgeryError, match="fast holds iteration 40") as error:
        plan(root, BACK)
    subprocess.run(error.value.next[0].split(), check=True)
    assert not folder.exists() and plan(root, BACK).changes


def test_back_to_a_step_that_is_not_persistent(tmp_path: Path) -> None:
    flags = {"non_persistent_ckpt_type": "global"}
    root = save(tmp_path / "run", (10, 30), **flags)
    save(root / "non_persistent", (18, 40), **flags)
    before = snapshot(root)
    operate(root, {"rollback": {"to": 18}, "set": {"beta2": 0.99}})
    assert Run.open(root).latest() == 18
    assert (root / "non_persistent" / TRACKER).read_text() == "18"
    take_back(root, before)
    root = save(tmp_path / "other", (10, 30))
    save(root / "non_persistent", (18,))
    with pytest.raises(SurgeryError, match="step 18 is in non_persistent/ alone") as error:
        plan(root, {"rollback": {"to": 18}})
    subprocess.run(error.value.next[0].partition("    ")[0].split(), check=True)
    operate(root, {"rollback": {"to": 18}})
    assert Run.open(root).steps() == [10, 18]


@pytest.mark.parametrize("named", [True, False])
def test_what_no_launch_reads_is_not_sound(tmp_path: Path, named: bool) -> None:
    """Of checkpoints that are not persistent Megatron-LM reads torch_dist alone."""
    flags = {"non_persistent_ckpt_type": "global"}
    root = megatron_flat.save(tmp_path / "run", (10, 30), named=named, **flags)
    megatron_flat.save(root / "non_persistent", (40,), named=named, **flags)
    before, opened = snapshot(root), Run.open(root)
    assert opened.latest() == 40 and not opened.state(40).promise.asked
    (found,) = look.verify(opened, level=0).findings
    assert "a launch ends with an error" in found
    (said,) = [each for each in diagnose(opened) if each.what == found]
    assert "rollback --to 30" in str(said.next)
    seen = decide(opened, 2)
    assert not seen.ready and seen.sound == 30 and "--repair" in str(seen.next)
    repaired = decide(Run.open(root), 2, repair=True)
    assert repaired.ready and repaired.step == Run.open(root).latest() == 30
    assert diagnose(Run.open(root)) == []
    take_back(root, before)


def test_no_pointer_leads_past_a_newer_step_that_is_not_persistent(tmp_path: Path) -> None:
    flags = {"non_persistent_ckpt_type": "global"}
    root = save(tmp_path / "run", (10, 30), **flags)
    tier = save(root / "non_persistent", (18, 40), **flags)
    with pytest.raises(SurgeryError, match="holds iteration 40, and the trainer") as error:
        plan(root, {"repair_latest": {"to": 30}})
    assert "rollback --to 30" in error.value.next[0]
    (shard,) = (tier / "iter_0000040").glob("__0_0.distcp")
    os.truncate(shard, shard.stat().st_size // 2)
    before = snapshot(root)
    seen = decide(Run.open(root), 2)
    assert (seen.step, seen.sound) == (40, 30)
    assert decide(Run.open(root), 2, repair=True).step == Run.open(root).latest() == 30
    take_back(root, before)


def test_the_run_is_above_what_is_not_persistent(tmp_path: Path) -> None:
    """Alone it would be rolled back, and the trainer would go by the run's own tracker."""
    root = save(tmp_path / "run", (10, 30), non_persistent_ckpt_type="global")
    below = save(root / "non_persistent", (18,), non_persistent_ckpt_type="global")
    assert Run.open(below).root == root.resolve()
    fast = tmp_path / "fast"
    flags = {"non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": str(fast)}
    save(fast, (18, 40), save=str(root), **flags)
    with pytest.raises(SurgeryError, match="run holds iteration 30, and the trainer") as error:
        plan(fast, {"rollback": {"to": 18}})
    assert error.value.next[0].startswith(f"ckptsurgeon -C {root} rollback")
    assert plan(fast, {"set": {"beta2": 0.99}}).changes


def test_no_clean_up_finds_the_attic(tmp_path: Path) -> None:
    """Megatron-LM and Megatron-Bridge 0.6 look for `iter_*` at any depth."""
    root = save(tmp_path)
    before = snapshot(root)
    operate(root, {**BACK, "set": {"beta2": 0.99}})
    assert sorted(path.name for path in root.rglob("iter_*")) == ["iter_0000020"]
    assert list((root / ".ckptsurgeon").rglob("iter-0000030"))
    take_back(root, before)


def test_non_persistent_counts_only_when_the_launch_says_so(tmp_path: Path) -> None:
    root = save(tmp_path)
    save(root / "non_persistent", (40,))
    assert Run.open(root).latest() == 30
    (tmp_path / "other").mkdir()
    root = save(tmp_path / "other", non_persistent_ckpt_type="global")
    save(root / "non_persistent", (40,), non_persistent_ckpt_type="global")
    assert Run.open(root).latest() == 40
    operate(root, BACK)
    assert Run.open(root).latest() == 20


def test_the_command_line_of_a_later_step_is_the_next_launchs(tmp_path: Path) -> None:
    """The script got local checkpoints after step 20 was saved."""
    root = save(tmp_path / "run", (20,))
    flags = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "local"}
    save(root, (30,), **flags)
    local(root / "local", 30)
    operate(root, BACK)
    assert not list((root / "local").rglob("*.pt"))


def test_an_asynchronous_save_that_was_cut_off_goes_with_the_newer_steps(tmp_path: Path) -> None:
    """Its folder has no metadata.json, and the tracker never named it."""
    root = save(tmp_path, (20, 30, 40))
    (root / "iter_0000040" / "metadata.json").unlink()
    (root / "iter_0000040" / ".metadata").rename(root / "iter_0000040" / ".metadata.tmp")
    (root / TRACKER).write_text("30")
    assert Run.open(root).latest() == 30
    before = snapshot(root)
    operate(root, BACK)
    assert Run.open(root).steps() == [20]
    take_back(root, before)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"load": "/data/base", "save": "/data/run"}, "relaunch with --load {run}"),
        ({"ckpt_step": 30}, "relaunch without it, or the trainer loads iteration 30"),
        ({"override_ckpt_iteration": 25}, "counts from iteration 25 and sample 25 × 16"),
    ],
)
def test_what_makes_a_relaunch_go_on_from_elsewhere_is_told(
    tmp_path: Path, flags: dict[str, Any], told: str
) -> None:
    text = told.format(run=tmp_path)
    root = save(tmp_path, **flags)
    assert text in "\n".join(plan(root, BACK).warnings)
    assert text in "\n".join(look.inspect(Run.open(root), 20).notes)
    plain = megatron_legacy.save(tmp_path / "plain", load="/data/run", save="/data/run/")
    assert "goes on from" not in "\n".join(plan(plain, BACK).warnings)


@pytest.mark.formats
def test_megatron_loads_a_step_that_is_not_persistent_and_removes_the_older(
    tmp_path: Path, pick: Picker
) -> None:
    """`cleanup_old_non_persistent_checkpoint` runs before each save and keeps one."""
    flags = {"non_persistent_ckpt_type": "global"}
    root = save(tmp_path / "global", (10, 30), **flags)
    tier = save(root / "non_persistent", (15, 18, 40), **flags)
    fast = tmp_path / "run" / "fast"
    other = save(fast.parent, **flags, non_persistent_global_ckpt_dir=str(fast))
    save(fast, (25, 40), **flags, non_persistent_global_ckpt_dir=str(fast))
    operate(root, {"rollback": {"to": 18}})
    operate(other, BACK)
    save(fast, (22, 24))  # the new branch
    assert pick(root, clean=[tier, fast], **flags) == 18
    assert [path.name for path in sorted(tier.glob("iter_*"))] == ["iter_0000018"]
    assert [path.name for path in sorted(fast.glob("iter_*"))] == ["iter_0000024"]
    assert pick(other, non_persistent_global_ckpt_dir=fast, **flags) == 24


@pytest.mark.formats
def test_without_the_surgery_megatron_removes_the_new_branch(tmp_path: Path, pick: Picker) -> None:
    """Why all later ones leave: with the tracker alone gone, the highest stays for ever."""
    flags = {"non_persistent_ckpt_type": "global"}
    root = save(tmp_path / "run", (20,), **flags)
    fast = save(tmp_path / "fast", (25, 40), **flags)
    save(fast, (22, 24))
    pick(root, clean=[fast], non_persistent_global_ckpt_dir=fast)
    assert [path.name for path in fast.glob("iter_*")] == ["iter_0000040"]


@pytest.mark.formats
def test_local_saves_go_on_and_remove_the_older(tmp_path: Path, pick: Picker) -> None:
    """NVIDIA's manager on one rank. A file of a save that died at 40 would end the next one."""
    folder = tmp_path / "run" / "local"
    flags = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": str(folder)}
    root = save(tmp_path / "run", **flags)
    local(folder, 10, 30)
    (folder / "0" / "iter_0000040_0_local.dirty.pt").write_bytes(b"half")
    operate(root, BACK)
    assert pick(root, save_local=[25, 40], **flags) == 40
    assert [path.name for path in (folder / "0").iterdir()] == ["iter_0000040_0_local.pt"]


@pytest.mark.formats
def test_megatron_picks_the_step_that_was_rolled_back_to(tmp_path: Path, pick: Picker) -> None:
    root = save(tmp_path / "global", non_persistent_ckpt_type="global")
    save(root / "non_persistent", (40,), non_persistent_ckpt_type="global")
    flags = {"non_persistent_ckpt_type": "global"}
    assert pick(root, **flags) == Run.open(root).latest() == 40
    assert pick(root) == 30
    operate(root, BACK)
    assert pick(root, **flags) == 20

    folder = tmp_path / "local" / "local"
    flags = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": str(folder)}
    root = save(tmp_path / "local", **flags)
    local(folder, 10, 30)
    assert pick(root, **flags) == 30
    operate(root, BACK)
    assert pick(root, **flags) == 20
