"""nanotron runs: `<N>/optimizer/*.pt`, `<N>/lr_scheduler/*.pt`, and `latest.txt`.

Names: `nanotron/serialize/optimizer.py`. The weights are safetensors; the optimizer is torch files.
On a load the optimizer comes first, then the scheduler, which makes one step at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import json_text, plain_yaml
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.files.text_file import number
from ckptsurgeon.formats.capabilities import HasHeads
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.fields.understood import is_count, mapping, problem, understood
from ckptsurgeon.formats.fields.values import Decay, Part, Place, Setting
from ckptsurgeon.formats.heads import head_counts, heads
from ckptsurgeon.formats.heads.heads import Attention
from ckptsurgeon.formats.places import json_beside
from ckptsurgeon.formats.places.safetensors_beside import SafetensorsBeside
from ckptsurgeon.formats.plain import nanotron_parts
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.formats.plain.nanotron_parts import SHARD
from ckptsurgeon.formats.step_folders import StepFolders, listed
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

LATEST = "latest.txt"
METADATA = "checkpoint_metadata.json"
CONFIG = "optimizer_config.json"
TOTAL, LAST = ("metas", "consumed_train_samples"), ("metas", "last_train_step")
STAGES = ("metas", "data_stages")


@dataclass
class NanotronCheckpoint(SafetensorsBeside, TorchCheckpoint, HasHeads):
    """The optimizer shards of all ranks, the one scheduler, and `checkpoint_metadata.json`."""

    batch: int | None = field(kw_only=True, default=None)

    def find(self, field: str) -> Sequence[Place]:
        """The counters are in the metadata."""
        path = {"consumed_samples": TOTAL, "iteration": LAST}.get(field)
        if path is None:
            return super().find(field)
        return [place for file in self.texts for place in self.at(file, path)]

    @property
    def asked(self) -> bool:
        """No: its source was read."""
        return False

    def iteration(self) -> int:
        """`last_train_step`: the loop goes on after it."""
        steps = [place.value for place in self.locate("iteration")]
        return int(steps[0]) if steps else self.step

    def batch_size(self) -> int | None:
        """By the saved config."""
        return self.batch

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """The samples of the current stage are what its sampler begins at; the total must be their
        sum, or nanotron asserts (`serialize/metadata.py`, 1c377d1). Tokens follow."""
        settings, notes = super().recount(counter, value)
        if counter != "consumed_samples":
            return settings, notes
        with understood(self.path):
            for file in self.texts:
                settings += self._of_the_stage(file, value)
        return settings, notes

    def _of_the_stage(self, file: Path, total: int) -> Iterator[Setting]:
        metas = self.trees[file]["metas"]
        stages = metas.get("data_stages")
        if not stages:
            return
        number = metas.get("last_stage_idx") or 0
        stage, moved = stages[number], total - metas["consumed_train_samples"]
        samples = stage["consumed_train_samples"] + moved
        if samples < 0:
            raise SurgeryError(
                f"sample {total} was read in an earlier stage of the data than {stage['name']}",
                next=command("status", why="roll back to a step of that stage"),
            )
        folders = stage.get("consumed_tokens_per_dataset_folder") or {}
        if len(folders) > 1:
            raise SurgeryError(
                f"the data is a blend of {len(folders)} folders, and how many samples of each "
                f"come before sample {total} is not known",
                next=command("status", why="roll back to a step before the data"),
            )
        path, length = (*STAGES, number), int(stage.get("sequence_length") or 0)
        yield from self._set(file, (*path, "consumed_train_samples"), samples)
        for name in folders:
            inner = (*path, "consumed_tokens_per_dataset_folder", name)
            yield from self._set(file, inner, samples * length)
        if length and metas.get("consumed_tokens_total") is not None:
            tokens = metas["consumed_tokens_total"] + moved * length
            yield from self._set(file, ("metas", "consumed_tokens_total"), tokens)

    def _set(self, file: Path, path: tuple[Key, ...], new: int) -> Iterator[Setting]:
        yield from (Setting("consumed_samples", place, new) for place in self.at(file, path))

    @property
    def groups_win(self) -> bool:
        """The scheduler writes the groups' lr when it is loaded."""
        return not self.schedulers

    def notes(self) -> Iterator[str]:
        """The first lr after a load is the schedule's next one."""
        yield from super().notes()
        if self.schedulers:
            yield (
                "nanotron steps its schedule once when it loads: the next lr is that of one step "
                "later, from the same base_lrs; with a min_decay_lr above 0 it decays to base_lr × "
                "min_decay_lr / (the groups' lr at the load), as it divides by that lr"
            )

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """Refused with the keys of the config that do it: the load makes one step, so the decay
        starts one later than the saved position. Source: `nanotron/helpers.py`,
        lr_scheduler_builder."""
        positions = [int(place.value) for place in self.locate("position")]
        if not positions:
            return super().cooldown(decay)
        raise SurgeryError(
            "nanotron decays by its config alone",
            next=(
                "relaunch with these under optimizer.learning_rate_scheduler, and learning_rate as "
                f"it was: lr_decay_style: {decay.shape}, lr_decay_starting_step: "
                f"{positions[0] + 1}, lr_decay_steps: {decay.steps}, min_decay_lr: {decay.to!r}"
            ),
        )

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """By `names` in each shard, which number the parameters of its groups."""
        out = []
        for place in self.settings(key):
            with understood(place.file):
                names = self.trees[place.file]["names"]
                numbers = self.value(place.file, (*place.path[:-1], "params"))
                out.append((tuple(str(names[number]) for number in numbers), place))
        return out

    def parts(self) -> list[Part]:
        """See `nanotron_parts`."""
        with understood(self.path):
            return nanotron_parts.parts(self, [file for file, _ in self.optimizers])

    def attention(self) -> tuple[list[Attention], list[str]]:
        """By the model of the saved config."""
        config, name = _config(self.path / "config.yaml"), self.path.name
        if not mapping(config.get("model")):
            raise head_counts.unsaid(name)
        return heads.attentions(self.parts(), head_counts.of_nanotron(config, name))

    def fragments(self, name: str) -> list[Part]:
        """By `names` in each shard, which has the whole tensor of a rank."""
        fragments: list[Part] = []
        for place in self.locate(name):
            with understood(place.file):
                parameter = self.trees[place.file]["names"][place.path[-2]]
            size = place.value.numel if isinstance(place.value, Tensor) else 0
            fragments.append(Part(str(parameter), "", name, place, 0, size, 0))
        return fragments


