"""Hugging Face runs: the Trainer's `checkpoint-<N>` folders and those of Accelerate.

Names: `transformers/trainer.py` (`_save_checkpoint`), `accelerate/checkpointing.py`. Neither keeps
a pointer: the Trainer resumes the highest number, and so does Accelerate with its own names.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import json_text
from ckptsurgeon.files.dcp import Saved, Values
from ckptsurgeon.formats.advice import loaded
from ckptsurgeon.formats.deepspeed.engine import Engine, EngineCheckpoint
from ckptsurgeon.formats.deepspeed.layout import STEP
from ckptsurgeon.formats.fields.constants import TRAINER_STATE
from ckptsurgeon.formats.fields.shard_files import opened, read_shards
from ckptsurgeon.formats.fields.values import OUTLIVES, Rival
from ckptsurgeon.formats.huggingface import fsdp
from ckptsurgeon.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from ckptsurgeon.formats.huggingface.engine import (
    AccelerateEngine,
    SeveralEngines,
    TrainerEngine,
)
from ckptsurgeon.formats.huggingface.fsdp import FsdpCheckpoint
from ckptsurgeon.formats.layout import CountsSaves, FindsStep, KeepsOpaque, NamesElsewhere
from ckptsurgeon.formats.places import json_beside
from ckptsurgeon.formats.schedules.torch_classes import is_torch
from ckptsurgeon.formats.step_folders import StepFolders, listed
from ckptsurgeon.hints import Hint, command, quoted
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.transaction.home import HOME

CHECKPOINTS = "checkpoints"
OPTIMIZER = re.compile(r"optimizer(?:_\d+)?\.bin|(?:rank\d+-of-\d+-)?optimizer\.pt")
SCHEDULER = re.compile(r"scheduler(?:_\d+)?\.bin|scheduler\.pt")
SCALER = "scaler.pt"
LOADER = re.compile(r"dl_state_dict(?:_\d+)?\.bin")
LATEST = re.compile(r"checkpoint[^-]*-(\d+)(?:-.*)?")
"""What diffusers' scripts take for a step, and how they read its number."""
SWIFT_ARGUMENTS, SWIFT = "args.json", "swift_version"
"""The file of its arguments that ms-swift saves in each step, and one of them that is its own."""
CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")
"""What the script registered with Accelerate: a scheduler of its own may be among it."""


class _Saved(StepFolders, FindsStep, KeepsOpaque):
    """What both libraries have in common."""

    name = "huggingface"
    besides: tuple[str, ...] = ()
    """Files without which no optimizer is loaded, or nothing at all."""

    def missing(self, run: Path, step: int) -> list[str]:
        """The optimizer's or scheduler's file, and shards of an engine inside."""
        folder = _inside(self.directory(run, step))
        if engines := _engines(folder):
            return [f"{each.name}/{n}" for each in engines for n in Engine(each).missing(folder, 0)]
        if disk.is_folder(folder / fsdp.OPTIMIZER):
            lacking = fsdp.missing(folder)
        else:
            lacking = [] if _matching(folder, OPTIMIZER) else ["optimizer.pt"]
        return lacking + [name for name in self.besides if not disk.is_file(folder / name)]

    def strays(self, run: Path, step: int) -> list[str]:
        """Shards of an engine inside that belong to no rank; copies of a registered state."""
        folder = _inside(self.directory(run, step))
        return [
            *(text for each in _engines(folder) for text in Engine(each).strays(run, 0)),
            *(
                f"{name}: is none of Accelerate's, and older releases then load no such state"
                for name in listed(folder)
                if name.startswith("custom_checkpoint") and not CUSTOM.fullmatch(name)
            ),
            *(f"{name}: {fsdp.UNLOADED}" for name in fsdp.local(folder)),
        ]

    def opaque(self, file: Path) -> bool:
        """What `LOCAL_STATE_DICT` saved."""
        return fsdp.LOCAL.fullmatch(file.name) is not None

    def resumes(self, run: Path) -> int | None:
        """The highest number, whatever the folder holds."""
        return max(self.steps(run), default=None)

    def open(
        self, run: Path, step: int, without: Collection[Path] = ()
    ) -> HuggingFaceCheckpoint | EngineCheckpoint | FsdpCheckpoint:
        """Read the trees of optimizers, schedulers and the gradient scaler, or of an engine; of an
        optimizer in FSDP's shards its `.metadata`."""
        folder = _inside(self.directory(run, step))
        schedulers = [p for p in _matching(folder, SCHEDULER) if p not in without]
        registered = opened([p for p in _matching(folder, CUSTOM) if p not in without])
        schedulers += [path for path, archive in registered.items() if is_torch(archive.tree())]
        if engines := _engines(folder):
            inner = Engine(engines[0]).open(folder, step, without)
            trees, archives = read_shards(schedulers)
            beside = tuple((path, ()) for path in schedulers)
            trees, archives = inner.trees | trees, inner.archives | archives
            if len(engines) > 1:
                names = tuple(each.name for each in engines)
                return SeveralEngines(folder, step, trees, archives, beside, engines=names)
            if self.name != "transformers":
                return AccelerateEngine(folder, step, trees, archives, beside)
            state = folder / TRAINER_STATE
            values, texts = json_beside.read([state] if disk.is_file(state) else [])
            return TrainerEngine(folder, step, trees | values, archives, beside, texts=texts)
        optimizers = [p for p in _matching(folder, OPTIMIZER) if p not in without]
        scaler = folder / SCALER
        scalers = [scaler] if disk.is_file(scaler) and scaler not in without else []
        loaders = [p for p in _matching(folder, LOADER) if p not in without]
        loaders = loaders if len(loaders) == 1 else []  # of several, which one trains is not known
        trees, archives = read_shards([*optimizers, *schedulers, *scalers, *loaders])
        inside: tuple[Key, ...] = ()
        state = folder / TRAINER_STATE
        values, texts = json_beside.read([state] if disk.is_file(state) else [])
        if disk.is_folder(folder / fsdp.OPTIMIZER):
            saved, *further = map(Saved.open, fsdp.folders(folder, "optimizer"))
            models = fsdp.models(folder)
            sharded = {each.path: Values(each) for each in (saved, *further, *models)}
            return FsdpCheckpoint(
                path=folder,
                step=step,
                trees={**trees, **values, **sharded},
                archives=archives,
                saved=saved,
                trainer=f"{self.name}, FSDP",
                prefix="optimizer.",
                further=tuple((each, "optimizer.") for each in further),
                models=tuple(models),
                options=self.options,
                texts=texts,
                schedulers=tuple((path, inside) for path in schedulers),
                scales=tuple((path, ("scale",)) for path in scalers),
            )
        return HuggingFaceCheckpoint(
            path=folder,
            step=step,
            trees={**trees, **values},
            archives=archives,
            texts=texts,
            optimizers=tuple((path, inside) for path in optimizers),
            schedulers=tuple((path, inside) for path in schedulers),
            scales=tuple((path, ("scale",)) for path in scalers),
            loaders=tuple(loaders),
            family=self.name,
        )


