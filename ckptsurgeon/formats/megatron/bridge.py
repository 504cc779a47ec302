"""One saved step of Megatron-Bridge (NeMo 2): Megatron-core's checkpoint, and counters of its own.

`train_state.pt` keeps the counters, `run_config.yaml` what Megatron-LM's args would say. Source:
`training/checkpointing.py`, `training/state.py`, `training/config.py` of megatron-bridge 0.6.2.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.dcp import Saved, Values
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.fields.understood import mapping
from ckptsurgeon.formats.fields.values import Decay, Place, Setting, State
from ckptsurgeon.formats.megatron.checkpoint import MegatronCheckpoint
from ckptsurgeon.formats.megatron.dist import COMMON, MegatronDistCheckpoint
from ckptsurgeon.formats.megatron.flat import MegatronFlatCheckpoint
from ckptsurgeon.formats.megatron.tiers import OTHER
from ckptsurgeon.hints import command

COUNTERS = "train_state.pt"
CONFIG = "run_config.yaml"
DATA = "energon"
"""Beside the steps: where the loader of each step was in its data, if it is Energon's."""
USE = (
    "scheduler.use_checkpoint_opt_param_scheduler=true",
    "scheduler.override_opt_param_scheduler=false",
)
"""Its recipes set the second one to true, and the config refuses both."""
KEYS: Mapping[str, tuple[str, ...]] = {
    **{f"--{name.replace('_', '-')}": (f"optimizer.{name}",) for name in (
        "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "clip_grad",
        "adam_beta1", "adam_beta2", "adam_eps",
    )},
    **{f"--{name.replace('_', '-')}": (f"scheduler.{name}",) for name in (
        "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters",
        "lr_warmup_samples", "lr_warmup_fraction", "start_weight_decay", "end_weight_decay",
    )},
    **{f"--{name.replace('_', '-')}": (f"checkpoint.{name}",) for name in (
        "load", "save", "ckpt_step", "finetune", "non_persistent_ckpt_type",
    )},
    "--weight-decay": ("scheduler.start_weight_decay", "scheduler.end_weight_decay"),
    "--use-checkpoint-opt_param-scheduler": USE,
    "--override-opt_param-scheduler": ("scheduler.override_opt_param_scheduler=true",),
    "--no-load-optim": ("checkpoint.load_optim=false",),
    "--seed": ("rng.seed",),
    "--dataloader-save": ("dataset.dataloader_save",),
    "--global-batch-size": ("train.global_batch_size",),
    "--rampup-batch-size": ("train.rampup_batch_size",),
    "--rerun-mode": ("rerun_state_machine.rerun_mode",),
}  # fmt: skip
"""Option of Megatron-LM → keys of the config, each of which gets its value. The scheduler takes the
weight decay from its own two alone."""
STYLES = "disabled|cosine|linear|constant|inverse-square-root|WSD"
OPTION = re.compile(rf"(--[a-z][\w-]*\w)(?: ([\d./][\w./+-]*|{STYLES}))?")
SECTIONS = ("optimizer", "scheduler", "checkpoint", "train", "rng")
FRACTION = " (in place of scheduler.lr_warmup_fraction)"
ASSERTS = ": the trainer asserts"


def arguments(folder: Path) -> dict[str, Any] | None:
    """The config of one step by the names of Megatron-LM's args; None where it can't be read."""
    config = _config(folder)
    if config is None:
        return None
    args: dict[str, Any] = {}
    for name in SECTIONS:
        args.update(mapping(config.get(name)))
    if "step_batch_size_schedule" in args:
        args["step_batch_size_schedule"] = None  # megatron-core's, which Bridge does not pass on
    args["no_load_optim"] = args.get("load_optim") is False
    if args.get("pretrained_checkpoint"):
        args["finetune"] = False  # so the first launch of a tuning saves it: no later one has it
    constant = args.get("weight_decay_incr_style") in (None, "constant")
    if constant and args.get("start_weight_decay") is not None:
        args["weight_decay"] = args["end_weight_decay"]  # the scheduler's, not the optimizer's
    run = folder.parent.parent if folder.parent.name == OTHER else folder.parent
    if disk.is_folder(run / DATA / folder.name):
        args["dataloader_save"] = DATA
    return args


