"""Runs that save plain torch.distributed.checkpoint folders: torchtitan and OLMo-core.

Neither has a pointer: both resume from the highest step that has certain files. Source:
torchtitan's `components/checkpointer/dcp.py`, OLMo-core's `train/checkpoint.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon import disk
from ckptsurgeon.errors import count
from ckptsurgeon.files import json_text
from ckptsurgeon.files.dcp import METADATA, Saved, Values
from ckptsurgeon.formats.dcp.checkpoint import DcpCheckpoint
from ckptsurgeon.formats.dcp.olmo_core import OlmoCoreCheckpoint
from ckptsurgeon.formats.dcp.olmo_ddp import OlmoDdpCheckpoint, is_flat
from ckptsurgeon.formats.dcp.shards import absent
from ckptsurgeon.formats.dcp.torchtitan import TorchtitanCheckpoint
from ckptsurgeon.formats.fields.shard_files import opened, read_shards
from ckptsurgeon.formats.fields.understood import RANKS, not_understood, problem
from ckptsurgeon.formats.fields.values import Rival, State
from ckptsurgeon.formats.layout import FindsStep, Format, LogsBeside, NamesMore
from ckptsurgeon.formats.places.siblings import Siblings, siblings
from ckptsurgeon.formats.step_folders import files_below, folders_in
from ckptsurgeon.hints import Hint, command

CONFIG = "config.json"
"""What OLMo-core's ConfigSaverCallback leaves in each step."""


