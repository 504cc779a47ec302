"""metaseq (OPT) and fairseq runs: flat `checkpoint_<updates><suffix>.pt` files, or one folder each.

Names: `checkpoint_utils.py` of either. `checkpoint_last*` are copies and what a restart loads;
fairseq's with `best` in their names are copies that it does not load by itself. The number of files
whose names begin alike decides whether a restart of metaseq takes them for complete.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.one_look import once
from ckptsurgeon.formats.advice import loaded
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields import skipped
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.fields.understood import is_count, problem, understood
from ckptsurgeon.formats.fields.values import Rival, State
from ckptsurgeon.formats.layout import Format, NamesEpochs, NeedsLinks, leads_out, outside
from ckptsurgeon.formats.plain.fairseq_checkpoint import (
    OPTIMIZER,
    TUNE,
    FairseqCheckpoint,
    links_last,
    updates,
)
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.remote import reads

SUFFIX = r"(?P<suffix>(?:-model_part-(?P<mp>\d+))?(?:-shard(?P<dp>\d+))?)\.pt"
BEST = r"_best|\.best_.+_-?\d+\.\d+"
FLAT = re.compile(
    rf"(?P<stem>checkpoint(?:_last|(?P<best>{BEST})|_(?:\d+_)?(?P<updates>\d{{1,18}})|\d+)){SUFFIX}"
)
INNER = re.compile(rf"checkpoint{SUFFIX}")
FOLDER = re.compile(r"checkpoint_(\d{1,18})")
LAST = "checkpoint_last"
_known: dict[tuple[str, int, int, int], tuple[int | None, bool]] = {}
"""num_updates by file, as it was: the names of some files do not tell. And whether its trainer
makes `checkpoint_last*` links."""


class Fairseq(Format, NamesEpochs, NeedsLinks):
    """The steps are numbers of updates; `checkpoint_last*` are the pointers."""

    name = "fairseq"
    options: Mapping[str, str] = {
        "clip_grad": "--clip-norm",
        "seed": "--seed",
    }
    fresh_optimizer = "--reset-optimizer: it counts its updates from 0 then"

    def recognizes(self, run: Path) -> bool:
        """True with a file of such a name that has an optimizer_history."""
        flat = (files[0] for files in _stems(run).values())
        inner = (files[0] for step in _folders(run) if (files := self._inside(run, step)))
        return any(_updates(path) is not None for path in (*flat, *inner))

    def steps(self, run: Path) -> list[int]:
        """Every number of updates that is saved, in whichever layout."""
        return sorted({*_flat(run), *_folders(run)})

    def _inside(self, run: Path, step: int) -> list[Path]:
        folder = run / f"checkpoint_{step}"
        return _sorted(folder, INNER) if disk.is_folder(folder) else []

    def _shards(self, run: Path, step: int) -> list[Path]:
        """The files of `step` by their own name, else of a best one, else `checkpoint_last`."""
        if inside := self._inside(run, step):
            return inside
        stem = min(_flat(run).get(step, []), key=_rank, default=None)
        return [] if stem is None else _stems(run)[stem]

    def directory(self, run: Path, step: int) -> Path:
        """`checkpoint_<updates>` if it is a folder, else the run."""
        return run / f"checkpoint_{step}" if self._inside(run, step) else run

    def entries(self, run: Path, step: int) -> list[Path]:
        """The folder, or the files but for `checkpoint_last*`, the shards first."""
        if self._inside(run, step):
            return [run / f"checkpoint_{step}"]
        stems = (stem for stem in sorted(_flat(run).get(step, []), key=_rank) if stem != LAST)
        return [path for stem in stems for path in _stems(run)[stem]]

    def files(self, run: Path, step: int) -> list[Path]:
        """The shards, and the copies of them in `checkpoint_last*`; a link to one is none."""
        shards = self._shards(run, step)
        own = {path.resolve() for path in shards}
        copies = [
            path
            for path in _stems(run).get(LAST, [])
            if _updates(path) == step and not (disk.is_link(path) and path.resolve() in own)
        ]
        return sorted({*shards, *copies})

    def common(self, file: str) -> str:
        """The suffix of the rank alone."""
        match = FLAT.fullmatch(file) or INNER.fullmatch(file)
        return f"checkpoint{match['suffix']}.pt" if match else file

    def missing(self, run: Path, step: int) -> list[str]:
        """Absent shards: by the saved world size, or below the highest number that is there."""
        shards = self._shards(run, step)
        if not shards:
            return [f"checkpoint_{step}.pt"]
        pattern = INNER if self._inside(run, step) else FLAT
        matches = [m for path in shards if (m := pattern.fullmatch(path.name))]
        parts = [int(m["mp"]) for m in matches if m["mp"]]
        ranks = [int(m["dp"]) for m in matches if m["dp"]]
        model, data = max(parts, default=0) + 1, max(ranks, default=0) + 1
        first = self._first(run, step)
        with understood(shards[0]):
            world = first.argument("distributed_training", "distributed_world_size")
            saved = first.argument("common", "model_parallel_size")
            if parts and is_count(saved):
                model = max(model, saved)
            if ranks and is_count(world) and world % model == 0:
                data = max(data, world // model)
            reason = problem("ranks", model * data)
        if reason:
            raise SurgeryError(
                f"{shards[0]}: {reason}",
                next="compare its sizes with the command line of the trainer",
            )
        stem = "checkpoint" if pattern is INNER else matches[0]["stem"]
        names = [
            stem + (f"-model_part-{m}" if parts else "") + (f"-shard{d}" if ranks else "") + ".pt"
            for m in range(model)
            for d in range(data)
        ]
        there = {path.name for path in shards}
        return [name for name in names if name not in there]

    def _first(self, run: Path, step: int) -> FairseqCheckpoint:
        """The first shard of `step` alone, for the flags of its run."""
        trees, archives = read_shards(self._shards(run, step)[:1])
        return FairseqCheckpoint(run, step, trees, archives, optimizers=())

    def strays(self, run: Path, step: int) -> list[str]:
        """Files that are none of the trainer's and that metaseq counts: of its names all that begin
        and end as a shard does, in a folder every one without a `_` before it."""
        if inside := self._inside(run, step):
            counted = [p.name for p in self.directory(run, step).iterdir() if p.name[0] != "_"]
            known = {path.name for path in inside}
        else:
            stems = "|".join(map(re.escape, _flat(run).get(step, [])))
            shard = re.compile(rf"(?:{stems})(?:-model_part-\d+)?-shard.*\.pt")
            counted = [path.name for path in run.iterdir() if shard.fullmatch(path.name)]
            known = {name for name in counted if FLAT.fullmatch(name)}
        return [
            f"{name}: is counted by the trainer as a shard, and is none"
            for name in sorted({*counted} - known)
        ]

    def pointer_files(self, run: Path) -> list[Path]:
        """The files of `checkpoint_last`; none if the run keeps no such copy."""
        return _stems(run).get(LAST, [])

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """Each file of `checkpoint_last` with the shard that it must be a copy of; none if the run
        keeps no such copy. A run of another number of shards can't be pointed to."""
        last = self.pointer_files(run)
        shards = self._shards(run, step) if last else []
        copies = {_named(run, path): path for path in shards}
        if shards and not set(last) <= copies.keys():
            raise SurgeryError(
                f"checkpoint_last has {count(len(last), 'file')} and step {step} {len(shards)}: "
                "it was saved by another number of ranks",
                next=f"relaunch the trainer with --restore-file {self._restored(run, step)}"
                + (f", and without {TUNE}" if self._first(run, step).tuned_from else ""),
            )
        return copies

    def to_link(self, pointer: Path) -> bool:
        """metaseq since 2023 removes a link and makes another, and leaves a file as it is: each
        restart would load that. An older one copies through a link, and so does fairseq."""
        return reads.key(pointer) is None and _said(pointer)[1]

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """A step outside the run, if a link leads there. Of folders metaseq takes the highest by
        the start of its name, if it has as many files as there are ranks."""
        if inside := self._inside(run, step):
            return [
                Rival(number, f"{item.name} is taken for step {number} by the trainer", (item,))
                for item in sorted(run.iterdir())
                if (match := re.match(r"checkpoint_(\d{1,18})(?=\D)", item.name))
                and (number := int(match[1])) >= step
                and disk.is_folder(item)
                and sum(path.name[0] != "_" for path in item.iterdir()) == len(inside)
            ]
        links = [path for path in self.pointer_files(run) if leads_out(run, path)]
        copies = self.pointers(run, step) if links else {}
        return [outside(step, path, Path(copies[path])) for path in links]

    def _restored(self, run: Path, step: int) -> Path:
        """What the trainer is given to load `step`: it puts the suffix of each rank into it."""
        first = self._shards(run, step)[0]
        match = FLAT.fullmatch(first.name)
        return first.with_name(f"{match['stem'] if match else 'checkpoint'}.pt")

    def pointed(self, pointer: Path) -> int | None:
        """The updates after which the copy was saved."""
        return _updates(pointer)

    def advise(self, key: str, value: object) -> str:
        """A batch is a product: of one rank, of the updates that are joined, of the ranks."""
        if key == "batch_size":
            return (
                "relaunch the trainer with --batch-size and --update-freq such that they and the "
                f"ranks make {value}"
            )
        return super().advise(key, value)

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
        """metaseq's flag takes ranges joined by commas; fairseq (0.12.2) has none. An update that
        metaseq passes over is not counted: the numbers of all later ones are lower."""
        flag = skipped.by_updates(ranges)
        return f"relaunch metaseq with --skip-batches {flag}; fairseq skips no data"

    def advise_rewarm(
        self, state: State, kind: str, until: str, iterations: int
    ) -> tuple[Hint, ...]:
        """metaseq's own: a rate of 0 up to a number of updates, and a rise over some more. Its
        decay begins anew after them (`polynomial_decay_schedule.py`, b8924c0). fairseq's warm-up
        begins with the run."""
        zero = state.step if kind == "ramp" else max(state.step + iterations - 1, 0)
        rise = iterations if kind == "ramp" else 0
        return (
            command("reset", "moments", why="without re-warm"),
            "relaunch metaseq with --lr-scheduler polynomial_decay "
            f"--zero-lr-warmup-steps {zero} --warmup-updates {rise}",
            "and --lr with the rate after that: it decays from there to --total-num-update",
            "relaunch fairseq with a small --lr until the moments have filled, then with the old",
        )

    def launch_flags(self, run: Path, checkpoint: Checkpoint) -> list[str]:
        """The file alone: its state has no value that a flag could repeat. An empty name takes back
        that of a model to begin with, beside which the trainer takes no file."""
        words = loaded("--restore-file", self._restored(run, checkpoint.step))
        tuned = isinstance(checkpoint, FairseqCheckpoint) and checkpoint.tuned_from
        return [*words, TUNE, ""] if words and tuned else words

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> FairseqCheckpoint:
        """Read the tree of every shard, and of every copy in `checkpoint_last`."""
        trees, archives = read_shards([p for p in self.files(run, step) if p not in without])
        states = {path: tree.get(OPTIMIZER) for path, tree in trees.items()}
        files = [path for path, state in states.items() if isinstance(state, dict)]
        shards = self._shards(run, step)
        last = {_named(run, shard): shard for shard in shards}
        return FairseqCheckpoint(
            path=shards[0] if shards else run,
            step=step,
            trees=trees,
            archives=archives,
            optimizers=tuple((path, (OPTIMIZER,)) for path in files),
            scales=tuple((path, (OPTIMIZER, "loss_scale")) for path in files),
            family="metaseq/fairseq",
            ranks=_world(shards),
            weights_at=tuple(
                (p, ("model",)) for p in files if isinstance(trees[p].get("model"), dict)
            ),
            repeated={p: last[p] for p in trees if p in last and p not in shards},
        )


