"""`average` of three steps of a ZeRO-1 run, with their moments: against reading their shards once,
and against torch.load + mean + torch.save; and what else computes new bytes, against reading the
shards of the step that is edited.

Each is a process of its own, with the shards dropped from the page cache before it. As a script, it
builds the run or takes the average with torch: python -m bench.average build|torch ROOT [GIB]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.process import forget, python
from bench.row import Row, ratio

STEPS = (90000, 92500, 95000)
OTHERS = {
    "scale": ("scale", "layers", "--by", 0.9),
    "graft": ("graft", "moments", "--from", STEPS[0]),
    "clip_moments": ("clip-moments", "--above", 1.5),
}
TENSORS = 16
TIMES = 3
MEMORY = 256
"""MB that all slices may take, beside what the interpreter and numpy take."""


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """With 1 GiB of optimizer in each step; an eighth of it, once, when `quick`."""
    root, gib = folder / "average", 0.125 if quick else 1.0
    if shutil.disk_usage(folder).free < (6 * gib + 1) * 2**30:
        say(f"average: skipped: {6 * gib + 1:g} GiB of free space are needed")
        return []
    python("bench.average", "build", root, gib)
    shards = sorted(root.glob("global_step*/*.pt"))
    ours, read, theirs, peaks = [], [], [], []
    for _ in range(1 if quick else TIMES):
        read.append(_read(shards))
        forget(shards)
        words = ("average", *STEPS, "--moments", "average", "--yes", "--quiet", "-C", root)
        done = python("ckptsurgeon", *words)
        ours.append(done.seconds)
        peaks.append(done.peak_mb)
        undo(root)
        forget(shards)
        theirs.append(float(python("bench.average", "torch", root).answer["seconds"]))
    others = [_other(name, words, root, 1 if quick else TIMES) for name, words in OTHERS.items()]
    small = python("-c", "import ckptsurgeon.__main__, numpy").peak_mb
    shutil.rmtree(root)
    mine, once = statistics.median(ours), statistics.median(read)
    size = f"{3 * gib:g} GiB"
    note = f"{mine:.2f} s as typed; all shards read once: {once:.2f} s"
    torch_note = f"{statistics.median(theirs):.2f} s in torch, imports not counted"
    return [
        Row(f"average of 3 steps, {size}: share of the reading speed", once / mine, "×", 0.5,
            at_least=True, note=note),
        ratio("average: torch.load, mean, torch.save / ours", statistics.median(theirs) / mine,
              note=torch_note),
        Row("average: memory beside the interpreter and numpy", max(peaks) - small, "MB", MEMORY),
        *others,
    ]  # fmt: skip


def undo(root: Path) -> None:
    """And remove what the surgery and its undo have moved aside, as much as the step each time."""
    python("ckptsurgeon", "undo", "--yes", "--quiet", "-C", root)
    python("ckptsurgeon", "prune", "--keep", 0, "--yes", "--quiet", "--run", root)


def _other(name: str, words: tuple[object, ...], root: Path, times: int) -> Row:
    """The share of the reading speed that another command reaches, on the last step."""
    shards = sorted((root / f"global_step{STEPS[-1]}").glob("*.pt"))
    read, ours = [], []
    for _ in range(times):
        read.append(_read(shards))
        forget(sorted(root.glob("global_step*/*.pt")))
        done = python("ckptsurgeon", *words, "--yes", "--quiet", "-C", root)
        ours.append(done.seconds)
        undo(root)
    mine, once = statistics.median(ours), statistics.median(read)
    note = f"{mine:.2f} s as typed; the step's shards read once: {once:.2f} s"
    return Row(f"{name}: share of the reading speed of the step", once / mine, "×", note=note)


def _read(files: list[Path]) -> float:
    """Seconds to read all of them once, from the disk."""
    forget(files)
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(8 << 20):
                pass
    return time.perf_counter() - began


def build(root: Path, gib: float) -> None:
    """Three steps: named fp32 masters and both moments, and the bf16 weights."""
    for step in STEPS:
        _build(root / f"global_step{step}", step, int(gib * 2**30) // 12 // TENSORS)
    (root / "latest").write_text(f"global_step{STEPS[-1]}")


def _build(folder: Path, step: int, count: int) -> None:
    """One of them, of tensors of `count` elements. Nothing of it stays in memory."""
    import torch
    from deepspeed.utils.tensor_fragment import fragment_address

    from bench.layout import model_states, optimizer_shard

    folder.mkdir(parents=True)
    mapping = {
        f"layers.{i}.weight": fragment_address(numel=count, start=i * count) for i in range(TENSORS)
    }
    shard = optimizer_shard([(count * TENSORS, torch.rand)], [mapping])
    outer = shard["optimizer_state_dict"]
    outer["partition_count"] = [1]
    outer["base_optimizer_state"]["state"][0]["step"] = torch.tensor(float(step))
    torch.save(shard, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    flat = outer["single_partition_of_fp32_groups"][0]
    states = model_states(step, 1, 1)
    states["param_shapes"] = [{name: torch.Size((count,)) for name in mapping}]
    states["module"] = {
        name: flat[at.start : at.start + count].bfloat16() for name, at in mapping.items()
    }
    torch.save(states, folder / "mp_rank_00_model_states.pt")


def by_torch(root: Path) -> None:
    """The same with torch.load, a mean, and torch.save beside the last step's shards."""
    import deepspeed.utils.tensor_fragment  # noqa: F401  # what the shards name
    import torch

    began = time.perf_counter()
    folders = [root / f"global_step{step}" for step in STEPS]
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shards = [torch.load(folder / name, weights_only=False) for folder in folders]
    outers = [shard["optimizer_state_dict"] for shard in shards]
    key = "single_partition_of_fp32_groups"
    flats = [outer[key][0] for outer in outers]
    states = [outer["base_optimizer_state"]["state"][0] for outer in outers]
    outers[-1][key][0] = torch.stack(flats).mean(0)
    for moment in ("exp_avg", "exp_avg_sq"):
        states[-1][moment] = torch.stack([state[moment] for state in states]).mean(0)
    model = torch.load(folders[-1] / "mp_rank_00_model_states.pt", weights_only=False)
    for parameter, at in outers[-1]["param_slice_mappings"][0].items():
        part = outers[-1][key][0][at.start : at.start + at.numel]
        model["module"][parameter].copy_(part)
    for file, state in ((name, shards[-1]), ("mp_rank_00_model_states.pt", model)):
        new = root / f"{file}.new"
        torch.save(state, new)
        with new.open("rb") as opened:
            os.fsync(opened.fileno())
        new.unlink()
    print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        by_torch(Path(sys.argv[2]))