class Transformers(_Saved, NamesElsewhere):
    """`checkpoint-<N>` with `trainer_state.json`."""

    name = "transformers"
    options: Mapping[str, str] = {
        "clip_grad": "--max_grad_norm",
        "seed": "--seed",
        "batch_size": "--per_device_train_batch_size",
    }
    fresh_optimizer = "without optimizer.pt and scheduler.pt in its checkpoint"
    makes_schedule = (
        "relaunch with the arguments that saved the checkpoint (lr_scheduler_type, warmup_steps, "
        "max_steps): the Trainer computes its schedule from them"
    )
    asks_late = True
    besides = ("scheduler.pt", TRAINER_STATE)

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """Folders whose names only begin with a later step's: `save_total_limit` counts them, and
        removes the lower ones first (`sort_checkpoints`)."""
        return [
            Rival(
                int(match[1]),
                f"{name} is counted as step {match[1]} by --save_total_limit",
                (run / name,),
                harm=OUTLIVES,
            )
            for name in listed(run)
            if (match := re.match(r"checkpoint-(\d{1,18})(?=\D)", name))
            and int(match[1]) > step
            and disk.is_folder(run / name)
        ]

    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """The best model so far, where its folder is not in the run; a step without an engine
        inside forgets it (`checkpoint.forget`)."""
        state = self.directory(run, step) / TRAINER_STATE
        if not _engines(state.parent):
            return []
        best = (
            json_text.mapping(state).get("best_model_checkpoint") if disk.is_file(state) else None
        )
        name = Path(best).name if isinstance(best, str) else ""
        match = re.fullmatch(r"checkpoint-(\d{1,18})", name)
        if match is None or (int(match[1]) <= step and disk.is_folder(run / name)):
            return []
        return [
            f"{state.parent.name}/{TRAINER_STATE} names {name} as the best model so far, which is "
            "not in the run: relaunch without --load_best_model_at_end, or a better one is never "
            "loaded"
        ]

    def resume_option(self, run: Path, step: int) -> str:
        """Of ms-swift, which begins anew without it, by the arguments that it saves in a step."""
        saved = self.directory(run, step) / SWIFT_ARGUMENTS
        with contextlib.suppress(SurgeryError, OSError):  # where there are none, or not its own
            if SWIFT in json_text.mapping(saved):
                return quoted(*loaded("--resume_from_checkpoint", saved.parent))
        return ""

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
        """It has no flag, but passes over the data before the step that it resumes."""
        last = max(last for _, last in ranges)
        return command(
            "set",
            f"iteration={last}",
            why="the data up to there is skipped, and the steps count as done",
        )

    def recognizes(self, run: Path) -> bool:
        """True with a folder of such a name where the Trainer's state or an optimizer is."""
        folders = (run / name for name in listed(run) if self.is_step(run / name))
        return any(
            disk.is_file(folder / TRAINER_STATE)
            or disk.is_file(folder / "optimizer.pt")
            or _engines(folder)
            for folder in folders
        )

    def is_step(self, folder: Path) -> bool:
        """By its name alone, as the Trainer finds it."""
        return re.fullmatch(r"checkpoint-\d+", folder.name) is not None


