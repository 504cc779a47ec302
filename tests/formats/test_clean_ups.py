"""After a rollback the clean-up of trainers that do not install here removes nothing of the new
branch, and their picker takes the step: by their own functions (`tests/support/library_source.py`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import stat
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptsurgeon import Run
from tests.support import library_source, megatron_bridge
from tests.support.described_runs import automodel, composer, composer_sharded, verl
from tests.support.library_source import taken
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(
        not library_source.FOLDER.is_dir(), reason="make test-formats installs the sources"
    ),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.distributed"),
]
BACK: dict[str, Any] = {"rollback": {"to": 4}}


def names(root: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in root.glob(pattern))


# --- Megatron-Bridge -----------------------------------------------------------------------------


def bridge_cleans(root: Path, keep: int) -> None:
    """What a save does once it is over, with `checkpoint.most_recent_k` at `keep`."""
    wanted = ["cleanup_old_non_persistent_checkpoint", "_CHECKPOINT_CLEANUP_LOCK"]
    taken(
        "megatron/bridge/training/checkpointing.py", wanted, torch=torch, Path=Path, shutil=shutil,
        threading=threading, print_rank_0=print,
    ).cleanup_old_non_persistent_checkpoint(str(root), leave_ckpt_num=keep)  # fmt: skip


def test_most_recent_k_keeps_the_new_branch(tmp_path: Path) -> None:
    """The steps that left lie in the attic, where Bridge 0.6 looks too: it takes `iter_*` at any
    depth. What a surgery edited there is kept in a folder of the step's name, and counts as well.
    """
    root = megatron_bridge.save(tmp_path / "run", (10, 20, 30, 40))
    before = snapshot(root)
    operate(root, {"rollback": {"to": 20}, "set": {"beta2": 0.99}, "reset": ["moments"]})
    take_back(root, before)
    operate(root, {"rollback": {"to": 20}, "set": {"beta2": 0.99}, "reset": ["moments"]})
    assert megatron_bridge.resumed(root)[0] == 20
    megatron_bridge.save(root, (22, 24))
    bridge_cleans(root, 3)
    assert names(root, "iter_*") == ["iter_0000020", "iter_0000022", "iter_0000024"]
    bridge_cleans(root, 1)
    assert names(root, "iter_*") == ["iter_0000024"]
    assert len(list((root / ".ckptsurgeon").rglob("iter-0000040"))) == 1


def test_under_its_own_name_a_step_in_the_attic_would_end_the_new_branch(tmp_path: Path) -> None:
    root = megatron_bridge.save(tmp_path / "run", (10, 20, 30))
    operate(root, {"rollback": {"to": 20}})
    (kept,) = (root / ".ckptsurgeon").rglob("iter-0000030")
    kept.rename(kept.with_name("iter_0000030"))
    megatron_bridge.save(root, (22, 24))
    bridge_cleans(root, 1)
    assert names(root, "iter_*") == []


# --- Composer ------------------------------------------------------------------------------------


def composer_saver(keep: int) -> Any:
    """What `num_checkpoints_to_keep` goes by, as a new launch makes it, and a load leaves it."""
    known: Any = {"os": os, "shutil": shutil, "Path": Path, "dist": composer_ranks()}
    methods = ["state_dict", "load_state_dict", "_rotate_checkpoints"]
    source = "composer/callbacks/checkpoint_saver.py"
    library = taken(source, [f"CheckpointSaver.{name}" for name in methods], **known)
    saver = SimpleNamespace(
        saved_checkpoints=[], all_saved_checkpoints_to_timestamp={}, num_checkpoints_to_keep=keep
    )
    assert list(library.state_dict(saver)) == ["all_saved_checkpoints_to_timestamp"]
    library.load_state_dict(saver, library.state_dict(saver))

    def saved(path: Path, sharded: bool) -> None:
        saver.saved_checkpoints.append(str(path))
        library._rotate_checkpoints(saver, sharding_enabled=sharded)

    return saved


def composer_ranks() -> Any:
    ranks = [f"get_{name}" for name in ("global_rank", "local_rank", "node_rank")]
    worlds = ["get_world_size", "get_local_world_size"]
    wanted = ["_get_distributed_config_var", "MissingEnvironmentError", *ranks, *worlds]
    return taken("composer/utils/dist.py", wanted, dist=torch.distributed, os=os)


@pytest.mark.parametrize("sharded", [False, True])
def test_composer_removes_what_it_saved_itself(tmp_path: Path, sharded: bool) -> None:
    """The list of its saves begins anew at each launch, and no checkpoint keeps it."""
    root = tmp_path / "run"
    if sharded:
        root.mkdir()
    (composer_sharded if sharded else composer)(root)
    operate(root, BACK)
    name = "ep0-ba{}" if sharded else "ep0-ba{}-rank0.pt"
    assert str((root / "latest-rank0.pt").readlink()) == name.format(4)
    saved = composer_saver(keep=1)
    for step in (5, 6):
        (shutil.copytree if sharded else shutil.copy)(
            root / name.format(4), root / name.format(step)
        )
        folder = root / name.format(step)
        saved(folder / "__0_0.distcp" if sharded else folder, sharded)
    assert names(root, "ep*") == [name.format(step) for step in (2, 4, 6)]


def test_composer_starts_where_no_later_file_is(tmp_path: Path) -> None:
    """Unless `save_overwrite` is set, a file of a later batch ends the launch."""
    wanted = ["ensure_folder_has_no_conflicting_files", "_get_dist_config"]
    check = taken(
        "composer/utils/file_helpers.py", wanted, re=re, os=os, dist=composer_ranks()
    ).ensure_folder_has_no_conflicting_files
    root = composer(tmp_path / "run")
    now = SimpleNamespace(epoch=0, batch=4)
    with pytest.raises(FileExistsError, match="ep0-ba6"):
        check(root, "ep{epoch}-ba{batch}-rank{rank}.pt", now)
    operate(root, BACK)
    check(root, "ep{epoch}-ba{batch}-rank{rank}.pt", now)


# --- verl ----------------------------------------------------------------------------------------


def test_verl_removes_what_it_saved_itself(tmp_path: Path) -> None:
    """By a list that begins anew at each launch; its tracker leads to the step."""
    source = "verl/utils/checkpoint/checkpoint_manager.py"
    pickers = ["find_latest_ckpt_path", "get_checkpoint_tracker_filename"]
    library = taken(
        source, ["BaseCheckpointManager", *pickers], os=os, shutil=shutil, torch=torch
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    root = verl(tmp_path / "run")
    operate(root, BACK)
    assert library.find_latest_ckpt_path(str(root)) == str(root / "global_step_4")
    manager = library.BaseCheckpointManager.__new__(library.BaseCheckpointManager)
    manager.previous_saved_paths = []
    for step in (5, 6):
        folder = root / f"global_step_{step}"
        manager.ensure_checkpoint_capacity(1)
        shutil.copytree(root / "global_step_4", folder)
        manager.register_checkpoint(str(folder / "actor"), 1)
    kept = sorted(path.parent.name for path in root.glob("*/actor"))
    assert kept == ["global_step_2", "global_step_4", "global_step_6"]


# --- NeMo Automodel ------------------------------------------------------------------------------


def automodel_library() -> Any:
    """Its pickers and `CheckpointLifecycle`, which publishes and prunes."""
    constants = [f"_{name}" for name in (
        "AUTOMODEL_CHECKPOINT_RE", "CHECKPOINT_STEP_RE", "INCOMPLETE_CHECKPOINT_MARKER",
    )]  # fmt: skip
    functions = [
        "_checkpoint_step_num", "_list_existing_checkpoints", "list_automodel_checkpoints",
        "is_cloud_path", "mark_checkpoint_incomplete", "clear_checkpoint_incomplete",
        "is_checkpoint_incomplete", "_resolve_checkpoint_pointer_target", "read_checkpoint_pointer",
        "_checkpoint_contains_target", "read_checkpoint_metric", "_is_checkpoint_pointer_text_file",
        "find_pointer_protected_checkpoints", "find_latest_checkpoint",
    ]  # fmt: skip
    folder = "nemo_automodel/components/checkpoint"
    logger = logging.getLogger("nemo_automodel")
    known: Any = {"Path": Path, "os": os, "logger": logger, "math": math}
    utils = taken(f"{folder}/utils.py", constants + functions, **known, re=re, stat=stat, json=json)
    return taken(
        f"{folder}/lifecycle.py", ["CheckpointLifecycle"],
        **{**vars(utils), **known, "shutil": shutil, "torch": torch, "uuid4": uuid.uuid4},
    )  # fmt: skip


def test_automodel_prunes_none_of_the_new_branch(tmp_path: Path) -> None:
    """`max_recent_checkpoints` goes by the numbers in the names, and spares what links name. The
    link to the best step led to one that left: it is removed, or set by the next validation."""
    library = automodel_library()
    (tmp_path / "run").mkdir()
    root = automodel(tmp_path / "run")
    (root / "LOWEST_VAL").symlink_to("epoch_0_step_6")
    operate(root, BACK)
    assert Path(library.find_latest_checkpoint(root)).name == "epoch_0_step_4"
    lifecycle = library.CheckpointLifecycle.__new__(library.CheckpointLifecycle)
    lifecycle.config = SimpleNamespace(max_recent_checkpoints=1, checkpoint_dir=str(root))
    lifecycle._prune_old_checkpoints()
    assert names(root, "LOWEST*") == [] and names(root, "epoch*") == ["epoch_0_step_4"]
    for step in (5, 6):
        folder = root / f"epoch_0_step_{step}"
        shutil.copytree(root / f"epoch_0_step_{step - 1}", folder)
        lifecycle._publish_checkpoint(str(folder))
        lifecycle._prune_old_checkpoints()
    assert names(root, "epoch*") == ["epoch_0_step_6"]


def test_automodel_resumes_no_step_that_it_marked(tmp_path: Path) -> None:
    """Neither does a surgery, and both take the same one in its place."""
    library = automodel_library()
    (tmp_path / "run").mkdir()
    root = automodel(tmp_path / "run")
    library.mark_checkpoint_incomplete(root / "epoch_0_step_6")
    assert [Run.open(root).complete(step) for step in (2, 4, 6)] == [True, True, False]
    assert Path(library.find_latest_checkpoint(root)).name == "epoch_0_step_4"
    operate(root, {"repair_latest": {}})
    assert Run.open(root).latest() == 4
    assert Path(library.find_latest_checkpoint(root)).name == "epoch_0_step_4"
    library.clear_checkpoint_incomplete(root / "epoch_0_step_6")
    assert Run.open(root).complete(6)
