"""DeepSpeed checkpoints: ZeRO stages 0 to 3, with the client state of Megatron-DeepSpeed.

File names: `deepspeed/runtime/engine.py`, `_get_*_ckpt_name`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.files.archives.archive import PICKLE, Archive
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.deepspeed import flags, openrlhf, universal
from ckptsurgeon.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ckptsurgeon.formats.deepspeed.optimizer import EXPERTS, OPTIM
from ckptsurgeon.formats.deepspeed.parallel import absent_layers
from ckptsurgeon.formats.deepspeed.shards import MODEL
from ckptsurgeon.formats.fields.constants import TRACKER, TRAINER_STATE
from ckptsurgeon.formats.fields.shard_files import KEPT_SCANS, parsing, read_shards
from ckptsurgeon.formats.fields.understood import (
    MAX_RANKS,
    RANKS,
    is_count,
    not_understood,
    problem,
    understood,
)
from ckptsurgeon.formats.fields.values import Hazard, State
from ckptsurgeon.formats.layout import Format, HasHazards, NamesElsewhere, NamesMore
from ckptsurgeon.formats.megatron.options import OPTIONS
from ckptsurgeon.formats.step_folders import files_below, folders_in
from ckptsurgeon.hints import Hint

STEP = re.compile(r"global_step(\d+)")
LATEST = "latest"
WORLDS = ("dp_world_size", "mp_world_size")


class DeepSpeed(Format, HasHazards, NamesElsewhere, NamesMore):
    """The layout of `engine.save_checkpoint`: `<root>/global_step<N>/*.pt` and `<root>/latest`."""

    name = "deepspeed"
    options = OPTIONS
    fresh_optimizer = (
        "load_checkpoint(..., load_optimizer_states=False), in BigScience's Megatron-DeepSpeed "
        "--no-load-optim"
    )

    def __init__(self) -> None:
        # A step is opened right after it was asked what it lacks: its first file is read once.
        self._scanned: Archive | None = None

    def recognizes(self, run: Path) -> bool:
        """True with a `global_step<N>` folder that holds shards, or a `latest` that names one; but
        for an engine inside a checkpoint of Hugging Face, whose scheduler lies beside it."""
        if disk.is_file(run / TRAINER_STATE):
            return False
        pointer = run / LATEST
        if disk.is_file(pointer) and STEP.match(text(pointer) or ""):
            return True
        return any(_names(self.directory(run, step)) for step in self.steps(run))

    def steps(self, run: Path) -> list[int]:
        """The N of every `global_step<N>` folder or universal copy, ascending."""
        kinds = (STEP, universal.FOLDER)
        matches = (kind.fullmatch(name) for name in folders_in(run) for kind in kinds)
        return sorted({int(match[1]) for match in matches if match})

    def directory(self, run: Path, step: int) -> Path:
        """`global_step<N>`, or the universal copy where that is all there is."""
        shards, copy = run / f"global_step{step}", universal.folder(run, step)
        return copy if copy.name in folders_in(run) and not disk.is_folder(shards) else shards

    def entries(self, run: Path, step: int) -> list[Path]:
        """The folder, the universal copy beside it, and what else was written of it."""
        shards, copy = run / f"global_step{step}", universal.folder(run, step)
        copies = [copy] if copy.name in folders_in(run) else []
        more = [*copies, *openrlhf.more(run).get(step, [])]
        return more if copy in more and not disk.is_folder(shards) else [shards, *more]

    def begun(self, run: Path, step: int) -> list[Path]:
        """What else was written of steps that a clean-up has removed since, or that an evaluation
        alone has saved."""
        saved = self.steps(run)
        later = openrlhf.more(run).items()
        gone = [paths for number, paths in later if number > step and number not in saved]
        return [path for paths in gone for path in paths]

    def unclear(self, run: Path, step: int) -> list[Path]:
        """No name: an export is that of its step."""
        return []

    def files(self, run: Path, step: int) -> list[Path]:
        """All that lies in the folder, at any depth (GPT-NeoX keeps its configs in one inside), and
        the files of the universal copy."""
        copy, folder = universal.folder(run, step), self.directory(run, step)
        there = copy.name in folders_in(run)
        copied = sorted(filter(disk.is_file, disk.below(copy))) if there else []
        if folder == copy:
            return copied
        return files_below(folder) + copied

    def missing(self, run: Path, step: int) -> list[str]:
        """Names of absent shards, by the world sizes that the first model file states. A universal
        copy beside them that is not complete does not count; alone, it must be."""
        checkpoint = self.directory(run, step)
        if checkpoint == universal.folder(run, step):
            whole = universal.complete(checkpoint)
            return [] if whole else [f"zero/{universal.GLOBAL}"]
        names = _names(checkpoint)
        with self._first(checkpoint, names) as first:
            if first is None:
                return ["mp_rank_00_model_states.pt", *absent_layers(names, {})]
            lacking = [name for name in _expected(first, names) if name not in names]
            with understood(checkpoint):
                return lacking + absent_layers(names, first.tree())

    def strays(self, run: Path, step: int) -> list[str]:
        """Shards of ranks beyond the world sizes, or of another precision than the others."""
        checkpoint = self.directory(run, step)
        if checkpoint == universal.folder(run, step):
            return []
        names = _names(checkpoint)
        with self._first(checkpoint, names) as first:
            expected = set() if first is None else set(_expected(first, names))
        ranked = (n for n in sorted(names) if MODEL.fullmatch(n) or OPTIM.fullmatch(n))
        return [
            f"{name}: belongs to no rank of this checkpoint"
            for name in ranked
            if name not in expected
        ]

    @contextmanager
    def _first(self, checkpoint: Path, names: Collection[str]) -> Iterator[Archive | None]:
        """The archive of the first model file; None without one. Of several steps that are asked at
        once few have a scan in memory."""
        name = min((name for name in names if MODEL.fullmatch(name)), default=None)
        known = self._scanned
        with ExitStack() as parsed:
            if name is None:
                known = None
            elif known is None or known.path != checkpoint / name or not known.is_current():
                with Archive.opening(checkpoint / name) as known:
                    size = known.record(PICKLE).size
                    parsed.enter_context(parsing(size))
                    if size <= KEPT_SCANS:
                        known.scan(keep=True)
                self._scanned = known
            yield known

    def pointer_files(self, run: Path) -> list[Path]:
        """`latest`, or `latest_universal` in a run of universal copies alone; Megatron's tracker in
        a run that has one."""
        latest, copied, tracker = run / LATEST, run / universal.POINTER, run / TRACKER
        alone = not disk.exists(latest) and disk.exists(copied)
        return [copied if alone else latest, *([tracker] if disk.exists(tracker) else [])]

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """Those files, and `latest_universal` where the step has such a copy. No final newline."""
        files, copy = self.pointer_files(run), universal.folder(run, step)
        latest, copied, tracker = run / LATEST, run / universal.POINTER, run / TRACKER
        texts: dict[Path, str | Path] = {}
        if latest in files:
            texts[latest] = f"global_step{step}"
        if copied in files or (disk.exists(copied) and universal.complete(copy)):
            texts[copied] = copy.name
        if tracker in files:
            texts[tracker] = str(step)
        return texts

    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """`latest_universal` where the step has no such copy; and what lies beside one of several
        engines."""
        copied, beside = run / universal.POINTER, list(openrlhf.beside(run, step))
        if not disk.exists(copied) or copied in self.pointers(run, step):
            return beside
        return [
            *beside,
            f"{copied.name} is not changed: step {step} has no universal copy, so relaunch without "
            "load_universal (--universal-checkpoint)",
        ]

    def hazards(self, run: Path) -> list[Hazard]:
        """A pointer to a universal copy."""
        return [universal.HAZARD] if disk.exists(run / universal.POINTER) else []

    def pointed(self, pointer: Path) -> int | None:
        """The step in `global_step<N>` or `<N>`; None for a missing file or any other text."""
        named = (text(pointer) or "").strip()
        match = re.fullmatch(r"(?:global_step)?(\d{1,18})(?:_universal)?", named)
        return int(match[1]) if match else None

    def advise(self, key: str, value: object) -> str:
        """Megatron-DeepSpeed's flag, and what a script on DeepSpeed alone has in its place.
        `--clip-grad` decides nothing under `--deepspeed`."""
        if key == "clip_grad":
            return f'relaunch with "gradient_clipping": {value} in the DeepSpeed config'
        alone = {
            "rampup": "the batches in the training script: DeepSpeed's config has no ramp-up",
            "seed": "the seed in the training script: DeepSpeed's config has none",
            "batch_size": f'"train_batch_size": {value} in the DeepSpeed config, and what its '
            f"scheduler counts in steps to that × the old size / {value}",
        }.get(key)
        if alone is None:
            return super().advise(key, value)
        return (
            f"relaunch Megatron-DeepSpeed with {self.options[key]} {value}; of others, set {alone}"
        )

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> Hint:
        """BigScience's flag takes one micro-batch of the data for each iteration of a range, and
        moves no counter; DeepSpeed's fork has none, and DeepSpeed alone loads no data."""
        words = " ".join(f"{first}-{last}" for first, last in ranges)
        wide = " ".join(f"{a}-({a - 1} + {b - a + 1} × G)" for a, b in ranges)
        return (
            f"relaunch BigScience's Megatron-DeepSpeed with --skip-train-iteration-range {words}; "
            f"where an iteration has G micro-batches, {wide}: no checkpoint counts what it skips; "
            "of others, skip the batches in the training script: DeepSpeed's config has no such "
            "key"
        )

    def advise_rewarm(
        self, state: State, kind: str, until: str, iterations: int
    ) -> tuple[Hint, ...]:
        """Two rates of 0 where there is Megatron's scheduler; see `flags`."""
        if state.schedule is None:
            return super().advise_rewarm(state, kind, until, iterations)
        return flags.rewarm(state, kind, until, iterations)

    def launch_flags(self, run: Path, checkpoint: Checkpoint) -> list[str]:
        """Of a run of Megatron-DeepSpeed; DeepSpeed alone takes none, nor does the bundled
        trainer."""
        if not isinstance(checkpoint, DeepSpeedCheckpoint) or checkpoint.bundled:
            return []
        if checkpoint.state().schedule is None:
            return []
        return flags.launch(run, checkpoint.state(), checkpoint.args())

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> DeepSpeedCheckpoint:
        """Read every model and optimizer shard's tree (layer files hold weights only)."""
        checkpoint = self.directory(run, step)
        names = sorted(_names(checkpoint))
        files = [
            checkpoint / n for n in names if any(p.fullmatch(n) for p in (MODEL, OPTIM, EXPERTS))
        ]
        copy = universal.folder(run, step)
        if universal.complete(copy):
            if copy != checkpoint:
                files += [copy / n for n in sorted(_names(copy)) if MODEL.fullmatch(n)]
            files += universal.shards(copy)
        files = [path for path in files if path not in without]
        known = None
        if not without:
            with self._first(checkpoint, names) as known:
                pass
        return DeepSpeedCheckpoint(checkpoint, step, *read_shards(files, known))


