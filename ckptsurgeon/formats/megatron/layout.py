"""Megatron-LM runs: `iter_<N>` folders of the legacy or the torch_dist format, and their tracker.

File names: `megatron/training/checkpointing.py`, `get_checkpoint_name`; a folder with
`metadata.json` is torch_dist, one with `mp_rank_*` legacy, whatever the run's other folders are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import METADATA, Saved
from ckptsurgeon.files.text_file import number
from ckptsurgeon.formats.advice import loaded
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.dcp.shards import absent
from ckptsurgeon.formats.fields.constants import TRACKER
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.fields.understood import problem, understood
from ckptsurgeon.formats.fields.values import Hazard, Rival
from ckptsurgeon.formats.layout import CleansUp, Format, HasHazards, NamesElsewhere
from ckptsurgeon.formats.megatron import bridge, experts, options, tiers
from ckptsurgeon.formats.megatron.checkpoint import MegatronCheckpoint
from ckptsurgeon.formats.megatron.dist import COMMON, CONFIG, opened_dist
from ckptsurgeon.formats.megatron.flags import USE
from ckptsurgeon.formats.megatron.flat import NOT_READ, ROOT, opened_flat
from ckptsurgeon.formats.megatron.tiers import OTHER, STEP
from ckptsurgeon.formats.step_folders import files_below, folders_in, listed
from ckptsurgeon.hints import Hint, command, shell
from ckptsurgeon.transaction.home import HOME

RANK = re.compile(r"mp_rank_(?P<tp>\d{2,})(?:_(?P<a>\d{3,}))?(?:_(?P<b>\d{3,}))?")
SHARD = re.compile(r"model_optim_rng\.pt|distrib_optim\.pt|layer_wise_optimizer_\d+\.pt")


class Megatron(Format, CleansUp, HasHazards, NamesElsewhere):
    """`<root>/iter_<N>` and `<root>/latest_checkpointed_iteration.txt`."""

    name = "megatron"
    options = options.OPTIONS
    fresh_optimizer = "--no-load-optim --load-main-params-from-ckpt"
    tier_pointers: tuple[str, ...] = (TRACKER,)
    """What is written beside checkpoints that are not persistent; the first is what is read."""
    tier_option = "--non-persistent-ckpt-type global"
    """With what a launch looks for them."""

    def recognizes(self, run: Path) -> bool:
        """True with an `iter_<N>` folder that holds a checkpoint of either format. Not the folder
        of those that are not persistent: the run, whose tracker is asked too, is above it."""
        if tiers.belongs(run) and not disk.is_folder(run / HOME):
            return False
        folders = (folder for step in self.steps(run) for folder in self._folders(run, step))
        return any(is_dist(f) or _ranks(f) or disk.is_file(f / METADATA) for f in folders)

    def named(self, folder: Path) -> int | None:
        """The step that is loaded of a folder of checkpoints that are not persistent."""
        return number(folder / TRACKER)

    def _not_persistent(self, run: Path) -> int | None:
        """The step in `non_persistent/` that is loaded, if the launch that saved it looks there on
        a load; or if that can't be told."""
        step = self.named(run / OTHER)
        return step if step is not None and _looked_for(run / OTHER, step) else None

    def steps(self, run: Path) -> list[int]:
        """The N of every `iter_<N>` folder, also of those that are not persistent."""
        numbers = []
        for folder in (run, run / OTHER):
            if disk.is_folder(folder):
                names = (STEP.fullmatch(name) for name in folders_in(folder))
                numbers += [int(match[1]) for match in names if match]
        return sorted(set(numbers))

    def _folders(self, run: Path, step: int) -> list[Path]:
        """What the loader takes for `step` first."""
        name = f"iter_{step:07d}"
        there = [folder / name for folder in (run, run / OTHER) if disk.is_folder(folder / name)]
        return there[::-1] if self._not_persistent(run) == step else there

    def directory(self, run: Path, step: int) -> Path:
        """`iter_<N>`, with 7 digits or more."""
        return next(iter(self._folders(run, step)), run / f"iter_{step:07d}")

    def entries(self, run: Path, step: int) -> list[Path]:
        """The folder; and with a checkpoint that is not persistent the pointers to it."""
        out = self._folders(run, step)
        if self.named(run / OTHER) != step:
            return out
        files = (run / OTHER / name for name in self.tier_pointers)
        return [*out, *(file for file in files if disk.exists(file))]

    def files(self, run: Path, step: int) -> list[Path]:
        """All that lies in the folder and in the folders of its ranks."""
        return files_below(self.directory(run, step))

    def missing(self, run: Path, step: int) -> list[str]:
        """Names of absent files: by the parallel sizes in the args, or by .metadata."""
        folder = self.directory(run, step)
        if is_flat(folder):
            return absent(folder)
        if is_dist(folder):
            there = {CONFIG, METADATA} - {item.name for item in folder.iterdir()}
            return sorted(there) or absent(folder)
        return self._expected(folder)

    def _expected(self, folder: Path) -> list[str]:
        names = [rank.name for rank in _ranks(folder)] or ["mp_rank_00"]
        shards = [folder / name / "model_optim_rng.pt" for name in names]
        held = [shard for shard in shards if disk.is_file(shard)]
        if not held:
            return [f"{name}/model_optim_rng.pt" for name in names]
        first = MegatronCheckpoint(folder, 0, *read_shards(held[:1]))
        with understood(folder):
            args = first.args()
            sizes = [
                int(args.get(f"{kind}_model_parallel_size") or 1)
                for kind in ("tensor", "pipeline", "expert")
            ]
            data = int(args.get("data_parallel_size") or 1)
            cut = experts.tensor_ranks(args)
            total = sizes[0] * sizes[1] * sizes[2] * max(data, cut)
            reasons = [problem("ranks", size) for size in (*sizes, data, cut, total)]
        if any(reasons):
            raise SurgeryError(
                f"{held[0].parent}: {next(filter(None, reasons))}",
                next="compare its sizes with the command line of the trainer",
            )
        names = [
            f"mp_rank_{t:02d}" + (f"_{p:03d}" if sizes[1] > 1 else "")
            + (f"_{e:03d}" if sizes[2] > 1 else "")
            for p in range(sizes[1]) for t, e in experts.shares(sizes[0], sizes[2], cut)
        ]  # fmt: skip
        files = ["model_optim_rng.pt"]
        if args.get("use_layer_wise_distributed_optimizer") and not args.get("no_save_optim"):
            files += [f"layer_wise_optimizer_{rank}.pt" for rank in range(data)]
        elif args.get("use_distributed_optimizer") and not args.get("no_save_optim"):
            files.append("distrib_optim.pt")
        paths = [f"{name}/{file}" for name in names for file in files]
        return [name for name in paths if not disk.is_file(folder / name)]

    def strays(self, run: Path, step: int) -> list[str]:
        """A sentence for each rank's folder that the saved parallel sizes do not have; and for a
        step that no launch reads from where it lies."""
        folder = self.directory(run, step)
        ranks = [] if is_dist(folder) else _ranks(folder)
        widths = {item.name.count("_") for item in ranks}
        mixed = f"{folder.name}: ranks of different layouts lie side by side"
        unread = folder.parent.name == OTHER and is_flat(folder)
        return [mixed] * (len(widths) > 1) + [NOT_READ] * unread

    def pointer_files(self, run: Path) -> list[Path]:
        """The tracker."""
        return [run / TRACKER]

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """The tracker with the number alone; and that of `non_persistent/` for a step that is
        nowhere else."""
        return {folder / TRACKER: str(step) for folder in tiers.pointed_in(run, step)}

    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """None. Raises SurgeryError for a step in `non_persistent/` alone where no launch looks."""
        if tiers.only_there(run, step) and not _looked_for(run / OTHER, step):
            raise SurgeryError(
                f"step {step} is in {OTHER}/ alone, where a launch looks with "
                f"{self.tier_option} only",
                next=shell(
                    ["mv", self.directory(run, step), f"{run}/"], why="then the same command again"
                ),
            )
        return []

    def pointed(self, pointer: Path) -> int | None:
        """The step that is loaded: the tracker's, or that of a checkpoint that is not persistent
        and not older."""
        named = number(pointer)
        other = self._not_persistent(pointer.parent)
        return other if named is not None and other is not None and other >= named else named

    def kept_as(self, file: str) -> str:
        """`iter_<N>` is `iter-<N>`: of all `iter_*` below a folder, at any depth, the clean-up of
        checkpoints that are not persistent keeps the highest, and so does `most_recent_k` of
        Megatron-Bridge 0.6 (`cleanup_old_non_persistent_checkpoint`)."""
        return file.replace("iter_", "iter-")

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """By the command line of the newest step: the next launch will have it, too; and a newer
        checkpoint that is not persistent, where no pointer leads past it."""
        found = tiers.rivals(run, step, _newest_args(run), self.named, self.tier_pointers)
        other = self._not_persistent(run)
        if other is not None and other > step and run / OTHER not in tiers.pointed_in(run, step):
            what = f"{OTHER}/ holds iteration {other}"
            found.append(Rival(other, what, tuple(self.entries(run, other))))
        return found

    def hazards(self, run: Path) -> list[Hazard]:
        """A checkpoint that is loaded in place of the latest, or kept before it."""
        return self.outdone(run, self.pointed(run / TRACKER))

    def outdone(self, run: Path, latest: int | None) -> list[Hazard]:
        """What is loaded in place of step `latest`, or kept before it."""
        return [
            Hazard(
                f"{rival.what}: {rival.harm.format(latest)}",
                rival.remedy or command("rollback", "--to", latest, why="moves it aside"),
            )
            for rival in (self.rivals(run, latest) if latest is not None else ())
        ]

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
        """A flag that takes each iteration by itself."""
        each = [str(i) for first, last in ranges for i in range(first, last + 1)]
        return " ".join(["relaunch the trainer with --iterations-to-skip", *each])

    def launch_flags(self, run: Path, checkpoint: Checkpoint) -> list[str]:
        """The folder, the file's schedule, and all values, which the loader compares."""
        args = checkpoint.args() if isinstance(checkpoint, MegatronCheckpoint) else {}
        return [*loaded("--load", run), USE, *options.values(checkpoint.state(), args)]

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> MegatronCheckpoint:
        """Read the trees of all ranks; of the other formats, values when they are asked for."""
        folder = self.directory(run, step)
        if is_dist(folder):
            return opened_dist(folder, step, without)
        if is_flat(folder):
            return opened_flat(folder, step, without)
        if disk.exists(folder / METADATA) and not _ranks(folder):
            raise SurgeryError(
                f"{folder} was not finished: torch_dist has a {CONFIG}, and torch_dcp and "
                "fsdp_dtensor keep args",
                next=command("status", why="which steps are complete"),
            )
        shards = [path for path in self.files(run, step) if SHARD.fullmatch(path.name)]
        files = [path for path in shards if path not in without]
        return MegatronCheckpoint(folder, step, *read_shards(files))