class Torchtitan(Format, FindsStep, LogsBeside, NamesMore):
    """`<root>/step-<N>/` with `.metadata` and `.distcp` files."""

    name = "torchtitan"
    options: Mapping[str, str] = {
        "clip_grad": "--training.max_norm",
        "seed": "--dataloader.seed",
        "batch_size": "--training.global_batch_size",
        "lr": "--optimizer.lr",
        "min_lr": "--lr_scheduler.min_lr_factor (a factor of lr)",
        "warmup": "--lr_scheduler.warmup_steps (in steps)",
        "decay": "--lr_scheduler.decay_ratio (of all steps)",
        "decay_style": "--lr_scheduler.decay_type",
    }
    fresh_optimizer = 'checkpoint.exclude_from_loading=["optimizer"]'
    folder_name = "step-{}"
    inner = ""
    optimizer = "optimizer."
    beside: ClassVar[tuple[str, str]] = ("checkpoint", "../tb")
    """What it calls the folder of its steps (`checkpoint.folder`), and from there that of its event
    files (`metrics.save_tb_folder`), both in `dump_folder`."""

    def log_folders(self, run: Path) -> Sequence[str]:
        """The run, and the trainer's usual log folder where both have their usual names."""
        name, logs = self.beside
        return (".", logs) if run.name == name and disk.is_folder(run / logs) else (".",)

    def recognizes(self, run: Path) -> bool:
        """True with a step's folder that has a `.metadata` where this trainer puts it."""
        return any(disk.is_file(self._saved(run, step) / METADATA) for step in self.steps(run))

    def steps(self, run: Path) -> list[int]:
        """The N of every step's folder, ascending."""
        pattern = re.compile(self.folder_name.format(r"(\d{1,18})"))
        matches = (pattern.fullmatch(name) for name in folders_in(run))
        return sorted(int(match[1]) for match in matches if match)

    def directory(self, run: Path, step: int) -> Path:
        """The step's folder."""
        return run / self.folder_name.format(step)

    def _saved(self, run: Path, step: int) -> Path:
        return self.directory(run, step) / self.inner

    def entries(self, run: Path, step: int) -> list[Path]:
        """The folder."""
        return [self.directory(run, step)]

    def begun(self, run: Path, step: int) -> list[Path]:
        """What has the number of a later step in its name, beside the folders of a loop of one's
        own that are only named like this trainer's."""
        found = self._siblings(run, step)
        numbers = sorted({*found.own} & {*self.steps(run), *found.beyond})
        return [path for each in numbers if each > step for path in found.own[each]]

    def unclear(self, run: Path, step: int) -> list[Path]:
        """Such a name that may mean something else."""
        found = self._siblings(run, step).unclear
        later = (path for each in sorted(found) if each > step for path in found[each])
        return list(dict.fromkeys(later))

    def _siblings(self, run: Path, step: int) -> Siblings:
        """Of a loop of one's own; this trainer saves all of a step in its folder."""
        folders = {each: [self.directory(run, each)] for each in self.steps(run)}
        if len(folders) < 2 or not self.open(run, step).foreign:
            return Siblings()
        return siblings(run, folders, ())

    def files(self, run: Path, step: int) -> list[Path]:
        """All that lies in the folder, at any depth."""
        return files_below(self.directory(run, step))

    def missing(self, run: Path, step: int) -> list[str]:
        """`.metadata`, or the files that it names."""
        if not disk.is_file(self._saved(run, step) / METADATA):
            return [f"{self.inner}/{METADATA}".lstrip("/")]
        return absent(self._saved(run, step))

    def strays(self, run: Path, step: int) -> list[str]:
        """Folders whose names only contain a step's: torchtitan takes them for that step's."""
        return [
            f"{item.name}: is taken for step {match[1]} by the trainer, which then looks for "
            f"{self.folder_name.format(match[1])}"
            for item in sorted(run.iterdir())
            if (match := re.search(r"step-(\d{1,18})", item.name))
            and not re.fullmatch(r"step-\d+", item.name)
            and _marked(item)
        ]

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """Folders with a later step's number somewhere in their names: the trainer resumes the
        highest, and `keep_latest_k` removes the lower ones first (`_purge_stale_checkpoints`)."""
        return [
            Rival(
                int(match[1]), f"{item.name} is taken for step {match[1]} by the trainer", (item,)
            )
            for item in sorted(run.iterdir())
            if (match := re.search(r"step-(\d{1,18})", item.name))
            and not re.fullmatch(r"step-\d+", item.name)
            and int(match[1]) > step
            and disk.is_folder(item)
        ]

    def resumes(self, run: Path) -> int | None:
        """The highest step that the trainer takes for one: it does not look for the files."""
        return max((step for step in self.steps(run) if self.taken(run, step)), default=None)

    def taken(self, run: Path, step: int) -> bool:
        """By `.metadata`, or the index of weights that were saved for Hugging Face."""
        return _marked(self.directory(run, step))

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> DcpCheckpoint:
        """Read `.metadata` and the torch files beside it; values are read when asked for."""
        return TorchtitanCheckpoint(**self.parts(run, step, without))

    def parts(self, run: Path, step: int, without: Collection[Path]) -> dict[str, Any]:
        """What every checkpoint of such a folder is made of."""
        folder = self.directory(run, step)
        saved = Saved.open(self._saved(run, step))
        beside = [path for path in self.torch_files(folder) if path not in without]
        trees, archives = read_shards(beside)
        return {
            "path": folder, "step": step, "trees": {**trees, saved.path: Values(saved)},
            "archives": archives, "saved": saved, "trainer": self.name,
            "prefix": self.optimizer, "options": self.options,
        }  # fmt: skip

    def torch_files(self, folder: Path) -> list[Path]:
        """No torch file lies beside the `.distcp` files."""
        return []

    def advise(self, key: str, value: object) -> str:
        """The order of the data has a seed of its own, and the saved loader goes on with it."""
        if key == "seed":
            return (
                f"relaunch the trainer with --dataloader.seed {value} (of interleaved data; other "
                "orders have no seed) and --checkpoint.exclude_from_loading dataloader, which "
                "starts the data from the beginning"
            )
        return super().advise(key, value)


