"""nanotron runs: `<N>/optimizer/*.pt`, `<N>/lr_scheduler/*.pt`, and `latest.txt`.

Names: `nanotron/serialize/optimizer.py`. The weights are safetensors; the optimizer is torch files.
On a load the optimizer comes first, then the scheduler is made anew and loads its state; since
November 2024 it makes one step at once (`nanotron/trainer.py`, 0.4 and 2411b022).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.files.text_file import number
from ckptsurgeon.formats.capabilities import ComputesRates, HasHeads
from ckptsurgeon.formats.fields.constants import GROUP
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.fields.understood import (
    is_count,
    is_number,
    mapping,
    not_understood,
    understood,
)
from ckptsurgeon.formats.fields.values import Decay, Located, Part, Place, Setting, State
from ckptsurgeon.formats.heads import head_counts, heads
from ckptsurgeon.formats.heads.heads import Attention
from ckptsurgeon.formats.layout import NamesElsewhere
from ckptsurgeon.formats.places import json_beside
from ckptsurgeon.formats.places.safetensors_beside import SafetensorsBeside
from ckptsurgeon.formats.plain import nanotron_data, nanotron_parts
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.formats.plain.nanotron_data import LAST, METADATA, TOTAL
from ckptsurgeon.formats.plain.nanotron_parts import SHARD, UNRANKED, stage_of
from ckptsurgeon.formats.schedules import nanotron, torch, torch_classes, torch_cooldown
from ckptsurgeon.formats.schedules.check import refuse_no_rate
from ckptsurgeon.formats.step_folders import StepFolders, listed
from ckptsurgeon.hints import command
from ckptsurgeon.plans.promise import Caveat

LATEST = "latest.txt"


@dataclass
class NanotronCheckpoint(SafetensorsBeside, TorchCheckpoint, HasHeads, ComputesRates):
    """The optimizer shards of all ranks, the one scheduler, and `checkpoint_metadata.json`."""

    config: Mapping[str, Any] = field(kw_only=True, default_factory=dict)
    """What the run was last started with; empty where the step does not say."""

    def find(self, field: str) -> Sequence[Place]:
        """The counters are in the metadata."""
        path = {"consumed_samples": TOTAL, "iteration": LAST}.get(field)
        if path is None:
            return super().find(field)
        return [place for file in self.texts for place in self.at(file, path)]

    def iteration(self) -> int:
        """`last_train_step`: the loop goes on after it."""
        steps = [place.value for place in self.locate("iteration")]
        return int(steps[0]) if steps else self.step

    def batch_size(self) -> int | None:
        """By the saved config."""
        return nanotron_data.batch(self.config)

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """With what a load asserts of it (`nanotron_data`)."""
        settings, notes = super().recount(counter, value)
        with understood(self.path):
            for file in self.texts:
                metas = self.trees[file]["metas"]
                if counter == "iteration":
                    nanotron_data.refuse_early(metas, value)
                if counter == "consumed_samples":
                    for path, new in nanotron_data.moved(metas, value, self.config):
                        settings += [Setting(counter, place, new) for place in self.at(file, path)]
        return settings, notes

    # --- ranks -----------------------------------------------------------------------------------

    def alike(self, field: str) -> list[Sequence[Place]]:
        """Each pipeline stage has param groups and a scheduler of its own: since April 2024 a group
        is of one parameter."""
        if field not in (*GROUP, "scheduler"):
            return super().alike(field)
        stages: dict[str, list[Place]] = {}
        for place in chain.from_iterable(super().alike(field)):
            stages.setdefault(stage_of(place.file), []).append(place)
        return [*stages.values()]

    def varies(self, field: str) -> bool:
        """See `alike`."""
        return field in GROUP

    def stages(self) -> list[NanotronCheckpoint]:
        """One for each pipeline stage, with what its ranks load."""
        return [
            replace(self, optimizers=(*shards,), schedulers=self._schedulers_of(stage))
            for stage, shards in groupby(self.optimizers, lambda item: stage_of(item[0]))
        ]

    def _schedulers_of(self, stage: str) -> tuple[Located, ...]:
        """Those that its ranks load: up to November 2024 there is one for all."""
        found = (at for at in self.schedulers if at[0].name == UNRANKED or stage_of(at[0]) == stage)
        return tuple(found)

    def in_words(self) -> tuple[str, float | None]:
        """With the peak of the stage whose it is the highest."""
        words, peak = super().in_words()
        return words, None if peak is None else self._peak()

    def _peak(self) -> float:
        return max(torch.peak(stage) for stage in self.stages())

    @property
    def groups_win(self) -> bool:
        """The scheduler writes the groups' lr when it is loaded."""
        return not self.schedulers

    # --- the schedule ----------------------------------------------------------------------------

    @property
    def _begins_anew(self) -> bool:
        """Whether a load leaves the rate of step 0 for its first update: up to November 2024, when
        the scheduler's file was named without ranks."""
        return any(file.name == UNRANKED for file, _ in self.schedulers)

    @property
    def _divides_by_groups(self) -> bool:
        """Whether the schedule's function divides by the groups' lr at the load, and not by the
        config's: since April 2024 each group has its own, of which torch saves a dict."""
        functions: Any = mapping(self.saved_schedule()).get("lr_lambdas") or [None]
        if not isinstance(functions, (list, tuple)):
            ((file, path), *_) = self.schedulers
            raise not_understood(file, (*path, "lr_lambdas"), functions, "a list of functions")
        return functions[0] is not None

    def rate_after_loading(self, k: int) -> float | None:
        """Of the k-th update after a load, in the first param group, by the saved config. None
        where that does not give the rate that was saved, as then another one holds."""
        state, rates = self.saved_schedule(), self.rates()
        section = nanotron.of(self.config)
        peak: Any = section.get("learning_rate")
        if torch_classes.kind(state) != "LambdaLR" or not rates or not is_number(peak):
            return None
        base, now = float(state["base_lrs"][0]), int(state["last_epoch"])
        any_top = self._divides_by_groups
        if base <= 0 or not nanotron.gives(section, now, rates[0] / base, peak, any_top):
            return None
        top = rates[0] if any_top else peak
        if self._begins_anew:
            now = now - 1 if k > 1 else -1
        factor = nanotron.factor(section, now + k, top)
        return None if factor is None else base * factor

    def read_state(self) -> State:
        """With the lr that a load makes of the saved config."""
        state = super().read_state()
        none: float | None = None
        rate = self.where_clear("scheduler", lambda: self.rate_after_loading(1), none)
        return state if rate is None else replace(state, promise=replace(state.promise, lr=rate))

    def notes(self) -> Iterator[str]:
        """What a load makes of the rate, and whether the config says it."""
        yield from super().notes()
        if not self.schedulers:
            return
        words = "nanotron steps its schedule once when it loads: the next lr is a step ahead"
        first, second = self.rate_after_loading(1), self.rate_after_loading(2)
        if self._begins_anew:
            at = "" if second is None else f", at {second:g}"
            words = (
                "when it loads, nanotron leaves the rate of step 0 of its schedule for one update; "
                f"the update after that goes on where the schedule stood{at}"
            )
        if first is None:
            yield Caveat(
                f"{words}. The config.yaml of {self.path.name} does not give the saved rate, so "
                "what schedule that is is not known",
                "lr",
                known=False,
            )
        else:
            yield Caveat(words, "lr") if self._begins_anew else f"{words}, by its config.yaml"
        if self._divides_by_groups and nanotron.of(self.config).get("min_decay_lr") != 0:
            yield (
                "with a min_decay_lr above 0 nanotron decays to base_lr × min_decay_lr / (the "
                "groups' lr at the load), as it divides by that lr"
            )

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """The lr. Raises SurgeryError for what the config says, with its keys."""
        lacking = sorted(values.keys() & nanotron.KEYS.keys())
        if not lacking or "position" in values:
            return self._by_stage(values)
        raise SurgeryError(
            f"nanotron takes {', '.join(lacking)} from its config alone",
            next=f"relaunch with these under {nanotron.SECTION}: {self._in_config(values)}",
        )

    def _by_stage(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """All rates keep their proportions: the largest of all stages gets `lr`."""
        stages = self.stages() if self.schedulers else []
        if len(stages) < 2:
            return super().reschedule(values)
        top = self._peak()
        settings: dict[tuple[Any, ...], Setting] = {}
        notes: dict[str, None] = {}
        for stage in stages:
            own, mine = torch.peak(stage), dict(values)
            if "lr" in values and own != top:
                mine["lr"] = values["lr"] * own / top
            found, told = stage.reschedule(mine)
            settings |= {(each.place.file, each.place.path): each for each in found}
            notes |= dict.fromkeys(told)
        return [*settings.values()], [*notes]

    def _in_config(self, values: Mapping[str, Any]) -> str:
        """Keys and values of the section, whose decay is counted from where it begins."""
        given = {nanotron.KEYS[key]: values[key] for key in nanotron.KEYS if key in values}
        if "decay" in values:
            begins = nanotron.beginning({**nanotron.of(self.config), **given})
            less = f"{values['decay']} less the step at which it begins"
            given["lr_decay_steps"] = values["decay"] - begins if is_count(begins) else less
        return nanotron.in_yaml(given)

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """The rates of the next step as base rates, and the keys of the config that make them
        decay. Raises SurgeryError with these where nothing else is to do."""
        positions = [int(place.value) for place in self.locate("position")]
        if not positions:
            return super().cooldown(decay)
        top = max(self.rates(), default=0.0)
        refuse_no_rate(top)
        if decay.shape == "1-sqrt" and not self._divides_by_groups:
            raise SurgeryError(
                f"this nanotron has no decay of the shape {decay.shape}",
                next=command(
                    "cooldown", "--shape", "linear", why="its shapes are linear and cosine"
                ),
            )
        keys = {
            "learning_rate": top,
            "lr_warmup_steps": 0,
            "lr_warmup_style": "constant",
            "lr_decay_style": decay.shape,
            "lr_decay_starting_step": positions[0] + (not self._begins_anew),
            "lr_decay_steps": decay.steps,
            "min_decay_lr": decay.to,
        }
        words = f"relaunch with these under {nanotron.SECTION}: {nanotron.in_yaml(keys)}"
        settings = [each for stage in self.stages() for each in torch_cooldown.rebased(stage)]
        if not settings:
            raise SurgeryError("nanotron decays by its config alone", next=words)
        return settings, [f"{words}: the decay is in no checkpoint"]

    # --- elements --------------------------------------------------------------------------------

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """By `names` in each shard, which number the parameters of its groups."""
        out = []
        for place in self.settings(key):
            with understood(place.file):
                names = self.trees[place.file][nanotron_parts.NAMES]
                numbers = self.value(place.file, (*place.path[:-1], "params"))
                out.append((tuple(str(names[number]) for number in numbers), place))
        return out

    def parts(self) -> list[Part]:
        """See `nanotron_parts`."""
        with understood(self.path):
            return nanotron_parts.parts(self, [file for file, _ in self.optimizers])

    def attention(self) -> tuple[list[Attention], list[str]]:
        """By the model of the saved config."""
        name = self.path.name
        if not mapping(self.config.get("model")):
            raise head_counts.unsaid(name)
        return heads.attentions(self.parts(), head_counts.of_nanotron(self.config, name))

    def fragments(self, name: str) -> list[Part]:
        """By `names` in each shard, which has the whole tensor of a rank."""
        fragments: list[Part] = []
        for place in self.locate(name):
            with understood(place.file):
                parameter = self.trees[place.file][nanotron_parts.NAMES][place.path[-2]]
            size = place.value.numel if isinstance(place.value, Tensor) else 0
            fragments.append(Part(str(parameter), "", name, place, 0, size, 0))
        return fragments


class Nanotron(StepFolders, NamesElsewhere):
    """Folders whose names are numbers."""

    name = "nanotron"
    options: Mapping[str, str] = {"clip_grad": "optimizer.clip_grad", "seed": "data.seed"}
    """By keys of its config: it takes nothing from the command line."""
    fresh_optimizer = (
        "checkpoints.load_optimizer: false in its config (up to November 2024: no "
        "resume_checkpoint_path, and model.init_method.path, which begins at step 0)"
    )

    def is_step(self, folder: Path) -> bool:
        """A number, with the metadata and an optimizer's folder."""
        named = folder.name.isdigit() and str(int(folder.name)) == folder.name
        return named and disk.is_file(folder / METADATA) and disk.is_folder(folder / "optimizer")

    def missing(self, run: Path, step: int) -> list[str]:
        """Files of ranks that `optimizer_config.json` has."""
        return nanotron_parts.missing(self.directory(run, step))

    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """A config may have a stage of the data that the step has not begun."""
        return [*nanotron_data.stages_since(run, step, max(self.steps(run)))]

    def pointer_files(self, run: Path) -> list[Path]:
        """`latest.txt`."""
        return [run / LATEST]

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """`latest.txt`: the number alone."""
        return {run / LATEST: str(step)}

    def pointed(self, pointer: Path) -> int | None:
        """The step in it; None for a missing file or any other text."""
        return number(pointer)

    def advise(self, key: str, value: object) -> str:
        """The key of its config; a batch is a product of three."""
        if key == "batch_size":
            return (
                "in the trainer's config, set tokens.batch_accumulation_per_replica so that it, "
                f"micro_batch_size and dp make {value}, then relaunch"
            )
        if key == "seed":
            return (
                f"in the trainer's config, set data.seed to {value}, then relaunch (since April "
                "2024 data.seed of the last of data_stages, for a Nanoset with shuffle_files)"
            )
        if key in self.options:
            return f"in the trainer's config, set {self.options[key]} to {value}, then relaunch"
        return super().advise(key, value)

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> NanotronCheckpoint:
        """Read the trees of every optimizer shard and of the scheduler."""
        folder = self.directory(run, step)
        inner, beside = folder / "optimizer", folder / "lr_scheduler"
        shards = [inner / name for name in listed(inner) if SHARD.fullmatch(name)]
        schedulers = [beside / name for name in listed(beside) if name.endswith(".pt")]
        files = [path for path in (*shards, *schedulers) if path not in without]
        trees, archives = read_shards(files)
        values, texts = json_beside.read([folder / METADATA])
        return NanotronCheckpoint(
            path=folder,
            step=step,
            trees={**trees, **values},
            archives=archives,
            texts=texts,
            config=_config(folder / "config.yaml"),
            optimizers=tuple((path, ()) for path in shards if path in archives),
            schedulers=tuple((path, ()) for path in schedulers if path in archives),
            family="nanotron",
            ranks=(max(len(shards), 1), 1),
        )


def _config(path: Path) -> Mapping[str, Any]:
    """The saved config; empty where there is none that can be read."""
    try:
        return plain_yaml.read(path) if disk.is_file(path) else {}
    except (SurgeryError, OSError):
        return {}
