"""One saved step of a DeepSpeed run: where each field is kept in its shards, and what it means.

What is kept where, and which place wins on load, was measured on real checkpoints
(docs/formats.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Key, Promise
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Object, get
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats import Fragment, Place, Replica, Setting, State, Weight, known_globals
from ckptsurgeon.formats.checkpoint import Shards, agree
from ckptsurgeon.formats.deepspeed import flags as megatron_deepspeed
from ckptsurgeon.formats.deepspeed import fragments as deepspeed_fragments
from ckptsurgeon.formats.deepspeed import optimizer, parallel, soundness, universal
from ckptsurgeon.formats.deepspeed import replicas as deepspeed_replicas
from ckptsurgeon.formats.deepspeed import weights as deepspeed_weights
from ckptsurgeon.formats.deepspeed.optimizer import OPTIM, Optimizer
from ckptsurgeon.formats.moments import ALL
from ckptsurgeon.formats.sane import UnknownField, understood
from ckptsurgeon.formats.schedules import annealing, deepspeed, torch
from ckptsurgeon.formats.schedules.annealing import is_annealing, learning_rate
from ckptsurgeon.formats.schedules.rewarm import factor, open_window

MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d{2,})_model_states\.pt")


@dataclass
class DeepSpeedCheckpoint(Shards):
    """One `global_step<N>` with its trees."""

    def __post_init__(self) -> None:
        self._places: dict[str, list[Place]] = {}
        self._state: State | None = None
        self._models = [path for path in self.trees if MODEL.fullmatch(path.name)]
        self._optimizers: list[Optimizer] = []
        for path in self.trees:
            with understood(path):
                self._optimizers += optimizer.found(self.trees, path)
        if not self._models:
            raise SurgeryError(
                f"{self.path.name} holds no model shard (mp_rank_*_model_states.pt)",
                next="ckptsurgeon status    list the complete steps",
            )

    @property
    def sharded(self) -> bool:
        """Whether the optimizer is in shards of ZeRO."""
        return any(i.universal or OPTIM.fullmatch(i.file.name) for i in self._optimizers)

    @property
    def groups_win(self) -> bool:
        """Whether the optimizer is loaded after the scheduler, so that its groups' lr is used."""
        return self.sharded and not any(item.elastic for item in self._optimizers)

    # --- places ----------------------------------------------------------------------------------

    def locate(self, name: str) -> list[Place]:
        """Every place of `name`: a recipe key, or lr, betas, adam_step, exp_avg, exp_avg_sq, skip,
        consumed_samples, tokens, iteration, rewarm, initial_lr, group_step."""
        if name not in self._places:
            with understood(self.path):
                self._places[name] = self._locate(name)
            self.check(name, self._places[name])
        return self._places[name]

    def _locate(self, name: str) -> list[Place]:
        items = self._optimizers
        if name == "scheduler":
            return [place for place in self._in_models("lr_scheduler") if place.value is not None]
        if name == "position" and not is_annealing(self._schedule()):
            keys = ("last_epoch", deepspeed.KEY)
            return [place for key in keys for place in self._in_models("lr_scheduler", key)]
        if name in annealing.NAMES:
            found: list[Place] = []
            for key in annealing.NAMES[name]:
                found += self._in_models("lr_scheduler", key, wins=not found)
            return found
        if name in ("lr", "initial_lr", "betas", "eps", "weight_decay"):
            wins = name != "lr" or self.groups_win or not is_annealing(self._schedule())
            own = [p for i in items for p in optimizer.groups(self, i, name, wins)]
            # OptimizerParamScheduler writes these into the groups after each step.
            coupled = ["start_wd", "end_wd"] if name == "weight_decay" else []
            return own + [
                p for k in coupled for p in self._in_models("lr_scheduler", k, wins=False)
            ]
        if name == "adam_step":
            return [place for item in items for place in optimizer.steps(self, item)]
        if name in ALL:
            return [p for item in items for p in optimizer.moment(self, item, name)]
        if name == "clip_grad":
            shards = [p for i in items for p in self.at(i.file, (*i.outer, name), i.loaded)]
            models = self._in_models("args", name, wins=not shards and self._ours())
            return shards + models
        if name in ("optimizer", "sgd_momentum"):
            return self._in_models("args", name) if self._ours() else []
        if name == "momentum":
            return [p for i in items for p in optimizer.groups(self, i, name)]
        if name == "seed":
            return self._in_models("args", name, wins=self._ours())
        if name == "skip":
            return self._in_models("skip_train_iteration_range")
        if name == "rewarm":
            return self._in_models("rewarm") if self._ours() else []
        if name == "consumed_samples":
            return self._in_models("args", "consumed_train_samples")
        if name == "skipped_steps":
            return self._in_models(name)
        if name == "tokens":
            copies = self._in_models("args", "consumed_train_tokens", wins=False)
            return self._in_models("tokens") + copies
        if name == "iteration":
            copies = self._in_models("args", "iteration", wins=False)
            return self._in_models("iteration") + copies
        if name == "loss_scale":
            return [p for i in items for p in optimizer.scaler(self, i, "cur_scale")]
        raise UnknownField(name)

    def _ours(self) -> bool:
        return all(self.trees[path].get("trainer") == "ckptsurgeon" for path in self._models)

    def _megatron(self) -> bool:
        return "checkpoint_version" in self.trees[self._models[0]] and not self._ours()

    def arguments(self, name: str) -> list[Place]:
        """A command-line argument of the run that saved this, in each model file."""
        return self._in_models("args", name)

    def annealed(self) -> dict[str, Any] | None:
        """AnnealingLR's state by its present names, or None where another scheduler is saved."""
        tokens = self.arguments("lr_decay_tokens")
        return annealing.normal(self._schedule(), tokens[0].value if tokens else None)

    def _in_models(self, *path: Key, wins: bool = True) -> list[Place]:
        return [place for file in self._models for place in self.at(file, path, wins)]

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """By `initial_scale_power` of the saved config."""
        power = dict(self._config().get("fp16") or {}).get("initial_scale_power", 16)
        items = self._optimizers
        return [pair for i in items for pair in optimizer.scaler_start(self, i, power)]

    def models(self) -> dict[Path, Any]:
        """The trees of the model files."""
        return {path: self.trees[path] for path in self._models}

    def optimizers(self) -> list[Optimizer]:
        """Where the optimizers are kept: in the shards, or else in the universal copy."""
        return [item for item in self._optimizers if not item.universal] or self._optimizers

    def reschedule(self, wanted: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """By the family of the saved scheduler; lr alone where none is saved."""
        with understood(self.path):
            return self._reschedule(wanted)

    def _reschedule(self, wanted: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        schedule = self._schedule()
        if torch.is_torch(schedule):
            return torch.reschedule(self, wanted)
        if deepspeed.is_deepspeed(schedule):
            return deepspeed.reschedule(self, self._config(), wanted)
        if schedule is not None and not is_annealing(schedule):
            raise SurgeryError(
                "the scheduler's state is of no known family, so what it makes of an lr is unknown",
                next="set lr where the trainer makes its scheduler",
            )
        settings, warnings = annealing.reschedule(self, wanted)
        if schedule is not None and self._megatron():
            warnings += megatron_deepspeed.schedule_flags(self, settings)
        return settings, warnings

    def fragments(self, name: str) -> list[Fragment]:
        """See `deepspeed_fragments`. Refused where a universal copy would keep the others."""
        if any(item.universal for item in self._optimizers):
            raise SurgeryError(
                "the universal copy of this step keeps its moments by whole parameters",
                next="reset the moments of all parameters, or move the copy out of the run",
            )
        return deepspeed_fragments.fragments(self, name)

    def replicas(self) -> list[Replica]:
        """See `deepspeed_replicas`."""
        return deepspeed_replicas.replicas(self)

    def weights(self) -> Iterator[Weight]:
        """See `deepspeed_weights`."""
        return deepspeed_weights.weights(self)

    def contradictions(self) -> list[str]:
        """See `deepspeed_soundness`."""
        return soundness.contradictions(self)

    # --- meaning ---------------------------------------------------------------------------------

    def _schedule(self) -> Any:
        return self.trees[self._models[0]].get("lr_scheduler")

    def _config(self) -> dict[str, Any]:
        """What the run that saved this was configured with; never read back by DeepSpeed."""
        config = self.trees[self._models[0]].get("ds_config")
        return config if isinstance(config, dict) else {}

    def _scheduler(self) -> tuple[str, float | None]:
        """A scheduler other than AnnealingLR in words, and the rate that it decays from."""
        schedule = self._schedule()
        if torch.is_torch(schedule):
            peak = torch.peak(self) if self.locate("lr") else None
            return torch.words(schedule), peak
        if deepspeed.is_deepspeed(schedule):
            config = self._config()
            words = deepspeed.words(schedule, config)
            return words, deepspeed.peak(config)
        if schedule is None:
            return "", max((float(place.value) for place in self.locate("lr")), default=None)
        return "" if is_annealing(schedule) else "an unknown schedule", None

    def state(self) -> State:
        """The promise of this checkpoint. Raises Disagreement with the files that differ."""
        if self._state is None:
            with understood(self.path):
                self._state = self._read_state()
        return self._state

    def _read_state(self) -> State:
        schedules = self._in_models("lr_scheduler")
        self.check("lr_scheduler", schedules)
        agree("lr_scheduler", schedules)
        schedule = self._schedule()
        notes = known_globals.notes(self.globals())
        rates = self._agreed("lr")
        if len(set(rates)) > 1:
            notes.append(f"param groups have different learning rates: {rates}")
        annealed = self.annealed()
        lr = float(rates[0]) if rates else None
        if annealed is not None and not self.groups_win:
            lr = learning_rate(annealed)
        notes += self._of_universal_copy()
        notes += megatron_deepspeed.notes(self) if self._megatron() else ()
        if any(item.elastic for item in self._optimizers):
            notes.append(
                "an elastic checkpoint keeps no param groups: betas, eps and weight decay are on "
                "the trainer's command line"
            )
        counted = (self._one("iteration"), self._one("global_steps"), self.step)
        iteration = next(count for count in counted if count is not None)
        rewarm = self._agreed("rewarm")
        now = annealed["num_steps"] if annealed else 0
        window = open_window(rewarm[0], now) if rewarm else ()
        betas, eps = self._agreed("betas"), self._agreed("eps")
        decays, adam = self._agreed("weight_decay"), self._agreed("adam_step")
        scale, clip = self._agreed("loss_scale"), self._agreed("clip_grad")
        samples, seed, skip = (self._agreed(n) for n in ("consumed_samples", "seed", "skip"))
        promise = Promise(
            step=int(iteration) + 1,
            lr=None if lr is None else lr * factor(window, now),
            betas=(float(betas[0][0]), float(betas[0][1])) if betas else None,
            eps=float(eps[0]) if eps else None,
            weight_decay=tuple(float(value) for value in decays) or None,
            adam_step=int(max(adam)) if adam else None,
            loss_scale=float(scale[0]) if scale else 1.0,
            clip_grad=float(clip[0]) if clip else None,
            consumed_samples=int(samples[0]) if samples else None,
            skip=tuple((int(a), int(b)) for a, b in skip[0])
            if skip and skip[0] is not None
            else None,
            seed=int(seed[0]) if seed else None,
            rewarm=window if rewarm else None,
        )
        first = self.trees[self._models[0]]
        if torch.is_torch(schedule):
            notes += torch.notes(schedule)
        scheduler, peak = self._scheduler()
        gigaflos = self._in_models("args", "gigaflos_no_embeds")
        return State(
            step=int(iteration),
            promise=promise,
            schedule=annealed,
            dialect=f"deepspeed · zero {self.stage()} · {parallel.sizes(first)}",
            data_parallel=int(first.get("dp_world_size", 1)),
            model_parallel=int(first.get("mp_world_size", 1)),
            dynamic_loss_scale=any(self._dynamic(item) for item in self._optimizers),
            tokens=self._one("tokens"),
            gigaflos=float(gigaflos[0].value) if gigaflos else None,
            saved_at=max(path.stat().st_mtime for path in self._models),
            notes=tuple(notes),
            batch_size=self._one("args", "global_batch_size"),
            rampup=self._rampup(),
            peak_lr=peak,
            scheduler=scheduler,
        )

    def _of_universal_copy(self) -> Iterator[str]:
        """What to know where there is one, and where another step's is still pointed to."""
        for item in self._optimizers:
            if item.universal and item.base:
                yield from universal.DEFECTS
        named = (text(self.path.parent / universal.POINTER) or "").strip()
        if named and named != universal.folder(self.path.parent, self.step).name:
            yield (
                f"{universal.POINTER} names {named[:60]!r}, not this step: a relaunch "
                "with load_universal (--universal-checkpoint) starts there"
            )

    def _rampup(self) -> tuple[int, int, int] | None:
        places = self._in_models("args", "rampup_batch_size")
        numbers = [int(number) for number in places[0].value or ()] if places else []
        return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None

    def _dynamic(self, item: Optimizer) -> bool:
        flags = optimizer.scaler(self, item, "dynamic") + self.at(
            item.file, (*item.outer, "dynamic_loss_scale")
        )
        return any(bool(place.value) for place in flags)

    def stage(self) -> int:
        """The ZeRO stage that saved it; 0 without ZeRO."""
        if not self.sharded:
            return 0
        item = self.optimizers()[0]
        outer = get(self.trees[item.file], item.outer)
        if "base_optimizer_state" not in outer and "optimizer_state_dict" in outer:
            return 3
        stage = outer.get("zero_stage", 1)
        if isinstance(stage, Object):  # ZeroStageEnum(1)
            stage = stage.args[0] if stage.args else 1
        return int(stage)

    def _one(self, *path: str) -> int | None:
        places = self._in_models(*path)
        self.check(path[-1], places)
        agree(path[-1], places)
        return int(places[0].value) if places else None

    def _agreed(self, name: str) -> list[Any]:
        """The winning values of `name` in the first file, equal in all files."""
        places = [place for place in self.locate(name) if place.wins]
        if name != "adam_step":
            agree(name, places)
        elif len({place.value for place in places}) > 1:
            agree(name, [Place(place.file, (), place.value) for place in places])
        else:
            places = places[:1]
        return [place.value for place in places if place.file == places[0].file]
