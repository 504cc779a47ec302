"""Seeded faults in the vital signs are caught, each as docs/vitals.md says."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run
from ckptsurgeon.look.vitals.vitals import examine
from tests.conftest import Trained
from tests.look.conftest import EARLIER, LAST, facts
from tests.support.torch_files import load_shard

OPTIM = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
DOCUMENT = Path(__file__).parents[2] / "docs" / "vitals.md"


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    held = load_shard(path)
    change(held)
    torch.save(held, path)


def state(held: dict[str, Any], group: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = held["optimizer_state_dict"]["base_optimizer_state"]["state"][group]
    return found


def masters(held: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = held["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    return found


def earlier(root: Path) -> dict[str, Any]:
    return load_shard(root / f"global_step{EARLIER}" / OPTIM)


def zero(kind: str, part: float) -> Callable[[Path], None]:
    """A part of one moment is zeros, as a write that was cut off leaves it."""

    def change(root: Path) -> None:
        def inside(held: dict[str, Any]) -> None:
            for group in (0, 1):
                tensor = state(held, group)[kind]
                tensor[int(tensor.numel() * (1 - part)) :] = 0

        edit(root / f"global_step{LAST}" / OPTIM, inside)

    return change


def of_earlier(*kinds: str) -> Callable[[Path], None]:
    """Moments of an earlier step; Adam's step is the later one's."""

    def change(root: Path) -> None:
        old = earlier(root)

        def inside(held: dict[str, Any]) -> None:
            for group in (0, 1):
                state(held, group).update({kind: state(old, group)[kind] for kind in kinds})

        edit(root / f"global_step{LAST}" / OPTIM, inside)

    return change


def half_the_gradients(root: Path) -> None:
    """exp_avg_sq of a run whose gradients were half as large."""

    def inside(held: dict[str, Any]) -> None:
        for group in (0, 1):
            state(held, group)["exp_avg_sq"] /= 4

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def step_lost(root: Path) -> None:
    """The counter began anew an update ago, the moments did not."""

    def inside(held: dict[str, Any]) -> None:
        for group in (0, 1):
            state(held, group)["step"] = torch.tensor(1.0)

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def masters_stale(root: Path) -> None:
    old = earlier(root)

    def inside(held: dict[str, Any]) -> None:
        held["optimizer_state_dict"]["single_partition_of_fp32_groups"] = masters(old)

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def weights_stale(root: Path) -> None:
    old = load_shard(root / f"global_step{EARLIER}" / MODEL)
    path = root / f"global_step{LAST}" / MODEL
    edit(path, lambda held: held.update(module=old["module"]))


def saves_equal(root: Path) -> None:
    """Every tensor is that of an earlier step; counters and args go on."""
    old, weights = earlier(root), load_shard(root / f"global_step{EARLIER}" / MODEL)

    def inside(held: dict[str, Any]) -> None:
        held["optimizer_state_dict"]["single_partition_of_fp32_groups"] = masters(old)

    of_earlier("exp_avg", "exp_avg_sq")(root)
    edit(root / f"global_step{LAST}" / OPTIM, inside)
    path = root / f"global_step{LAST}" / MODEL
    edit(path, lambda held: held.update(module=weights["module"]))


def elsewhere(root: Path) -> None:
    """The masters of another start."""

    def inside(held: dict[str, Any]) -> None:
        for tensor in masters(held):
            tensor.data.copy_(torch.randn(tensor.shape).bfloat16().float())

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def rebuilt(root: Path) -> None:
    """The optimizer was made anew six updates before the save, and its step was set as before."""

    def inside(held: dict[str, Any]) -> None:
        for group in (0, 1):
            state(held, group)["exp_avg"] *= 1 - 0.9**6
            state(held, group)["exp_avg_sq"] *= 1 - 0.95**6

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def poisoned(root: Path) -> None:
    edit(
        root / f"global_step{LAST}" / OPTIM,
        lambda held: state(held)["exp_avg"].__setitem__(5, math.nan),
    )


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "exp_avg_sq is all zeros": (zero("exp_avg_sq", 1), ""),
    "exp_avg_sq: the second half was not written": (zero("exp_avg_sq", 0.5), ""),
    "exp_avg: the second half was not written": (zero("exp_avg", 0.5), ""),
    "exp_avg_sq of a run with gradients half as large": (half_the_gradients, ""),
    f"exp_avg of {LAST - EARLIER} steps earlier": (of_earlier("exp_avg"), ""),
    f"both moments of {LAST - EARLIER} steps earlier": (of_earlier("exp_avg", "exp_avg_sq"), ""),
    "Adam's step was lost, the moments were not": (step_lost, ""),
    f"masters of {LAST - EARLIER} steps earlier": (masters_stale, ""),
    f"weights of {LAST - EARLIER} steps earlier": (weights_stale, ""),
    "a NaN": (poisoned, ""),
    "the same, beside the step before": (
        of_earlier("exp_avg", "exp_avg_sq"),
        f"--after {LAST - 1}",
    ),
    f"exp_avg of {LAST - EARLIER} steps earlier, beside the step before": (
        of_earlier("exp_avg"),
        f"--after {LAST - 1}",
    ),
    "masters of another start": (elsewhere, f"--after {LAST - 1}"),
    "all saves are equal": (saves_equal, f"--after {EARLIER}"),
    "the moments were made anew six updates ago": (rebuilt, f"--after {LAST - 1}"),
}
WORDS = {
    "the bound": "no gradients lead beyond",
    "masters": "do not round to the weights",
    "NaN": "NaN or Inf",
    "the counter": "counter moved by",
    "contents": "Adam steps, and",
    "equal saves": "is bit for bit that of",
    "exp_avg_sq fell": "fell faster than",
    "exp_avg": "exp_avg is not what",
    "a weight moved": "a weight moved further",
    "ranks": "disagree",
}


def caught(findings: tuple[str, ...]) -> str:
    """By what, in the words of the table."""
    means = [mean for mean, words in WORDS.items() if any(words in text for text in findings)]
    assert len(means) >= bool(findings), findings
    return ", ".join(means) or "not caught"


def share(root: Path) -> float:
    """Of the elements, those beyond the bound."""
    seen = examine(Run.open(root))
    over = [text.split(": ")[-1] for text in seen.facts if WORDS["the bound"] in text]
    numel = sum(sign.elements for sign in seen.signs if sign.update_rms is not None)
    return sum(int(text.split(" of ")[0]) for text in over) / numel


def observed(root: Path) -> set[tuple[str, str]]:
    return {(item.parameter, item.kind) for item in examine(Run.open(root)).observations}


def ranks_swapped(root: Path, what: tuple[str, ...]) -> None:
    """Two data-parallel ranks have each other's tensors, all or some."""
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    paths = [root / "global_step8" / name for name in names]
    one, other = map(load_shard, paths)
    for group, (a, b) in enumerate(zip(masters(one), masters(other), strict=True)):
        if "masters" in what:
            masters(one)[group], masters(other)[group] = b, a
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind in what:
                mine, its = state(one, group), state(other, group)
                mine[kind], its[kind] = its[kind], mine[kind]
    for path, held in zip(paths, (one, other), strict=True):
        torch.save(held, path)