def _rank(stem: str) -> tuple[bool, bool, str]:
    """Which of several equal files of a step are its shards: the first by this."""
    match = FLAT.fullmatch(f"{stem}.pt")
    return stem == LAST, bool(match and match["best"]), stem


def _world(shards: list[Path]) -> tuple[int, int]:
    """Data-parallel and model-parallel ranks, by the names."""
    matches = [m for path in shards if (m := re.search(SUFFIX, path.name))]
    data = max((int(m["dp"] or 0) for m in matches), default=0)
    model = max((int(m["mp"] or 0) for m in matches), default=0)
    return data + 1, model + 1


@once
def _stems(run: Path) -> dict[str, list[Path]]:
    """The flat files by what their names begin with."""
    stems: dict[str, list[Path]] = {}
    for path in _sorted(run, FLAT):
        match = FLAT.fullmatch(path.name)
        assert match is not None
        stems.setdefault(match["stem"], []).append(path)
    return stems


def _sorted(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Files of such names, by their ranks; of `checkpoint_last` also links that lead nowhere."""
    found = [(m, p) for p in folder.iterdir() if (m := pattern.fullmatch(p.name))]
    matches = [(m, p) for m, p in found if disk.is_file(p) or (disk.is_link(p) and _is_last(p))]
    order = sorted(matches, key=lambda pair: (int(pair[0]["mp"] or 0), int(pair[0]["dp"] or 0)))
    return [path for _, path in order]


@once
def _flat(run: Path) -> dict[int, list[str]]:
    """The stems of each number of updates."""
    by_step: dict[int, list[str]] = {}
    for stem, files in _stems(run).items():
        match = FLAT.fullmatch(files[0].name)
        named = match["updates"] if match else None
        step = int(named) if named else _updates(files[0])
        if step is not None:
            by_step.setdefault(step, []).append(stem)
    return by_step


def _folders(run: Path) -> list[int]:
    matches = ((FOLDER.fullmatch(item.name), item) for item in run.iterdir())
    return [int(m[1]) for m, item in matches if m and disk.is_folder(item) and _sorted(item, INNER)]


def _named(run: Path, shard: Path) -> Path:
    """The file of `checkpoint_last` that is a copy of `shard`."""
    match = FLAT.fullmatch(shard.name) or INNER.fullmatch(shard.name)
    return run / f"{LAST}{match['suffix'] if match else ''}.pt"


def _is_last(path: Path) -> bool:
    return path.name.startswith(LAST)


def _updates(path: Path) -> int | None:
    """After how many updates a file was saved; None if it can't be read or is another trainer's."""
    return _said(path)[0]


def _said(path: Path) -> tuple[int | None, bool]:
    try:
        status = path.stat()
    except OSError:
        return None, False
    key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in _known:
        try:
            tree = Archive.open(path).tree()
            _known[key] = updates(tree), links_last(tree)
        except (SurgeryError, OSError, ArithmeticError, LookupError, TypeError, ValueError,
                AttributeError):  # fmt: skip
            _known[key] = None, False
    return _known[key]