def _config(folder: Path) -> Mapping[str, Any] | None:
    try:
        return plain_yaml.read(folder / CONFIG)
    except (OSError, UsageError):
        return None


def spelled(text: str) -> str:
    """Megatron-LM's options in a sentence as keys of Bridge's config."""

    def keys(match: re.Match[str]) -> str:
        names, value = KEYS.get(match[1]), match[2]
        if names is None:
            return match[0]
        if value is not None:
            return " ".join(f"{name}={value}" for name in names)
        return (" " if "=" in names[0] else " and ").join(names)

    return OPTION.sub(keys, text).replace(FRACTION, " scheduler.lr_warmup_fraction=null")


@dataclass
class BridgeCheckpoint(MegatronCheckpoint):
    """What is Bridge's own in a checkpoint of either layout."""

    def args(self) -> Mapping[str, Any]:
        """Those of the config that was saved with the step."""
        if not hasattr(self, "_args"):
            self._args = arguments(self.path)
        return self._args or {}

    def architecture(self) -> Mapping[str, Any]:
        """The `model` of the config, which has the names of Megatron-core's."""
        return mapping((_config(self.path) or {}).get("model"))

    def find(self, field: str) -> list[Place]:
        """The counters are those of `train_state.pt`; the config keeps no clipping and no seed."""
        counters = self.path / COUNTERS
        if field == "consumed_samples":
            return self.at(counters, ("consumed_train_samples",))
        if field == "iteration":
            return self.at(counters, ("step",)) + self.in_roots(field, wins=False)
        return [] if field in ("clip_grad", "seed") else super().find(field)

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """Not as 1-sqrt, which is a WSD: how that ends, the config alone says."""
        if decay.shape == "1-sqrt":
            raise SurgeryError(
                "Megatron-Bridge takes the last decay of a WSD from its config, so no checkpoint "
                "holds a 1-sqrt",
                next=command("cooldown", "--shape", "linear"),
            )
        return super().cooldown(decay)

    def read_state(self) -> State:
        """With the keys of Bridge's config in place of Megatron-LM's options."""
        state = super().read_state()
        notes = [spelled(note) for note in state.notes if "--override-opt_param" not in note[:60]]
        if self.args().get("override_opt_param_scheduler"):
            notes = [_overriding(note) for note in notes]
            peak = (state.schedule or {}).get("max_lr")
            notes.append(
                "the config has scheduler.override_opt_param_scheduler=true: warm-up, decay and "
                "weight decay come from it at each launch, and the rate is optimizer.lr, which "
                f"must be {peak!r} as in the param groups, or the loader does not find them"
            )
        if self._args is None:
            notes.append(f"{CONFIG} can't be read: what it must say is not compared")
        return replace(state, notes=tuple(notes), data=spelled(state.data))

    def dialect(self) -> str:
        """What kind of checkpoint this is, in a few words."""
        return super().dialect().replace("megatron-lm", "megatron-bridge")


def _overriding(note: str) -> str:
    """What must be said at the launch, in a run whose config overrides the checkpoint."""
    keys, asserts, _ = note.partition(ASSERTS)
    return f"{keys}: where it differs from the checkpoint, the config wins" if asserts else note


@dataclass
class BridgeDistCheckpoint(BridgeCheckpoint, MegatronDistCheckpoint):
    """Of torch_dist."""

    by_name: ClassVar[str] = (
        "save the step once with checkpoint.dist_ckpt_optim_fully_reshardable=true"
    )


@dataclass
class BridgeFlatCheckpoint(BridgeCheckpoint, MegatronFlatCheckpoint):
    """Of fsdp_dtensor."""


def opened(
    folder: Path, step: int, flat: bool, without: Collection[Path] = ()
) -> BridgeDistCheckpoint | BridgeFlatCheckpoint:
    """Read `.metadata`, the counters and what else lies beside it; values when they are asked
    for."""
    saved = Saved.open(folder)
    beside = [path for path in (folder / COMMON, folder / COUNTERS) if disk.is_file(path)]
    trees, archives = read_shards(path for path in beside if path not in without)
    trees[saved.path] = Values(saved)
    if flat:
        return BridgeFlatCheckpoint(folder, step, trees, archives, saved=saved)
    return BridgeDistCheckpoint(folder, step, trees, archives, saved=saved)