class Accelerate(_Saved, CountsSaves, NamesElsewhere):
    """Folders that `save_state` filled: `checkpoint_<N>`, or the user's own names with a number."""

    name = "accelerate"
    fresh_optimizer = "accelerator.load_state before prepare(optimizer) in the script"

    def recognizes(self, run: Path) -> bool:
        """Not the folder that automatic naming fills: Accelerate reads a number in every name in
        it, and nothing of a surgery may lie there. The project's folder, above it, is the run."""
        own = disk.is_folder(run / HOME)
        return super().recognizes(run) and (own or not self._automatic(run))

    def _automatic(self, folder: Path) -> bool:
        """By names that `ProjectConfiguration(automatic_checkpoint_naming=True)` gives."""
        names = listed(folder) if folder.name == CHECKPOINTS else []
        return any(re.fullmatch(r"checkpoint_\d+", name) for name in names)

    def steps_in(self, run: Path) -> Path:
        """`checkpoints/` of a project with automatic naming."""
        folder = run / CHECKPOINTS
        return folder if self._automatic(folder) and not disk.is_folder(folder / HOME) else run

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """With automatic naming, and with that of diffusers' scripts, the highest number is loaded,
        whatever the folder holds."""
        folder = self.steps_in(run)
        steps = {path for number in self.steps(run) for path in self.entries(run, number)}
        if folder != run or self._automatic(run):
            number, by = re.compile(r"\D*(\d+).*"), ""
        elif any(re.fullmatch(r"checkpoint-\d+", path.name) for path in steps):
            number, by = LATEST, " by --resume_from_checkpoint latest"
        else:
            return []
        found = {name: number.fullmatch(name) for name in listed(folder)}
        return [
            Rival(int(of[1][:18]), f"{name} is loaded as checkpoint {of[1]}{by}", (folder / name,))
            for name, of in found.items()
            if of and int(of[1][:18]) > step and folder / name not in steps
        ]

    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """The number of the next save, which the library keeps nowhere."""
        if not self._automatic(self.steps_in(run)):
            return []
        return [
            f"in the script, set accelerator.project_configuration.iteration = {step + 1} after "
            "load_state: it begins at 0, and total_limit removes the lowest numbers first"
        ]

    def is_step(self, folder: Path) -> bool:
        """By an optimizer's or an engine's files beside Accelerate's random states."""
        folder = _inside(folder)
        random = any(name.startswith("random_states_") for name in listed(folder))
        sharded = disk.is_folder(folder / fsdp.OPTIMIZER)
        saved = sharded or bool(_matching(folder, OPTIMIZER))
        return random and (saved or bool(_engines(folder)))

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
        """The library has a call for it, and saves no position of a plain loader."""
        return (
            "in the script, skip the batches with accelerator.skip_first_batches(loader, N), "
            "then relaunch"
        )

    def advise(self, key: str, value: object) -> str:
        """The call in the user's own script: there is no command line to go by."""
        calls = {
            "batch_size": f"DataLoader(…, batch_size={value})",
            "clip_grad": f"clip_grad_norm_(…, max_norm={value})",
            "seed": f"set_seed({value})",
        }
        if key in calls:
            return f"in the script, call {calls[key]}, then relaunch"
        return super().advise(key, value)


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [folder / name for name in listed(folder) if pattern.fullmatch(name)]


def _inside(folder: Path) -> Path:
    """Where the states are: IDEFICS' trainer gives `save_state` a folder within that of a step."""
    inner = folder / "accelerator_state"
    return inner if disk.is_folder(inner) and not disk.is_link(inner) else folder


def _engines(folder: Path) -> list[Path]:
    """The folders that `engine.save_checkpoint` made inside: of the Trainer `global_step<N>`, of
    Accelerate the name of each model (`pytorch_model`, `pytorch_model_1`)."""
    return [
        item
        for item in (folder / name for name in listed(folder))
        if (STEP.fullmatch(item.name) or item.name.startswith("pytorch_model"))
        and disk.is_folder(item)
        and any(disk.matching(item, "*_states.pt"))
    ]
