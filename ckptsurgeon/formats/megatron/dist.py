"""One saved step of a Megatron-LM run in the torch_dist format.

What is not sharded is in `common.pt`, or from 0.19 on in the value `common_state/shard_0_1` of
`.metadata`. Unless the optimizer is saved fully reshardable, its param groups are values too, one
for each data-parallel group (each in a list of one). Source: `megatron/core/dist_checkpointing/`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files import integrity
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dcp import METADATA, Saved, Values
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.capabilities import HasDigests
from ckptsurgeon.formats.dcp.shards import DcpShards, placed
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.fields.values import MOMENTS, Located, Part, Place, StateDict, Strip
from ckptsurgeon.formats.megatron import parts
from ckptsurgeon.formats.megatron.checkpoint import MegatronCheckpoint
from ckptsurgeon.formats.megatron.shards import Optimizer
from ckptsurgeon.formats.tensors.strips import MASTERS
from ckptsurgeon.plans.edits import Append, Change, Content, Key

CONFIG = "metadata.json"
"""Written last: a folder without it is not complete."""
COMMON = "common.pt"
STATE = "common_state/shard_0_1"
VALUE: tuple[Key, ...] = (STATE, 0)
"""What is not sharded, in a list of one, as a value among the others."""
GROUPS = re.compile(r"(?:\w+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_\S+")

GATHERED = re.compile(r"(?:\w+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state/shard_\S+")
"""dp_zero_gather_scatter: all masters and moments of a model-parallel rank in one pickled value."""
TENSOR = re.compile(r"(?:\w+\.)?optimizer\.(?:state\.)?(\w+)\.")
KINDS = {**dict.fromkeys(MASTERS, "master"), **{kind: kind for kind in MOMENTS}}
"""Key of a state → what its tensors are of a parameter."""
RESHARDED = ("fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor")
"""Ways to save the distributed optimizer of which other tensor and pipeline ranks load."""
ORDER = ("weights", "master", *MOMENTS)
"""Of parts: that of `.metadata` is another in each step."""


@dataclass
class MegatronDistCheckpoint(DcpShards, MegatronCheckpoint, HasDigests):
    """One `iter_<N>` with `metadata.json`, `.metadata` and `.distcp` files."""

    sharded: ClassVar[bool] = True
    by_name: ClassVar[str] = "save the step once with --dist-ckpt-optim-fully-reshardable"
    """How the trainer saves its optimizer by the names of its parameters."""

    def find_roots(self) -> Iterator[Located]:
        """Where the common state is."""
        yield from common_root(self.archives, self.saved)

    def find_optimizers(self) -> Iterator[Optimizer]:
        """Those in the common state, and those that are values of their own."""
        yield from (item for item in super().find_optimizers() if self.groups(item))
        for name in self.saved.items:
            if GROUPS.fullmatch(name):
                scaler = name.replace(".optimizer/", ".grad_scaler/")
                yield Optimizer(self.saved.path, (name, 0), (scaler, 0))

    def state_dicts(self) -> list[StateDict]:
        """With what is in no tensor of `.metadata` named, so that no reset leaves it out."""
        out = super().state_dicts()
        if not any(GATHERED.fullmatch(name) for name in self.saved.items):
            return out
        held = "param_state of whole ranks (dp_zero_gather_scatter)"
        return [
            each._replace(beside={**each.beside, held: Place(each.file, (), None)}) for each in out
        ]

    def buckets(self) -> list[StateDict]:
        """The tensors among the values that are an optimizer's: one for all parameters, or buckets,
        with the same keys, as several optimizers may be chained under one name (Muon and Adam)."""
        owners: dict[str, dict[str, list[Place]]] = {}
        for name, items in self.saved.items.items():
            if not items.is_tensor or not (match := TENSOR.match(name)):
                continue
            owner, _, last = name.rpartition(".")
            key = last if ".bucket_idx_" in name else match[1]
            if ".bucket_idx_" not in name:
                owner = f"{name[: match.start(1)]}{name[match.end() :]}"
            owners.setdefault(owner, {}).setdefault(key, []).extend(
                placed(self.saved.path, path, get(self.trees[self.saved.path], path))
                for path in self.saved.paths(name)
            )
        alike: dict[frozenset[str], dict[str, list[Place]]] = {}
        for own in owners.values():
            state = alike.setdefault(frozenset(own), {})
            for key, places in own.items():
                state.setdefault(key, []).extend(places)
        return [StateDict(self.saved.path, state, {}) for state in alike.values()]

    def parts(self) -> list[Part]:
        """A state is named as its weights and cut as they are, or flattened and cut once more; each
        chunk of the weights is a cut. What has no state is not trained, and is left out. Raises
        SurgeryError for flat buckets, in which no file says where a parameter begins, and for a
        state whose weights are not cut alike."""
        states: dict[str, list[Part]] = {}
        for name in self.saved.items:
            match = TENSOR.match(name)
            if match is not None and match[1] == "distributed":
                raise SurgeryError(
                    f"{self.path.name} keeps masters and moments in flat buckets, and does not say "
                    "which parameters lie in them",
                    next=self.by_name,
                )
            if match is not None and match[1] in KINDS:
                parameter = name[match.end() :]
                states.setdefault(parameter, []).extend(
                    self.chunks(self.saved, name, parameter, KINDS[match[1]])
                )
        out = []
        for name, chunks in states.items():
            weights = {part.cut: part for part in self.chunks(self.saved, name, name, "weights")}
            found = [(part, _stretch(part, weights)) for part in chunks]
            alike = [part for part, stretch in found if stretch is None]
            parts.refuse_cut_otherwise(weights.values(), alike)
            kept = [*weights.values(), *(stretch or part for part, stretch in found)]
            out += sorted(kept, key=lambda part: (ORDER.index(part.kind), part.cut, part.first))
        return out

    def loads_on(self) -> Mapping[str, int]:
        """On any; but by ranks where the distributed optimizer is saved in a way that the loader
        refuses on others (`load_checkpoint` in `megatron/training/checkpointing.py`)."""
        kind = self._sharding()
        bound = self.args().get("use_distributed_optimizer") and kind and kind not in RESHARDED
        return super().loads_on() if bound else {}

    def unpadded(self, strip: Strip) -> Strip | None:
        """Flat buckets hold padding that no name gives the length of, and are left out."""
        places = [place for place, _ in strip.tensors.values()]
        return (
            super().unpadded(strip)
            if places and ".bucket_idx_" not in str(places[0].path[0])
            else None
        )

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """As `DcpShards` does, and the manifest of sha256 sums where there is one."""
        out = super().render(changes, root)
        folder = self.saved.folder
        if out and disk.exists(folder / integrity.MANIFEST):
            files = {root / file: new for file, new in out.items()}
            manifest = (folder / integrity.MANIFEST).relative_to(root).as_posix()
            out[manifest] = integrity.refreshed(folder, files, root)
        return out

    def digests(self) -> dict[Path, str]:
        """Those of `integrity.json`."""
        folder = self.saved.folder
        return {folder / name: digest for name, digest in integrity.read(folder).items()}

    def shallow_globals(self) -> Mapping[str, frozenset[str]]:
        """Those of `.metadata` and the common state."""
        files = {path: archive.globals() for path, archive in self.archives.items()}
        files[self.saved.path] = self.saved.globals
        return {f"{path.parent.name}/{path.name}": names for path, names in files.items()}

    def dialect(self) -> str:
        """What kind of checkpoint this is, in a few words."""
        kind = self._sharding()
        words = ["megatron-lm", "torch_dist", *[kind] * bool(kind)]
        return " · ".join([*words, f"{count(len(self.saved.items), 'value')}"])

    def _sharding(self) -> str:
        """How the distributed optimizer is saved; "" where the step does not say it."""
        places = self.in_roots("content_metadata", "distrib_optim_sharding_type")
        return places[0].value if places and isinstance(places[0].value, str) else ""


def common_root(archives: Collection[Path], saved: Saved) -> list[Located]:
    """`common.pt` if it is there, as the loader prefers it; else the value, if that is there."""
    if common := [path for path in archives if path.name == COMMON]:
        return [(common[0], ())]
    return [(saved.path, VALUE)] if STATE in saved.items else []


def common_file(folder: Path) -> Path:
    """The file that has, or leads to, the common state of `folder`."""
    common = folder / COMMON
    return common if disk.is_file(common) else folder / METADATA


def common_state(folder: Path) -> Any:
    """What is not sharded of what lies in `folder`. Raises KeyError where there is no such, and as
    `Archive.open` and `Saved.open` do."""
    file = common_file(folder)
    if file.name == COMMON:
        return Archive.open(file).tree()
    return get(Values(Saved.open(folder)), VALUE)


def _stretch(part: Part, weights: Mapping[str, Part]) -> Part | None:
    """A chunk of a state of fully_sharded_model_space, up to 0.15, as a stretch of its weights,
    which are flattened on each tensor-parallel rank and cut among the data-parallel ones: it lies
    at (number of the cut along each axis, first element), and its size is 1 along each axis. None
    for one that is cut as weights are, or otherwise."""
    if not part.cut or not weights:
        return None
    size, value = next(iter(weights.values())).place.value.size, part.place.value
    *numbers, first = map(int, part.cut.split("."))
    if len(numbers) != len(size) or set(value.size[:-1]) != {1}:
        return None
    cut = ".".join(str(number * length) for number, length in zip(numbers, size, strict=True))
    own = weights.get(cut)
    if own is None or first + value.numel > own.place.value.numel:
        return None
    return part._replace(cut=cut, first=first, box=own.box)


def opened_dist(folder: Path, step: int, without: Collection[Path] = ()) -> MegatronDistCheckpoint:
    """Read `.metadata` and `common.pt`; values are read when they are asked for."""
    saved = Saved.open(folder)
    common = folder / COMMON
    beside = [common] if disk.is_file(common) and common not in without else []
    trees, archives = read_shards(beside)
    return MegatronDistCheckpoint(
        folder, step, {**trees, saved.path: Values(saved)}, archives, saved=saved
    )