def _expected(first: Archive, names: Collection[str]) -> list[str]:
    """The shards of all ranks, by the world sizes that the first model file states."""
    with understood(first.path):
        tree = first.tree()
        dp, mp = (tree.get(key, 1) for key in WORLDS)
    for key, size in zip(WORLDS, (dp, mp), strict=True):
        if problem("ranks", size):
            raise not_understood(first.path, (key,), size, RANKS)
    if problem("ranks", dp * mp):
        raise not_understood(first.path, ("dp_world_size × mp_world_size",), dp * mp, RANKS)
    sharded = "zero_pp_rank_" in first.path.name
    expected = [
        f"{f'zero_pp_rank_{d}_' if sharded else ''}mp_rank_{m:02d}_model_states.pt"
        for m in range(mp)
        for d in range(dp if sharded else 1)
    ]
    if tree.get("optimizer") is None:
        dtype = next((m["dtype"] or "" for n in sorted(names) if (m := OPTIM.fullmatch(n))), "")
        expected += [
            f"{dtype}zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt"
            for m in range(mp)
            for d in range(dp)
        ]
    return expected if sharded else [*expected, *_experts(tree, names, mp)]


def _experts(tree: Any, names: Collection[str], ranks: int) -> list[str]:
    """What a model with experts has more: weights of each expert of each layer (`num_experts`), and
    without ZeRO one optimizer for each expert-parallel rank, as many as the others show."""
    layers = tree.get("num_experts")
    if not isinstance(layers, (list, tuple)) or not layers or not all(map(is_count, layers)):
        return []
    if sum(layers) > MAX_RANKS:
        return []
    expected = [
        f"layer_{layer}_expert_{expert}_mp_rank_{m:02d}_model_states.pt"
        for layer, count in enumerate(layers)
        for expert in range(count)
        for m in range(ranks)
    ]
    if tree.get("optimizer") is not None:
        numbers = [int(match["ep"]) for name in names if (match := EXPERTS.fullmatch(name))]
        expected += [
            f"expp_rank_{e}_mp_rank_{m:02d}_optim_states.pt"
            for e in range(min(max(numbers, default=0), MAX_RANKS) + 1)
            for m in range(ranks)
        ]
    return expected


def _names(checkpoint: Path) -> set[str]:
    try:
        with os.scandir(checkpoint) as entries:
            return {entry.name for entry in entries if entry.name.endswith(".pt")}
    except (FileNotFoundError, NotADirectoryError):
        return set()
