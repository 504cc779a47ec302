"""DeepSpeed checkpoints: ZeRO stages 0 to 3, with the client state of Megatron-DeepSpeed.

What is kept where, and which place wins on load, was measured on real checkpoints
(docs/formats.md). File names: `deepspeed/runtime/engine.py`, `_get_*_ckpt_name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import ZEROS, AnyChange, Change, Key, Promise
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickle_reader import Object, Tensor, get
from ckptsurgeon.files.torch_archive import Archive
from ckptsurgeon.formats import Disagreement, Place, State
from ckptsurgeon.formats.annealing import is_annealing, learning_rate

STEP = re.compile(r"global_step(\d+)")
MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d{2,})_model_states\.pt")
OPTIM = re.compile(
    r"(?P<dtype>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d{2,})_optim_states\.pt"
)
SCHEDULE = {
    "max_lr": "max_lr", "min_lr": "min_lr", "warmup": "warmup_steps", "decay": "decay_steps",
    "decay_style": "decay_style",
}  # fmt: skip
"""Recipe key → key of AnnealingLR's state."""


class DeepSpeed:
    """The layout of `engine.save_checkpoint`: `<root>/global_step<N>/*.pt` and `<root>/latest`."""

    name = "deepspeed"

    def recognizes(self, run: Path) -> bool:
        """True with a `global_step<N>` folder that holds shards, or a `latest` that names one."""
        pointer = run / "latest"
        if pointer.is_file() and STEP.match(_text(pointer) or ""):
            return True
        return any(_names(self.directory(run, step)) for step in self.steps(run))

    def steps(self, run: Path) -> list[int]:
        """The N of every `global_step<N>` folder, ascending."""
        found = (STEP.fullmatch(item.name) for item in run.iterdir() if item.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def directory(self, run: Path, step: int) -> Path:
        """`global_step<N>`."""
        return run / f"global_step{step}"

    def missing(self, checkpoint: Path) -> list[str]:
        """Names of absent shards, by the world sizes that the first model file states."""
        names = _names(checkpoint)
        models = [name for name in names if MODEL.fullmatch(name)]
        if not models:
            return ["mp_rank_00_model_states.pt"]
        tree = Archive.open(checkpoint / models[0]).tree()
        dp, mp = int(tree.get("dp_world_size", 1)), int(tree.get("mp_world_size", 1))
        sharded = bool(MODEL.fullmatch(models[0])["dp"])  # type: ignore[index]
        expected = [
            f"{f'zero_pp_rank_{d}_' if sharded else ''}mp_rank_{m:02d}_model_states.pt"
            for m in range(mp)
            for d in range(dp if sharded else 1)
        ]
        if tree.get("optimizer") is None:
            dtype = next((m["dtype"] or "" for n in names if (m := OPTIM.fullmatch(n))), "")
            expected += [
                f"{dtype}zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt"
                for m in range(mp)
                for d in range(dp)
            ]
        return [name for name in expected if name not in names]

    def pointers(self, run: Path, step: int) -> dict[Path, str]:
        """`latest` always; Megatron's tracker only in a run that has one. No final newline."""
        texts = {run / "latest": f"global_step{step}"}
        tracker = run / "latest_checkpointed_iteration.txt"
        if tracker.exists():
            texts[tracker] = str(step)
        return texts

    def pointed(self, pointer: Path) -> int | None:
        """The step in `global_step<N>` or `<N>`; None for a missing file or any other text."""
        match = re.fullmatch(r"(?:global_step)?(\d{1,18})", (_text(pointer) or "").strip())
        return int(match[1]) if match else None

    def open(self, checkpoint: Path) -> DeepSpeedCheckpoint:
        """Read every model and optimizer shard's tree (layer files hold weights only)."""
        names = sorted(_names(checkpoint))
        kept = [checkpoint / n for n in names if MODEL.fullmatch(n) or OPTIM.fullmatch(n)]
        archives = {path: Archive.open(path) for path in kept}
        match = STEP.fullmatch(checkpoint.name)
        return DeepSpeedCheckpoint(
            path=checkpoint,
            step=int(match[1]) if match else 0,
            trees={path: archive.tree() for path, archive in archives.items()},
            archives=archives,
        )


@dataclass(frozen=True)
class Optimizer:
    """Where one file keeps an optimizer: `base` leads to {state, param_groups}, `outer` to the dict
    with clip_grad and the loss scaler."""

    file: Path
    outer: tuple[Key, ...]
    base: tuple[Key, ...]
    elastic: bool = False


@dataclass
class DeepSpeedCheckpoint:
    """One `global_step<N>` with its trees."""

    path: Path
    step: int
    trees: dict[Path, Any]
    archives: dict[Path, Archive]
    _optimizers: list[Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._models = [path for path in self.trees if MODEL.fullmatch(path.name)]
        self._optimizers = [item for path in self.trees for item in self._optimizer(path)]
        if not self._models:
            raise SurgeryError(
                f"{self.path.name} holds no model shard (mp_rank_*_model_states.pt)",
                next="ckptsurgeon status    list the complete steps",
            )

    def _optimizer(self, path: Path) -> Iterator[Optimizer]:
        tree = self.trees[path]
        if OPTIM.fullmatch(path.name):
            outer: tuple[Key, ...] = ("optimizer_state_dict",)
            state = tree["optimizer_state_dict"]
            if "base_optimizer_state" in state:  # ZeRO 1 and 2
                base = state["base_optimizer_state"]
                yield Optimizer(
                    path,
                    outer,
                    (*outer, "base_optimizer_state"),
                    elastic=not isinstance(base, dict),
                )
            else:  # ZeRO 3 repeats the key
                yield Optimizer(path, outer, (*outer, "optimizer_state_dict"))
        elif isinstance(tree.get("optimizer"), dict):  # stage 0
            outer = ("optimizer",)
            wrapped = "optimizer_state_dict" in tree["optimizer"]
            yield Optimizer(path, outer, (*outer, "optimizer_state_dict") if wrapped else outer)

    @property
    def sharded(self) -> bool:
        """Whether ZeRO loads the optimizer after the scheduler, so that the groups' lr wins."""
        return any(OPTIM.fullmatch(item.file.name) for item in self._optimizers)

    # --- places ----------------------------------------------------------------------------------

    def locate(self, name: str) -> list[Place]:
        """Every place of `name`: a recipe key, or lr, betas, adam_step, exp_avg, exp_avg_sq, skip,
        consumed_samples, initial_lr, group_step."""
        if name in SCHEDULE:
            return self._in_models("lr_scheduler", SCHEDULE[name])
        if name in ("lr", "initial_lr", "betas", "eps", "weight_decay"):
            wins = name != "lr" or self.sharded or not is_annealing(self._schedule())
            return [place for item in self._optimizers for place in self._groups(item, name, wins)]
        if name == "adam_step":
            return self._steps()
        if name in ("exp_avg", "exp_avg_sq"):
            return [
                Place(item.file, path, state[name])
                for item in self._optimizers
                for path, state in self._states(item)
                if name in state
                for path in [(*path, name)]
            ]
        if name == "clip_grad":
            shards = [
                p for item in self._optimizers for p in self._at(item.file, (*item.outer, name))
            ]
            models = self._in_models("args", name, wins=not shards and self._ours())
            return shards + models
        if name == "seed":
            return self._in_models("args", name, wins=self._ours())
        if name == "skip":
            return self._in_models("skip_train_iteration_range")
        if name == "consumed_samples":
            return self._in_models("args", "consumed_train_samples")
        if name == "loss_scale":
            return [p for item in self._optimizers for p in self._scaler(item, "cur_scale")]
        raise KeyError(name)

    def _ours(self) -> bool:
        return all(self.trees[path].get("trainer") == "ckptsurgeon" for path in self._models)

    def _at(self, file: Path, path: tuple[Key, ...], wins: bool = True) -> list[Place]:
        try:
            value = get(self.trees[file], path)
        except KeyError:
            return []
        return [Place(file, path, self._plain(file, value), wins)]

    def _in_models(self, *path: Key, wins: bool = True) -> list[Place]:
        return [place for file in self._models for place in self._at(file, path, wins)]

    def _groups(self, item: Optimizer, name: str, wins: bool = True) -> Iterator[Place]:
        if item.elastic:
            return
        for i in range(len(get(self.trees[item.file], (*item.base, "param_groups")))):
            yield from self._at(item.file, (*item.base, "param_groups", i, name), wins)

    def _states(self, item: Optimizer) -> Iterator[tuple[tuple[Key, ...], dict[Key, Any]]]:
        base = get(self.trees[item.file], item.base)
        states = enumerate(base) if item.elastic else base["state"].items()
        prefix = item.base if item.elastic else (*item.base, "state")
        for key, state in states:
            yield (*prefix, key), state

    def _steps(self) -> list[Place]:
        """Adam's counter. In a file with several the largest is the real one: FusedAdam leaves 0
        in the group and, at stage 0, in all but the last parameter's state."""
        out: list[Place] = []
        for item in self._optimizers:
            places = [
                p for path, _ in self._states(item) for p in self._at(item.file, (*path, "step"))
            ]
            places += self._at(item.file, (*item.outer, "base_optimizer_state_step"))
            groups = list(self._groups(item, "step"))
            top = max((p.value for p in places), default=None)
            out += [replace(p, wins=p.value == top) for p in places]
            out += [replace(p, wins=not places) for p in groups]
        return out

    def _scaler(self, item: Optimizer, name: str) -> list[Place]:
        inside = self._at(item.file, (*item.outer, "loss_scaler", name))
        return inside or self._at(item.file, (*item.outer, name))

    def value(self, file: Path, path: tuple[Key, ...]) -> Any:
        """The value under `path` in `file`; None when it is not there."""
        places = self._at(file, path)
        return places[0].value if places else None

    def is_zero(self, place: Place) -> bool:
        """By the CRC of the tensor's storage; False when it can't be told without a read."""
        return isinstance(place.value, Tensor) and self.archives[place.file].is_zero(place.value)

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """cur_scale = 2**initial_scale_power of the saved config, counters at their start.

        `deepspeed/runtime/fp16/loss_scaler.py`: growth is counted from last_overflow_iter."""
        config = self.trees[self._models[0]].get("ds_config") or {}
        power = dict(config.get("fp16") or {}).get("initial_scale_power", 16)
        out: list[tuple[Place, Any]] = []
        for item in self._optimizers:
            hysteresis = self._scaler(item, "delayed_shift")
            start = {"cur_scale": 2**power, "cur_iter": 0, "last_overflow_iter": -1}
            if hysteresis:
                start["cur_hysteresis"] = hysteresis[0].value
            for name, value in start.items():
                out += [(place, value) for place in self._scaler(item, name)]
        return out

    def _plain(self, file: Path, value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel == 1:
            return self.archives[file].value(value)
        return value

    # --- meaning ---------------------------------------------------------------------------------

    def _schedule(self) -> Any:
        return self.trees[self._models[0]].get("lr_scheduler")

    def state(self) -> State:
        """The promise of this checkpoint. Raises Disagreement with the files that differ."""
        schedules = self._in_models("lr_scheduler")
        _agree("lr_scheduler", schedules)
        schedule = self._schedule()
        notes: list[str] = []
        rates = self._agreed("lr")
        if len(set(rates)) > 1:
            notes.append(f"param groups have different learning rates: {rates}")
        if is_annealing(schedule) and not self.sharded:
            lr = learning_rate(schedule)
        elif rates:
            lr = float(rates[0])
        else:
            raise SurgeryError(
                f"{self.path.name} keeps no learning rate (elastic ZeRO checkpoint)",
                next="set lr, betas, eps and weight decay on the trainer's command line",
            )
        iteration = self._one("iteration") or self._one("global_steps") or self.step
        betas, eps = self._agreed("betas"), self._agreed("eps")
        decays, adam = self._agreed("weight_decay"), self._agreed("adam_step")
        scale, clip = self._agreed("loss_scale"), self._agreed("clip_grad")
        samples, seed, skip = (self._agreed(n) for n in ("consumed_samples", "seed", "skip"))
        promise = Promise(
            step=int(iteration) + 1,
            lr=lr,
            betas=(float(betas[0][0]), float(betas[0][1])) if betas else None,
            eps=float(eps[0]) if eps else None,
            weight_decay=tuple(float(value) for value in decays) or None,
            adam_step=int(max(adam)) if adam else None,
            loss_scale=float(scale[0]) if scale else 1.0,
            clip_grad=float(clip[0]) if clip else None,
            consumed_samples=int(samples[0]) if samples else None,
            skip=tuple((int(a), int(b)) for a, b in skip[0]) if skip else None,
            seed=int(seed[0]) if seed else None,
        )
        first = self.trees[self._models[0]]
        gigaflos = self._in_models("args", "gigaflos_no_embeds")
        return State(
            step=int(iteration),
            promise=promise,
            schedule=schedule if is_annealing(schedule) else None,
            dialect=f"deepspeed · zero {self._stage()} · dp {first.get('dp_world_size', 1)}",
            data_parallel=int(first.get("dp_world_size", 1)),
            model_parallel=int(first.get("mp_world_size", 1)),
            dynamic_loss_scale=any(self._dynamic(item) for item in self._optimizers),
            tokens=self._one("tokens"),
            gigaflos=float(gigaflos[0].value) if gigaflos else None,
            saved_at=max(path.stat().st_mtime for path in self._models),
            notes=tuple(notes),
        )

    def _dynamic(self, item: Optimizer) -> bool:
        flags = self._scaler(item, "dynamic") + self._at(
            item.file, (*item.outer, "dynamic_loss_scale")
        )
        return any(bool(place.value) for place in flags)

    def _stage(self) -> int:
        if not self.sharded:
            return 0
        item = next(i for i in self._optimizers if OPTIM.fullmatch(i.file.name))
        outer = get(self.trees[item.file], item.outer)
        if "base_optimizer_state" not in outer:
            return 3
        stage = outer.get("zero_stage", 1)
        if isinstance(stage, Object):  # ZeroStageEnum(1)
            stage = stage.args[0] if stage.args else 1
        return int(stage)

    def _one(self, key: str) -> int | None:
        places = self._in_models(key)
        _agree(key, places)
        return int(places[0].value) if places else None

    def _agreed(self, name: str) -> list[Any]:
        """The winning values of `name` in the first file, equal in all files."""
        places = [place for place in self.locate(name) if place.wins]
        if name == "adam_step":
            _agree(name, [Place(p.file, (), p.value) for p in places])
        else:
            _agree(name, places)
        return [place.value for place in places if place.file == places[0].file]

    def after(self, changes: Sequence[AnyChange], root: Path) -> DeepSpeedCheckpoint:
        """The trees with `changes` laid over them."""
        trees = dict(self.trees)
        for change in changes:
            if isinstance(change, Change) and (file := root / change.file) in trees:
                new = 0 if change.new == ZEROS else change.new
                if change.new != ZEROS or _is_scalar(get(trees[file], change.path)):
                    trees[file] = _with(trees[file], change.path, new)
        return DeepSpeedCheckpoint(self.path, self.step, trees, self.archives)


def _names(checkpoint: Path) -> list[str]:
    if not checkpoint.is_dir():
        return []
    return [item.name for item in checkpoint.iterdir() if item.name.endswith(".pt")]


def _text(pointer: Path) -> str | None:
    try:
        with pointer.open("rb") as file:
            return file.read(4096).decode("utf-8", "replace")
    except OSError:
        return None


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel == 1


def _agree(name: str, places: Sequence[Place]) -> None:
    """All files hold the same value under the same path, or Disagreement lists who differs."""
    first: dict[tuple[Key, ...], Place] = {}
    for place in places:
        base = first.setdefault(place.path, place)
        if place.value != base.value:
            raise Disagreement(
                f"shards disagree on {name}: {base.value!r} in {base.file.name}, "
                f"{place.value!r} in {place.file.name}",
                next=(
                    "ckptsurgeon verify      list every disagreement",
                    "ckptsurgeon rollback    to a step whose shards agree",
                ),
            )


def _with(tree: Any, path: Sequence[Key], value: Any) -> Any:
    """A copy of `tree` in which `path` leads to `value`; nothing off the path is copied."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(tree, Object):
        return replace(tree, state=_with(tree.state, path, value))
    if isinstance(tree, dict):
        return {**tree, key: _with(tree.get(key), rest, value)}
    assert isinstance(key, int)
    items = list(tree)
    items[key] = _with(items[key], rest, value)
    return tuple(items) if isinstance(tree, tuple) else items
