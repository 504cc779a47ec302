"""What Megatron-LM loads in place of the step that its tracker names, by the saved command line.

A checkpoint that is not persistent is loaded if it is not older. Source: `_load_base_checkpoint` in
`megatron/training/checkpointing.py`; the names of local ones are those of `LocalCheckpointManager`
in NVIDIA's resiliency extension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.files.text_file import number
from ckptsurgeon.formats.step_folders import listed
from ckptsurgeon.formats.values import Rival

TRACKER = "latest_checkpointed_iteration.txt"
OTHER = "non_persistent"
"""Where checkpoints of `--non-persistent-ckpt-type global` lie, unless a folder is given."""
LOCAL = re.compile(r"iter_(\d{7})_\d+_local\.pt")


def counts(args: Mapping[str, Any]) -> bool:
    """Whether a launch with these arguments looks into `non_persistent/`."""
    kind = args.get("non_persistent_ckpt_type")
    return kind == "global" and not args.get("non_persistent_global_ckpt_dir")


def rivals(run: Path, step: int, args: Mapping[str, Any]) -> list[Rival]:
    """What a launch with these arguments loads in place of `step`, but for `non_persistent/`, whose
    steps are the run's."""
    kind = args.get("non_persistent_ckpt_type")
    if kind == "local":
        return _local(run, step, args.get("non_persistent_local_ckpt_dir"))
    if kind == "global":
        return _elsewhere(run, step, args.get("non_persistent_global_ckpt_dir"))
    return []


def _elsewhere(run: Path, step: int, given: Any) -> list[Rival]:
    """By the tracker in the folder of `--non-persistent-global-ckpt-dir`."""
    if not isinstance(given, str) or not given:
        return []
    folder = run / given
    other = number(folder / TRACKER)
    if other is None or other < step:
        return []
    what = f"{folder} holds iteration {other}, a checkpoint that is not persistent"
    paths = (folder / TRACKER, folder / f"iter_{other:07d}")
    if _inside(folder, run):
        return [Rival(other, what, tuple(path for path in paths if path.exists()))]
    return [Rival(other, what, (), f"mv {paths[0]} {paths[0]}.aside")]


def _local(run: Path, step: int, given: Any) -> list[Rival]:
    """By the names of the ranks' files, as far as they can be seen from here."""
    if not isinstance(given, str) or not given:
        return []
    folder = run / given
    files = {
        path: int(match[1])
        for path in _files(folder)
        if (match := LOCAL.fullmatch(path.name)) and int(match[1]) >= step
    }
    if not files:
        return []
    newest = max(files.values())
    what = f"{folder} holds local checkpoints up to iteration {newest}"
    if _inside(folder, run):
        return [Rival(newest, what, tuple(files))]
    return [Rival(newest, what, (), f"mv {folder} {folder}.aside    on every node")]


def _files(folder: Path) -> list[Path]:
    """What lies in a folder of a rank, or of a rank of a session."""
    below = [folder / name for name in listed(folder)]
    deeper = [inner / name for inner in below for name in listed(inner)]
    return [*deeper, *(inner / name for inner in deeper for name in listed(inner))]


def _inside(folder: Path, run: Path) -> bool:
    return folder.resolve().is_relative_to(run.resolve())


def notes(args: Mapping[str, Any], run: Path, step: int) -> list[str]:
    """What of the saved command line makes a relaunch go on from elsewhere."""
    out = []
    load, save = args.get("load"), args.get("save")
    if load and save and Path(load) != Path(save):
        out.append(
            f"the run was started with --load {load} and --save {save}: relaunch with --load "
            f"{run}, or the trainer goes on from {load}"
        )
    named = args.get("ckpt_step")
    if named and named != step:
        out.append(
            f"the run was started with --ckpt-step {named}: relaunch without it, or the trainer "
            f"loads iteration {named} whatever its tracker says"
        )
    first, size = args.get("override_ckpt_iteration"), args.get("global_batch_size")
    if first is not None:
        out.append(
            f"the run was started with --override-ckpt-iteration {first}: relaunch without it, or "
            f"the trainer counts from iteration {first} and sample {first} × {size}"
        )
    folder = args.get("non_persistent_local_ckpt_dir")
    local = args.get("non_persistent_ckpt_type") == "local" and bool(folder)
    if local and not _inside(run / str(folder), run):
        out.append(
            f"each node keeps local checkpoints in {folder}: one of iteration {step} or later is "
            f"loaded in place of this step. Look on every node: mv {folder} {folder}.aside"
        )
    return out