def _looked_for(folder: Path, step: int) -> bool:
    """Whether the launch that saved `step` in `non_persistent/` looks there on a load."""
    args = _saved_args(folder / f"iter_{step:07d}")
    return args is None or tiers.counts(args)


def _newest_args(run: Path) -> Mapping[str, Any]:
    """The command line of the newest step that keeps one."""
    folders = {
        int(match[1]): folder / match[0]
        for folder in (run, run / OTHER)
        for name in listed(folder)
        if (match := STEP.fullmatch(name))
    }
    args = (_saved_args(folders[step]) for step in sorted(folders, reverse=True))
    return next((known for known in args if known is not None), {})


def _saved_args(folder: Path) -> Mapping[str, Any] | None:
    """The command line that one saved step keeps; None if it is not there or can't be read."""
    try:
        if disk.is_file(folder / bridge.CONFIG):
            return bridge.arguments(folder)
        if is_dist(folder):
            return opened_dist(folder, 0).args()
        if is_flat(folder):
            return opened_flat(folder, 0).args()
        files = [rank / "model_optim_rng.pt" for rank in _ranks(folder)[:1]]
        return MegatronCheckpoint(folder, 0, *read_shards(files)).args() if files else None
    except (SurgeryError, OSError):
        return None


def is_dist(folder: Path) -> bool:
    """Whether it is of torch_dist."""
    return disk.is_file(folder / CONFIG) or disk.is_file(folder / COMMON)


def is_flat(folder: Path) -> bool:
    """Whether the values of torch_dcp or fsdp_dtensor are there: an unfinished torch_dist has
    `.metadata` alone, too, but keeps its args inside another value."""
    path = folder / METADATA
    if is_dist(folder) or _ranks(folder) or not disk.is_file(path):
        return False
    status = path.stat()
    return _keeps_args(folder, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=4096)
def _keeps_args(folder: Path, identity: tuple[int, ...]) -> bool:
    """Asked once while `.metadata` is the same."""
    return bool(ROOT & Saved.open(folder).items.keys())


def _ranks(folder: Path) -> list[Path]:
    if not disk.is_folder(folder):
        return []
    return sorted(
        item for item in folder.iterdir() if RANK.fullmatch(item.name) and disk.is_folder(item)
    )
