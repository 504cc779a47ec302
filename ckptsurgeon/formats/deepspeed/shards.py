"""Where the shards of one DeepSpeed step keep each field, and which place wins on load.

Both were measured on real checkpoints (docs/formats.md). What the fields mean together, and what
can be made of them, is in the modules above: checkpoint, soundness, fragments, replicas, weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Object, get
from ckptsurgeon.formats.capabilities import AdjustsGroups, BoundToRanks, NamesGroups
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.deepspeed import optimizer, parallel
from ckptsurgeon.formats.deepspeed.optimizer import OPTIM, Optimizer
from ckptsurgeon.formats.fields.columns import Places
from ckptsurgeon.formats.fields.constants import GROUP
from ckptsurgeon.formats.fields.understood import mapping, not_understood, understood
from ckptsurgeon.formats.fields.values import Place, Setting, StateDict
from ckptsurgeon.formats.megatron.options import BATCH
from ckptsurgeon.formats.places.moments import ALL
from ckptsurgeon.formats.schedules import annealing, deepspeed, neox
from ckptsurgeon.formats.schedules.names import NAMES, is_megatron
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d{2,})_model_states\.pt")
IN_GROUPS = (*GROUP, "momentum")
POSITIONS = ("last_epoch", deepspeed.KEY)
"""Where a scheduler of torch, and one of DeepSpeed, says how many steps it has made."""
IN_MODELS: Mapping[str, tuple[Key, ...]] = {
    "skip": ("skip_train_iteration_range",),
    "consumed_samples": ("args", "consumed_train_samples"),
    "skipped_steps": ("skipped_steps",),
    "tokens": ("tokens",),
    "iteration": ("iteration",),
}
"""Field → its path in each model file."""
COPIES: Mapping[str, tuple[Key, ...]] = {
    "tokens": ("args", "consumed_train_tokens"),
    "iteration": ("args", "iteration"),
}
"""Field → the path of a copy that no loader reads."""
OF_BUNDLED_TRAINER: Mapping[str, tuple[Key, ...]] = {
    "optimizer": ("args", "optimizer"),
    "sgd_momentum": ("args", "sgd_momentum"),
    "rewarm": ("rewarm",),
}
"""Field → its path in each model file of the bundled trainer, which alone reads it back."""
STAGES: Mapping[Any, int] = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
"""The members of ZeroStageEnum."""


@dataclass
class DeepSpeedShards(Checkpoint, AdjustsGroups, BoundToRanks, NamesGroups):
    """One `global_step<N>` with its trees: model files and optimizers, and the fields in them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._models = [path for path in self.trees if MODEL.fullmatch(path.name)]
        self._optimizers: list[Optimizer] = []
        for path in self.trees:
            with understood(path):
                self._optimizers += optimizer.optimizers(self.trees, path)
        if not self._models:
            raise SurgeryError(
                f"{self.path.name} holds no model shard (mp_rank_*_model_states.pt)",
                next=command("status", why="list the complete steps"),
            )

    # --- what there is ---------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the engine saved its files: `path`, or a folder in it that another trainer gave it;
        the universal copy in a run of such copies alone."""
        return self._models[0].parent

    def models(self) -> dict[Path, Any]:
        """The trees of the model files."""
        return {path: self.trees[path] for path in self._models}

    def optimizers(self) -> list[Optimizer]:
        """Where the optimizers are kept: in the shards, or else in the universal copy."""
        return [item for item in self._optimizers if not item.universal] or self._optimizers

    def all_optimizers(self) -> list[Optimizer]:
        """Those of the shards and of the universal copy: no file says which are loaded."""
        return self._optimizers

    @property
    def sharded(self) -> bool:
        """Whether the optimizer is in shards of ZeRO."""
        return any(i.universal or OPTIM.fullmatch(i.file.name) for i in self._optimizers)

    @property
    def elastic(self) -> bool:
        """Whether the shards keep no param groups."""
        return any(item.elastic for item in self._optimizers)

    @property
    def groups_win(self) -> bool:
        """Whether the optimizer is loaded after the scheduler, so that its groups' lr is used."""
        return self.sharded and not self.elastic

    @property
    def bundled(self) -> bool:
        """Whether the bundled trainer saved it, which reads back what others do not."""
        return all(self.trees[path].get("trainer") == "ckptsurgeon" for path in self._models)

    @property
    def megatron(self) -> bool:
        """Whether Megatron-DeepSpeed saved it."""
        return "checkpoint_version" in self.trees[self._models[0]] and not self.bundled

    @property
    def neox(self) -> bool:
        """Whether GPT-NeoX saved it, with a scheduler of its own."""
        args = self.at(self._models[0], ("args",))
        return bool(args) and neox.is_neox(self.schedule(), args[0].value)

    def stage(self) -> int:
        """The ZeRO stage that saved it; 0 without ZeRO."""
        if not self.sharded:
            return 0
        item = self.optimizers()[0]
        outer = mapping(get(self.trees[item.file], item.outer))
        if "base_optimizer_state" not in outer and "optimizer_state_dict" in outer:
            return 3
        stage = outer.get("zero_stage", 1)
        if isinstance(stage, Object):  # ZeroStageEnum(1), or a member by its name
            stage = stage.args[0] if stage.args else 1
            stage = STAGES.get(stage, stage)
        if not isinstance(stage, int):
            raise not_understood(item.file, (*item.outer, "zero_stage"), stage, "a stage of ZeRO")
        return stage

    def loads_on(self) -> Mapping[str, int]:
        """On the tensor and pipeline ranks that saved them, ZeRO's shards on as many in all too
        where they keep param groups; a universal copy on any."""
        if any(item.universal for item in self._optimizers):
            return {}
        first = self.trees[self._models[0]]
        sizes = parallel.sizes(first)
        known = {"tp": sizes.tensor, "pp": sizes.pipeline}
        if self.sharded and not self.elastic:
            known["ranks"] = sizes.data * int(first.get("mp_world_size", 1))
        return {name: size for name, size in known.items() if size is not None}

    def schedule(self) -> Any:
        """The state of the scheduler in the first model file, or None."""
        file = self._models[0]
        return self.numbers(file, self.trees[file].get("lr_scheduler"))

    def annealed(self) -> dict[str, Any] | None:
        """AnnealingLR's state by its present names, or None where another scheduler is saved."""
        if self.neox:
            return None
        tokens = self.arguments("lr_decay_tokens")
        return annealing.normal(self.schedule(), tokens[0].value if tokens else None)

    def config(self) -> dict[str, Any]:
        """What the run that saved this was configured with; never read back by DeepSpeed."""
        config = self.trees[self._models[0]].get("ds_config")
        return config if isinstance(config, dict) else {}

    # --- places ----------------------------------------------------------------------------------

    def in_models(self, *path: Key, wins: bool = True) -> list[Place]:
        """`path` in every model file."""
        return [place for file in self._models for place in self.at(file, path, wins)]

    def arguments(self, name: str) -> list[Place]:
        """A command-line argument of the run that saved this, in each model file."""
        return self.in_models("args", name)

    def args(self) -> Mapping[str, Any]:
        """The command line that the first model file keeps; empty without one."""
        places = self.at(self._models[0], ("args",))
        values = getattr(places[0].value, "state", None) if places else None
        return values if isinstance(values, dict) else {}

    def find(self, field: str) -> Sequence[Place]:
        """By the tables of this module; the schedule and the optimizer by what was saved."""
        items = self._optimizers
        if field in IN_MODELS:
            copy = self.in_models(*COPIES[field], wins=False) if field in COPIES else []
            return self.in_models(*IN_MODELS[field]) + copy
        if field in OF_BUNDLED_TRAINER:
            return self.in_models(*OF_BUNDLED_TRAINER[field]) if self.bundled else []
        if field in IN_GROUPS:
            return self._in_groups(field)
        if field in ALL:
            return Places(c for item in items for c in optimizer.moment(self, item, field))
        if field == "adam_step":
            return Places(column for item in items for column in optimizer.steps(self, item))
        if field == "loss_scale":
            return [p for i in items for p in optimizer.scaler(self, i, "cur_scale")]
        if field == "scheduler":
            return [
                place._replace(value=self.numbers(place.file, place.value))
                for place in self.in_models("lr_scheduler")
                if place.value is not None
            ]
        if field == "seed":
            return self.in_models("args", field, wins=self.bundled)
        if field in BATCH:
            return self.in_models("args", BATCH[field], wins=False)
        if field == "clip_grad":
            shards = [p for i in items for p in self.at(i.file, (*i.outer, field), i.loaded)]
            return shards + self.in_models("args", field, wins=not shards and self.bundled)
        return self._in_schedule(field)

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """By `param_shapes`, which ZeRO saves in the model files group by group."""
        groups: dict[int, dict[str, None]] = {}
        for tree in self.models().values():
            for i, shapes in enumerate(tree.get("param_shapes") or ()):
                groups.setdefault(i, {}).update(dict.fromkeys(map(str, shapes)))
        places = [p for item in self._optimizers for p in optimizer.groups(self, item, key)]
        numbers = [place.path[-2] for place in places]
        if not groups or any(number not in groups for number in numbers):
            raise NamesGroups.lacking(self)
        return [(tuple(groups[int(n)]), p) for n, p in zip(numbers, places, strict=True)]

    def of_group(self, key: str, place: Place, value: Any) -> list[Setting]:
        """OptimizerParamScheduler gives a group its weight decay after each step: `wd_mult` of the
        group makes it of the scheduler's."""
        schedule = self.annealed() or {}
        if key != "weight_decay" or "end_wd" not in schedule:
            return super().of_group(key, place, value)
        end = schedule["end_wd"]
        mults = self.at(place.file, self.beside(place, "wd_mult"))
        if not end or not mults or schedule.get("wd_incr_style") != "constant":
            raise SurgeryError(
                "the scheduler sets the weight decay of every group after each step, and its own "
                f"is {end:g}" + ("" if not end else ", and grows"),
                next="set wd_mult in param_groups in the trainer's code, once the checkpoint is "
                "loaded: the scheduler multiplies its weight decay by it",
            )
        return [Setting(key, place, value), Setting("wd_mult", mults[0], value / end)]

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """As OptimizerParamScheduler gives it to the group after each step."""
        schedule = self.annealed() or {}
        if not key == place.path[-1] == "weight_decay" or "end_wd" not in schedule:
            return value
        mult = self.value(place.file, self.beside(place, "wd_mult"))
        return value if mult is None else value * mult

    def multiplied(self) -> bool:
        """Where OptimizerParamScheduler gives each group its own."""
        places = self.settings("weight_decay") if "end_wd" in (self.annealed() or {}) else []
        mults = (self.value(p.file, self.beside(p, "wd_mult")) for p in places)
        return bool(places) and all(mult is not None for mult in mults)

    def state_dicts(self) -> list[StateDict]:
        """Of the shards, and of the universal copy."""
        with understood(self.path):
            return [optimizer.saved(self, item) for item in self._optimizers]

    def headers(self) -> list[StateDict]:
        """By the keys of the states: a rank may have thousands."""
        with understood(self.path):
            return [optimizer.header(self, item) for item in self._optimizers]

    def _in_groups(self, field: str) -> list[Place]:
        wins = field != "lr" or self.groups_win or not is_megatron(self.schedule())
        places = [p for i in self._optimizers for p in optimizer.groups(self, i, field, wins)]
        if field == "weight_decay":  # OptimizerParamScheduler writes these there after each step
            for key in ("start_wd", "end_wd"):
                places += self.in_models("lr_scheduler", key, wins=False)
        return places

    def _in_schedule(self, field: str) -> list[Place]:
        if field == "position" and not is_megatron(self.schedule()):
            return [place for key in POSITIONS for place in self.in_models("lr_scheduler", key)]
        places: list[Place] = []
        for name in NAMES.get(field, ()):
            places += self.in_models("lr_scheduler", name, wins=not places)
        return places