SWAPS = {
    "whole shards of two ranks are swapped": ("masters", "exp_avg", "exp_avg_sq"),
    "both moments of two ranks are swapped": ("exp_avg", "exp_avg_sq"),
    "exp_avg of two ranks is swapped": ("exp_avg",),
}


def documented(what: str, command: str, found: str, part: float, seen: set[str]) -> None:
    """The row of docs/vitals.md says so; its share is that of one machine, to a factor of two."""
    start = f"| {what} | `verify {command or '--level 4'}` |"
    said = f"{start} {found} | {part:.1g} | {', '.join(sorted(seen)) or 'nothing'} |"
    rows = [r for r in DOCUMENT.read_text("utf-8").splitlines() if r.startswith(start)]
    assert rows, said
    cells = [cell.strip() for cell in rows[0].split("|")[3:6]]
    assert (cells[0], cells[2]) == (found, ", ".join(sorted(seen)) or "nothing"), said
    assert part / 2 <= float(cells[1]) <= part * 2, said


@pytest.mark.thinned(3)
@pytest.mark.parametrize("what", FAULTS)
def test_a_seeded_fault_is_caught_as_the_table_says(
    engines: Path, tmp_path: Path, what: str
) -> None:
    fault, command = FAULTS[what]
    root = tmp_path / "run"
    shutil.copytree(engines, root)
    assert facts(root) == ()
    before = observed(root)
    fault(root)
    against = int(command.split()[-1]) if command else None
    found = facts(root, against=against)
    seen = {kind for _, kind in observed(root) - before}
    documented(what, command, caught(found), share(root), seen)


@pytest.mark.parametrize("what", SWAPS)
def test_swapped_ranks_are_caught_as_the_table_says(trained: Trained, what: str) -> None:
    root = trained(ranks=2)
    assert facts(root) == ()
    before = observed(root)
    ranks_swapped(root, SWAPS[what])
    seen = {kind for _, kind in observed(root) - before}
    documented(what, "", caught(facts(root)), share(root), seen)
