"""`transplant` of a ZeRO-1 step into two data ranks, and into two tensor ranks that cut each matrix
along axis 1: against `cp` of the same bytes, against DeepSpeed's own `ds_to_universal`, and against
a script that loads both steps, copies by name and saves.

Each is a process of its own, with the source dropped from the page cache before it. As a script, it
builds the runs, converts the source or goes by state dicts:
python -m bench.transplant build|universal|dicts|ranks|spread ROOT [SIZE [RANKS]]

Then a step of 10,000 small ZeRO-1 shards becomes one of 8,000, and one of a tenth of both: what a
shard costs must not grow with their number.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.process import forget, python
from bench.row import Row, ratio

STEP, TIMES = 95000, 3
TENSORS, ROWS = 16, 4096
MEMORY = 500
"""MB that a transplant may take at any size."""
SHARDS = 15
"""Times the CPU time of a tenth of the shards that a transplant may take."""
RECEIPT = 2
"""kB that a shard may add to the receipt."""
TARGETS = {"data": 0.8, "tensor": 0.5}


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """With 1 GiB of optimizer; an eighth of it, once, when `quick`."""
    root, gib = folder / "transplant", 0.125 if quick else 1.0
    if shutil.disk_usage(folder).free < (8 * gib + 1) * 2**30:
        say(f"transplant: skipped: {8 * gib + 1:g} GiB of free space are needed")
        return []
    python("bench.transplant", "build", root, gib)
    source = sorted((root / "source").glob("global_step*/*.pt"))
    size = sum(file.stat().st_size for file in source)
    copied: list[float] = []
    ours: dict[str, list[float]] = {name: [] for name in TARGETS}
    peaks, receipts = [], []
    for _ in range(1 if quick else TIMES):
        copied.append(_copied(source, root / "copy"))
        for name, seconds in ours.items():
            run = root / name
            forget(source)
            words = ("transplant", "--from", root / "source", "--yes", "--quiet", "-C", run)
            done = python("ckptsurgeon", *words)
            seconds.append(done.seconds)
            peaks.append(done.peak_mb)
            (receipt,) = run.glob(".ckptsurgeon/receipts/0*/receipt.json")
            receipts.append(receipt.stat().st_size)
            shutil.rmtree(run)
            shutil.copytree(root / f"{name}-kept", run)
    forget(source)
    universal = python("bench.transplant", "universal", root / "source")
    forget(source)
    dicts = python("bench.transplant", "dicts", root)
    shutil.rmtree(root)
    once = statistics.median(copied)
    medians = {name: statistics.median(seconds) for name, seconds in ours.items()}
    shares = [
        Row(f"transplant into two {name} ranks: share of the speed of cp", once / taken, "×",
            TARGETS[name], at_least=True,
            note=f"{taken:.2f} s as typed for {size / 2**30:.2g} GiB; cp, fsync: {once:.2f} s")
        for name, taken in medians.items()
    ]  # fmt: skip
    return [
        *shares,
        *_many(folder / "transplant-ranks", 50 if quick else 1000),
        Row("transplant: largest memory", max(peaks), "MB", MEMORY),
        Row("transplant: largest receipt", max(receipts) / 1000, "kB"),
        ratio("transplant: ds_to_universal / ours", universal.seconds / medians["data"],
              note=f"{universal.seconds:.1f} s and {universal.peak_mb:,.0f} MB, as typed"),
        ratio("transplant: load, state_dict, save / ours", dicts.seconds / medians["data"],
              note=f"{dicts.seconds:.1f} s and {dicts.peak_mb:,.0f} MB, torch's import too"),
    ]  # fmt: skip


def _many(root: Path, few: int) -> list[Row]:
    """Of so many shards, and of ten times as many."""
    done = []
    for count in (few, 10 * few):
        python("bench.transplant", "ranks", root, count)
        words = ("transplant", "--from", root / "source", "--yes", "--quiet", "-C", root / "run")
        done.append(python("ckptsurgeon", *words))
        (receipt,) = root.glob("run/.ckptsurgeon/receipts/0*/receipt.json")
        size = receipt.stat().st_size
        shutil.rmtree(root)
    small, large = done
    what = f"transplant of {10 * few:,} shards"
    return [
        Row(f"{what}: CPU time of one of a tenth as many", large.cpu / small.cpu, "×", SHARDS,
            note=f"{large.cpu:.1f} s, and {large.seconds:.1f} s as typed"),
        Row(f"{what}: memory", large.peak_mb, "MB", MEMORY, note=f"{small.peak_mb:.0f} MB a tenth"),
        Row(f"{what}: receipt", size / few / 10_000, "kB", RECEIPT, note="a shard"),
    ]  # fmt: skip


def _copied(files: list[Path], to: Path) -> float:
    """Seconds to copy all of them, and to have them on the disk."""
    forget(files)
    to.mkdir()
    began = time.perf_counter()
    subprocess.run(["cp", *files, to], check=True)
    subprocess.run(["sync", *(to / file.name for file in files)], check=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(to)
    return seconds


# --- the runs ------------------------------------------------------------------------------------


def build(root: Path, gib: float) -> None:
    """The source, and one step of each fresh run, kept twice."""
    columns = int(gib * 2**30) // 12 // TENSORS // ROWS // 2 * 2
    _step(root / "source", STEP, columns, data=1, tensor=1)
    for name, ranks in (("data", (2, 1)), ("tensor", (1, 2))):
        _step(root / name, 1, columns, *ranks)
        shutil.copytree(root / name, root / f"{name}-kept")


def spread(root: Path, gib: float, ranks: int) -> None:
    """A source of so much optimizer and weights on so many data ranks, and in `run` one step on
    half as many, which is all holes."""
    columns = int(gib * 2**30) // 14 // TENSORS // ROWS // 2 * 2
    _step(root / "source", STEP, columns, data=ranks, tensor=1)
    _step(root / "run", 1, columns, data=ranks // 2, tensor=1, hollow=True)


def _step(
    root: Path, step: int, columns: int, data: int, tensor: int, *, hollow: bool = False
) -> None:
    """Named fp32 masters and both moments over all ranks, and the bf16 weights."""
    import torch
    from deepspeed.utils.tensor_fragment import fragment_address

    from bench.layout import model_states, optimizer_shard, save_hollow

    save, make = (
        (partial(save_hollow, step=step), torch.empty) if hollow else (torch.save, torch.rand)
    )
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    width = columns // tensor
    count = ROWS * width
    names = [f"layers.{i}.dense.weight" for i in range(TENSORS)]
    share = count * TENSORS // data
    for rank in range(tensor):
        for part in range(data):
            mine = names[part * TENSORS // data : (part + 1) * TENSORS // data]
            mapping = {
                name: fragment_address(numel=count, start=i * count) for i, name in enumerate(mine)
            }
            shard = optimizer_shard([(share, make)], [mapping])
            outer = shard["optimizer_state_dict"]
            outer["partition_count"] = [data]
            outer["base_optimizer_state"]["state"][0]["step"] = torch.tensor(float(step))
            file = f"bf16_zero_pp_rank_{part}_mp_rank_{rank:02d}_optim_states.pt"
            save(shard, folder / file)
        states = model_states(step, data, tensor)
        states["param_shapes"] = [{name: torch.Size((ROWS, width)) for name in names}]
        states["checkpoint_parallel_dimensions"] = {"tp_degree": tensor, "pp_degree": 1}
        states["module"] = {name: make(ROWS, width, dtype=torch.bfloat16) for name in names}
        save(states, folder / f"mp_rank_{rank:02d}_model_states.pt")
    (root / "latest").write_text(f"global_step{step}")


def ranks(root: Path, count: int) -> None:
    """The source, on so many data ranks, and one step of a fresh run on four fifths as many: each
    has a piece of one of a few parameters."""
    import torch
    from deepspeed.utils.tensor_fragment import fragment_address

    from bench.layout import model_states, optimizer_shard

    tensors, whole = 5, count * 64
    for name, step, data in (("source", STEP, count), ("run", 1, count * 4 // 5)):
        folder = root / name / f"global_step{step}"
        folder.mkdir(parents=True)
        share = whole // data
        for rank in range(data):
            mine = {f"layers.{rank * tensors // data}.dense.weight": fragment_address(share, 0)}
            shard = optimizer_shard([(share, torch.rand)], [mine], step)
            shard["optimizer_state_dict"]["partition_count"] = [data]
            torch.save(shard, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        states = model_states(step, data, 1)
        names = [f"layers.{i}.dense.weight" for i in range(tensors)]
        states["param_shapes"] = [{n: torch.Size((whole // tensors // 64, 64)) for n in names}]
        states["checkpoint_parallel_dimensions"] = {"tp_degree": 1, "pp_degree": 1}
        states["module"] = {
            name: torch.rand(whole // tensors // 64, 64, dtype=torch.bfloat16) for name in names
        }
        torch.save(states, folder / "mp_rank_00_model_states.pt")
        (root / name / "latest").write_text(f"global_step{step}")


def universal(root: Path) -> None:
    """The converter of DeepSpeed on the same step, with one process, which is its fastest here."""
    from deepspeed.checkpoint import ds_to_universal

    folder = root / f"global_step{STEP}"
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder), output_folder=f"{folder}_universal", num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def dicts(root: Path) -> None:
    """By hand, into the two data ranks: both steps are loaded, what has the same name is copied,
    and the files are saved and synced."""
    import torch

    (model,) = (root / "source" / f"global_step{STEP}").glob("mp_rank_*")
    (shard,) = (root / "source" / f"global_step{STEP}").glob("*optim_states.pt")
    weights, whole = (torch.load(file, weights_only=False) for file in (model, shard))
    known = {name: pieces for name, *pieces in _named(whole)}
    for file in (root / "data").glob("global_step*/*.pt"):
        state = torch.load(file, weights_only=False)
        if "module" in state:
            state["module"] = weights["module"]
        else:
            for name, *pieces in _named(state):
                for mine, its in zip(pieces, known[name], strict=True):
                    mine.copy_(its)
        torch.save(state, file)
        subprocess.run(["sync", file], check=True)


def _named(shard: Any) -> Iterator[tuple[Any, ...]]:
    """Each name of an optimizer shard with its pieces of master and moments."""
    outer = shard["optimizer_state_dict"]
    state = outer["base_optimizer_state"]["state"][0]
    flats = outer["single_partition_of_fp32_groups"][0], state["exp_avg"], state["exp_avg_sq"]
    for name, at in outer["param_slice_mappings"][0].items():
        yield (name, *(flat[at.start : at.start + at.numel] for flat in flats))


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1] == "dicts":
        dicts(Path(sys.argv[2]))
    elif sys.argv[1] == "spread":
        spread(Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "ranks":
        ranks(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        universal(Path(sys.argv[2]))
