"""Megatron-Bridge runs: Megatron-LM's folders, each with counters and a config of its own.

File names: `training/utils/checkpoint_utils.py` of megatron-bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.constants import TRACKER
from ckptsurgeon.formats.fields.shard_files import opened
from ckptsurgeon.formats.fields.values import Hazard
from ckptsurgeon.formats.megatron import bridge, options, tiers
from ckptsurgeon.formats.megatron.checkpoint import MegatronCheckpoint
from ckptsurgeon.formats.megatron.flags import USE
from ckptsurgeon.formats.megatron.layout import Megatron, is_dist, is_flat
from ckptsurgeon.hints import Hint

POINTER = f"latest_{bridge.COUNTERS}"


class MegatronBridge(Megatron):
    """The same folders, each with `train_state.pt` and `run_config.yaml`, and
    `<root>/latest_train_state.pt`, which names the step by the counter in it."""

    name = "megatron-bridge"
    copy_names_folder = True
    options: Mapping[str, str] = {
        key: " ".join(bridge.KEYS[option]) for key, option in options.OPTIONS.items()
    }
    fresh_optimizer = "checkpoint.load_optim=false"
    tier_pointers = (POINTER, TRACKER)
    tier_option = "checkpoint.non_persistent_ckpt_type=global"

    def recognizes(self, run: Path) -> bool:
        """True with that pointer, or the counters in a step's folder."""
        folders = (folder for step in self.steps(run) for folder in self._folders(run, step))
        counted = any(disk.is_file(folder / bridge.COUNTERS) for folder in folders)
        return (disk.is_file(run / POINTER) or counted) and super().recognizes(run)

    def named(self, folder: Path) -> int | None:
        """By the counters alone: its tracker is written there, and not read."""
        return _counted(folder / POINTER)

    def entries(self, run: Path, step: int) -> list[Path]:
        """And its place in the data, which the clean-up would count among the steps."""
        place = run / bridge.DATA / f"iter_{step:07d}"
        return [*super().entries(run, step), *[place] * disk.is_folder(place)]

    def missing(self, run: Path, step: int) -> list[str]:
        """And the counters, which a pointer to the step is a copy of."""
        names = super().missing(run, step)
        there = disk.is_file(self.directory(run, step) / bridge.COUNTERS)
        return names if there else [*names, bridge.COUNTERS]

    def pointer_files(self, run: Path) -> list[Path]:
        """The counters of the latest step, and Megatron-LM's tracker, which is kept up."""
        tracker = [run / TRACKER] if disk.exists(run / TRACKER) else []
        return [run / POINTER, *tracker]

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """A copy of the step's counters, and the tracker; see `Megatron.pointers`."""
        counters = self.directory(run, step) / bridge.COUNTERS
        folders = tiers.pointed_in(run, step)
        texts: dict[Path, str | Path] = {folder / POINTER: counters for folder in folders}
        trackers = (folder / TRACKER for folder in folders)
        return texts | {path: str(step) for path in trackers if disk.exists(path)}

    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """None. Raises SurgeryError where the step's counters name another iteration, and a pointer
        would become a copy of them; and as of Megatron-LM."""
        counters = self.directory(run, step) / bridge.COUNTERS
        anew = any(self.pointed(each / POINTER) != step for each in tiers.pointed_in(run, step))
        if anew and _counted(counters) != step:
            raise SurgeryError(
                f"{counters.parent.name}/{counters.name} counts iteration {_counted(counters)}, so "
                f"{POINTER} as a copy of it would name that step",
                next=f"relaunch the trainer with checkpoint.ckpt_step={step}",
            )
        return super().stale_pointers(run, step)

    def pointed(self, pointer: Path) -> int | None:
        """The iteration in the counters; see `Megatron.pointed`."""
        if pointer.name == TRACKER:
            return super().pointed(pointer)
        named, other = _counted(pointer), self._not_persistent(pointer.parent)
        return other if named is not None and other is not None and other >= named else named

    def advise(self, key: str, value: object) -> str:
        """By the key of its config."""
        if key == "optimizer":
            return super().advise(key, value)
        if key == "seed":
            return (
                f"relaunch the trainer with rng.seed={value} checkpoint.load_rng=false, or it goes "
                "on with the saved random numbers; the data is ordered by dataset.random_seed"
            )
        keys = f"{self.options[key]}={value}"
        if key == "rampup":
            keys = f"{self.options[key]}=[{','.join(str(value).split())}]"
            keys += ", or, as megatron-core 0.19 ignores it, with another batch size at each stage"
        if key == "batch_size":
            keys = " ".join([keys, *bridge.USE])
            return f"relaunch the trainer with {keys}: the schedule counts samples, and stays"
        return f"relaunch the trainer with {keys}"

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
        """The same list as Megatron-LM's, by the key of its config."""
        each = ",".join(str(i) for first, last in ranges for i in range(first, last + 1))
        return f"relaunch the trainer with train.iterations_to_skip=[{each}]"

    def hazards(self, run: Path) -> list[Hazard]:
        """As of Megatron-LM, by its own pointer."""
        return self.outdone(run, self.pointed(run / POINTER))

    def launch_flags(self, run: Path, checkpoint: Checkpoint) -> list[str]:
        """The keys of its config with their values."""
        words = super().launch_flags(run, checkpoint)
        load = [] if words[0] == USE else [f"checkpoint.load={run}"]
        words = words[words.index(USE) + 1 :]
        pairs = [
            f"{key}={value}"
            for option, value in zip(words[::2], words[1::2], strict=True)
            for key in bridge.KEYS[option]
        ]
        return [*load, *bridge.USE, *pairs]

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> MegatronCheckpoint:
        """With the counters and the config beside what Megatron-core saved."""
        folder = self.directory(run, step)
        flat = is_flat(folder)
        if not flat and not is_dist(folder):
            return super().open(run, step, without)
        return bridge.opened(folder, step, flat, without)


def _counted(path: Path) -> int | None:
    """The iteration in a `train_state.pt`; None without one that can be read."""
    try:
        archive = opened([path])[path]
        held = archive.tree()["step"]
        step = archive.value(held) if isinstance(held, Tensor) else held
    except (SurgeryError, OSError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
