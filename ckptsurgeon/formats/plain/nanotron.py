"""nanotron runs: `<N>/optimizer/*.pt`, `<N>/lr_scheduler/*.pt`, and `latest.txt`.

Names: `nanotron/serialize/optimizer.py`. The weights are safetensors; the optimizer is torch files.
On a load the optimizer comes first, then the scheduler, which makes one step at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.files.text_file import number
from ckptsurgeon.formats.checkpoint import read_shards
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.formats.protocol import Fragment, Place
from ckptsurgeon.formats.sane import problem, understood
from ckptsurgeon.formats.step_folders import StepFolders, listed, refuse_link

LATEST = "latest.txt"
METADATA = "checkpoint_metadata.json"
CONFIG = "optimizer_config.json"
SHARD = re.compile(
    r"optimizer_pp-\d+-of-\d+(?:_dp-\d+-of-\d+)?_tp-\d+-of-\d+(?:_exp-\d+-of-\d+)?\.pt"
)
MAX_CONFIG = 64 << 20


@dataclass
class NanotronCheckpoint(TorchCheckpoint):
    """The optimizer shards of all ranks, and the one scheduler."""

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

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """By `names` in each shard, which number the parameters of its groups."""
        out = []
        for place in self.settings(key):
            with understood(place.file):
                names = self.trees[place.file]["names"]
                numbers = self.value(place.file, (*place.path[:-1], "params"))
                out.append((tuple(str(names[number]) for number in numbers), place))
        return out

    def fragments(self, name: str) -> list[Fragment]:
        """By `names` in each shard, which has the whole tensor of a rank."""
        fragments = []
        for place in self.locate(name):
            with understood(place.file):
                parameter = self.trees[place.file]["names"][place.path[-2]]
            size = place.value.numel if isinstance(place.value, Tensor) else 0
            fragments.append(Fragment(str(parameter), place, 0, size))
        return fragments


class Nanotron(StepFolders):
    """Folders whose names are numbers."""

    name = "nanotron"
    options: Mapping[str, str] = {"clip_grad": "optimizer.clip_grad", "seed": "general.seed"}
    """By keys of its config: it takes nothing from the command line."""
    fresh_optimizer = "checkpoints.load_optimizer: false in its config"

    def is_step(self, folder: Path) -> bool:
        """A number, with the metadata and an optimizer's folder."""
        named = folder.name.isdigit() and str(int(folder.name)) == folder.name
        return named and (folder / METADATA).is_file() and (folder / "optimizer").is_dir()

    def missing(self, run: Path, step: int) -> list[str]:
        """Shards of ranks that `optimizer_config.json` has."""
        folder = self.directory(run, step)
        refuse_link(folder)
        inner = folder / "optimizer"
        if not (inner / CONFIG).is_file():
            return [f"optimizer/{CONFIG}"]
        config = _json(inner / CONFIG)
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
            raise SurgeryError(f"{inner / CONFIG}: {reason}")
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
        """The key of its config."""
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
        return NanotronCheckpoint(
            path=folder,
            step=step,
            trees=trees,
            archives=archives,
            optimizers=tuple((path, ()) for path in shards if path in archives),
            schedulers=tuple(path for path in schedulers if path in archives),
            family="nanotron",
            ranks=(max(len(shards), 1), 1),
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_CONFIG))
    except (ValueError, RecursionError) as error:
        raise SurgeryError(f"{path} is no JSON: {error}") from None
    return document if isinstance(document, dict) else {}