class OlmoCore(Torchtitan):
    """`<root>/step<N>/` with `model_and_optim/`, `train/rank<R>.pt` and `.metadata.json`."""

    name = "olmo-core"
    options: Mapping[str, str] = {
        "clip_grad": "--train_module.max_grad_norm",
        "seed": "--data_loader.seed",
        "lr": "--train_module.optim.lr",
        "min_lr": "--train_module.scheduler",
        "warmup": "--train_module.scheduler",
        "decay": "--train_module.scheduler",
        "decay_style": "--train_module.scheduler",
    }
    fresh_optimizer = "--trainer.load_optim_state=false"
    folder_name = "step{}"
    inner = "model_and_optim"
    optimizer = "optim."

    def missing(self, run: Path, step: int) -> list[str]:
        """As `.metadata` says, and each rank's file by the world size in the first one's."""
        folder = self.directory(run, step)
        names = super().missing(run, step)
        if not disk.is_file(folder / ".metadata.json"):
            names.append(".metadata.json")
        first = folder / "train" / "rank0.pt"
        if not disk.is_file(first):
            return [*names, "train/rank0.pt"]
        tree = opened([first])[first].tree()
        size: Any = tree.get("world_size", 1) if isinstance(tree, dict) else None
        if problem("ranks", size):
            raise not_understood(first, ("world_size",), size, RANKS)
        ranks = (f"train/rank{rank}.pt" for rank in range(size))
        return [*names, *(name for name in ranks if not disk.is_file(folder / name))]

    def strays(self, run: Path, step: int) -> list[str]:
        """No such name: a step's has nothing around it."""
        return []

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """For the same reason none."""
        return []

    def taken(self, run: Path, step: int) -> bool:
        """By three files; a rank that lacks its own reads that of rank 0."""
        folder = self.directory(run, step)
        names = ("train/rank0.pt", f"{self.inner}/{METADATA}", ".metadata.json")
        return disk.is_file(folder / METADATA) or all(disk.is_file(folder / name) for name in names)

    def torch_files(self, folder: Path) -> list[Path]:
        """The trainer state of each rank."""
        return [*disk.matching(folder, "train/rank*.pt")]

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> OlmoCoreCheckpoint:
        """Also `config.json` of the step, or of the run, and whether the step is ephemeral."""
        folder = self.directory(run, step)
        configs = [path for path in (folder / CONFIG, run / CONFIG) if disk.is_file(path)]
        about = folder / ".metadata.json"
        parts = self.parts(run, step, without)
        kind = OlmoDdpCheckpoint if is_flat(parts["saved"]) else OlmoCoreCheckpoint
        return kind(
            **parts,
            config=json_text.mapping(configs[0]) if configs else {},
            ephemeral=disk.is_file(about) and json_text.mapping(about).get("ephemeral") is True,
        )

    def advise_setting(self, key: str) -> str:
        """The config of the optimizer, where OLMoDDP keeps none."""
        return f"relaunch the trainer with --train_module.optim.{key}"

    def advise_rewarm(
        self, state: State, kind: str, until: str, iterations: int
    ) -> tuple[Hint, ...]:
        """By the config where the run has a scheduler."""
        return (
            command("reset", "moments", why="without re-warm"),
            f"and for {count(iterations, 'step')} a small {self.options['lr']}",
            command("set-lr", "0.1x", why="in a run without a scheduler, and back at a later one"),
        )

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
        """Its ranges have their start and not their stop."""
        pairs = ", ".join(f"{{start: {first}, stop: {last + 1}}}" for first, last in ranges)
        return f"relaunch the trainer with --trainer.steps_to_skip='[{pairs}]'"

    def advise(self, key: str, value: object) -> str:
        """A rank without a loader's state takes the seed of its config; a batch has tokens."""
        if key == "batch_size":
            tokens = f"{value} × the sequence length"
            return f"relaunch the trainer with --data_loader.global_batch_size at {tokens}"
        if key not in self.options:
            return super().advise(key, value)
        flag = f"relaunch the trainer with {self.options[key]}={value}"
        return f"{flag} (it has no saved loader)" if key == "seed" else flag


def _marked(folder: Path) -> bool:
    return any(disk.is_file(folder / name) for name in (METADATA, "model.safetensors.index.json"))
