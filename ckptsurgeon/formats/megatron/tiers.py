"""What Megatron-LM loads in place of the step that its tracker names, by the saved command line.

A checkpoint that is not persistent is loaded if it is not older, and the highest numbers of them
are kept when a newer one is saved, whatever the tracker beside them says. Source:
`_load_base_checkpoint` and `cleanup_old_non_persistent_checkpoint` in
`megatron/training/checkpointing.py`; the names of local ones are those of `LocalCheckpointManager`
in NVIDIA's resiliency extension.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.formats.fields.constants import TRACKER
from ckptsurgeon.formats.fields.values import LOADED, OUTLIVES, Rival
from ckptsurgeon.formats.step_folders import listed
from ckptsurgeon.hints import command, shell

OTHER = "non_persistent"
"""Where checkpoints of `--non-persistent-ckpt-type global` lie, unless a folder is given."""
LOCAL = re.compile(r"iter_(\d{7})_\d+_local(\.dirty)?\.pt")
"""The dirty one is of a save that died: where it lies, that iteration can't be saved."""
STEP = re.compile(r"iter_(\d{7,18})")
Named = Callable[[Path], int | None]
"""The step that the pointer in a folder names."""


def counts(args: Mapping[str, Any]) -> bool:
    """Whether a launch with these arguments looks into `non_persistent/`."""
    kind = args.get("non_persistent_ckpt_type")
    return kind == "global" and not args.get("non_persistent_global_ckpt_dir")


def belongs(folder: Path) -> bool:
    """Whether it is the `non_persistent/` of a run."""
    names = listed(folder.parent) if folder.name == OTHER else []
    return TRACKER in names or any(STEP.fullmatch(name) for name in names)


def only_there(run: Path, step: int) -> bool:
    """Whether `step` was saved as one that is not persistent, and not otherwise."""
    name = f"iter_{step:07d}"
    return disk.is_folder(run / OTHER / name) and not disk.is_folder(run / name)


def pointed_in(run: Path, step: int) -> list[Path]:
    """The folders whose pointers must name `step` for it to be loaded."""
    return [run, run / OTHER] if only_there(run, step) else [run]


def rivals(
    run: Path, step: int, args: Mapping[str, Any], named: Named, pointers: tuple[str, ...]
) -> list[Rival]:
    """What a launch with these arguments loads in place of `step`, or keeps while it removes newer
    ones, but for `non_persistent/`, whose steps are the run's. `pointers` are the names of the
    files that name a step, and `named` reads them."""
    kind = args.get("non_persistent_ckpt_type")
    if kind == "local":
        return _local(run, step, args.get("non_persistent_local_ckpt_dir"))
    given = args.get("non_persistent_global_ckpt_dir")
    if kind != "global" or not isinstance(given, str) or not given:
        return []
    folder = run / given
    if folder.resolve() == run.resolve():
        return _persistent(step, Path(str(args.get("save"))), named)
    return _elsewhere(run, step, folder, named(folder), pointers)


def _persistent(step: int, save: Path, named: Named) -> list[Rival]:
    """Of a folder of checkpoints that are not persistent: the run in `save`, where it is newer."""
    other = named(save) if save.is_absolute() else None
    if other is None or other <= step:
        return []
    why = f"to one that is not newer than {step}"
    remedy = command("rollback", "--to", "STEP", run=save, why=why)
    return [Rival(other, f"{save} holds iteration {other}", (), remedy)]


def _elsewhere(
    run: Path, step: int, folder: Path, other: int | None, pointers: tuple[str, ...]
) -> list[Rival]:
    """By the pointer in the folder of `--non-persistent-global-ckpt-dir`, which names `other`, and
    by the numbers there: a later one is kept for ever and the new ones are removed."""
    matches = (STEP.fullmatch(name) for name in listed(folder))
    out = {int(match[1]) for match in matches if match and int(match[1]) > step}
    names: tuple[str, ...] = ()
    harm = OUTLIVES
    if other is not None and other >= step:
        out, names, harm = out | {other}, pointers, LOADED
    if not out:
        return []
    what = f"{folder} holds iteration {max(out)}, a checkpoint that is not persistent"
    if not _inside(folder, run):
        return [Rival(max(out), what, (), shell(["mv", folder, f"{folder}.aside"]), harm)]
    names += tuple(f"iter_{number:07d}" for number in sorted(out))
    paths = tuple(folder / name for name in names if disk.exists(folder / name))
    return [Rival(max(out), what, paths, "", harm)]


def _local(run: Path, step: int, given: Any) -> list[Rival]:
    """By the names of the ranks' files, as far as they can be seen from here."""
    if not isinstance(given, str) or not given:
        return []
    folder = run / given
    names = ((path, LOCAL.fullmatch(path.name)) for path in _files(folder))
    files = {path: match for path, match in names if match and int(match[1]) >= step}
    loaded = [int(match[1]) for match in files.values() if not match[2]]
    if not loaded:
        return []
    newest = max(loaded)
    what = f"{folder} holds local checkpoints up to iteration {newest}"
    if _inside(folder, run):
        return [Rival(newest, what, tuple(files))]
    return [Rival(newest, what, (), shell(["mv", folder, f"{folder}.aside"], why="on every node"))]


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