class Nanotron(StepFolders):
    """Folders whose names are numbers."""

    name = "nanotron"
    options: Mapping[str, str] = {
        "clip_grad": "optimizer.clip_grad",
        "seed": "general.seed",
    }
    """By keys of its config: it takes nothing from the command line."""
    fresh_optimizer = "checkpoints.load_optimizer: false in its config"

    def is_step(self, folder: Path) -> bool:
        """A number, with the metadata and an optimizer's folder."""
        named = folder.name.isdigit() and str(int(folder.name)) == folder.name
        return named and (folder / METADATA).is_file() and (folder / "optimizer").is_dir()

    def missing(self, run: Path, step: int) -> list[str]:
        """Shards of ranks that `optimizer_config.json` has."""
        folder = self.directory(run, step)
        inner = folder / "optimizer"
        if not (inner / CONFIG).is_file():
            return [f"optimizer/{CONFIG}"]
        config = json_text.mapping(inner / CONFIG)
        with understood(inner / CONFIG):
            sizes = {
                kind: int(config["parallelism"].get(f"{kind}_size", 1))
                for kind in ("pp", "dp", "tp", "expert_parallel")
            }
            sharded = config["type"] == "ZeroDistributedOptimizer"
            pp, tp, experts = sizes["pp"], sizes["tp"], sizes["expert_parallel"]
            dp = sizes["dp"] if sharded else 1
            reason = problem("ranks", pp * dp * tp * experts)
        if reason:
            raise SurgeryError(
                f"{inner / CONFIG}: {reason}",
                next="compare its sizes with the command line of the trainer",
            )
        there = {name for name in listed(inner) if SHARD.fullmatch(name)}
        expert = any("_exp-" in name for name in there) or not there
        names = [
            f"optimizer_pp-{p}-of-{pp}"
            + (f"_dp-{d}-of-{dp}" if sharded else "")
            + f"_tp-{t}-of-{tp}"
            + (f"_exp-{e}-of-{experts}" if expert else "")
            + ".pt"
            for p in range(pp)
            for d in range(dp)
            for t in range(tp)
            for e in range(experts if expert else 1)
        ]
        return [f"optimizer/{name}" for name in names if name not in there]

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
            batch=_batch(folder / "config.yaml"),
            optimizers=tuple((path, ()) for path in shards if path in archives),
            schedulers=tuple((path, ()) for path in schedulers if path in archives),
            family="nanotron",
            ranks=(max(len(shards), 1), 1),
        )


def _config(path: Path) -> Mapping[str, Any]:
    """The saved config; empty where there is none that can be read."""
    try:
        return plain_yaml.read(path) if path.is_file() else {}
    except (SurgeryError, OSError):
        return {}


def _batch(path: Path) -> int | None:
    """The samples of an iteration by the saved config; None where it does not say."""
    config = _config(path)
    try:
        tokens, parallel = config["tokens"], config["parallelism"]
        sizes = (
            tokens["micro_batch_size"], tokens["batch_accumulation_per_replica"], parallel["dp"]
        )  # fmt: skip
    except (LookupError, TypeError):
        return None
    return math.prod(sizes) if all(is_count(size) and size for size in sizes) else None
