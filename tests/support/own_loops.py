"""Small trainers that make their rates themselves: as nanochat does, and as nanoGPT does.

Both save what the optimizer has, and neither saves a scheduler. Sources: `scripts/base_train.py` of
karpathy/nanochat (`group["lr"] = group["initial_lr"] * lrm`), `train.py` of karpathy/nanoGPT at
3adf61e (`param_group["lr"] = lr`, from its flags)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FORMAT = "torch:ckpt_{step}.pt=optimizer"
PEAK, TOTAL = 1e-2, 40


def by_initial_lr(group: dict[str, Any], step: int) -> float:
    """What nanochat makes of a group: its initial rate, times what the step gives."""
    return float(group["initial_lr"] * (1 - step / TOTAL))


def by_flags(group: dict[str, Any], step: int) -> float:
    """What nanoGPT makes of it: the rate of its flags, whatever the checkpoint holds."""
    return PEAK * (1 - step / TOTAL)


def train(root: Path, rate: Callable[[dict[str, Any], int], float], updates: int) -> list[float]:
    """So many updates from the newest step in `root`, or from none, saved every 2; the rates that
    were used. `log.jsonl` has them, as a run of its own would print them."""
    root.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(5)
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW([{"params": [p], "lr": PEAK} for p in model.parameters()])
    for group, share in zip(adam.param_groups, (1.0, 0.5), strict=True):
        group["initial_lr"] = group["lr"] * share
    saved = sorted(root.glob("ckpt_*.pt"), key=lambda path: int(path.stem[5:]))
    start = 0
    if saved:
        state = torch.load(saved[-1], weights_only=True)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])
        start = state["step"]
    used, lines = [], []
    for step in range(start, start + updates):
        for group in adam.param_groups:
            group["lr"] = rate(group, step)
        used.append(adam.param_groups[0]["lr"])
        lines.append(json.dumps({"step": step + 1, "lr": used[-1]}))
        adam.zero_grad()
        model(torch.rand(3, 4)).pow(2).sum().backward()
        adam.step()
        if (step + 1) % 2 == 0 and not saved:
            state = {"model": model.state_dict(), "optimizer": adam.state_dict(), "step": step + 1}
            torch.save(state, root / f"ckpt_{step + 1}.pt")
    (root / "log.jsonl").write_text("\n".join(lines) + "\n")
    return used


def train_scheduled(
    root: Path, updates: int, *, first: int, late: bool, scheduler: bool = True
) -> None:
    """So many updates under a scheduler of torch from the step in `root`. Only the first call saves
    one, which `own.yaml` describes; a loop without `scheduler` does not load that of it. A line in
    `out.txt` has the number of each update, counted from `first`, and the rate that it used, or
    `late` that of the next one."""
    root.mkdir(exist_ok=True)
    (root / "own.yaml").write_text(
        "name: own\nfiles:\n"
        '  "ckpt_{step}.pt": {optimizers: [[optimizer]], schedulers: [[sched]]}\n'
    )
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=PEAK)
    curve = torch.optim.lr_scheduler.CosineAnnealingLR(adam, TOTAL)
    saved = sorted(root.glob("ckpt_*.pt"))
    if saved:
        state = torch.load(saved[-1], weights_only=True)
        adam.load_state_dict(state["optimizer"])
        if scheduler:
            curve.load_state_dict(state["sched"])
        else:
            adam.param_groups[0]["lr"] = PEAK
    start = int(saved[-1].stem[5:]) if saved else 0
    with (root / "out.txt").open("a") as out:
        for step in range(start, start + updates):
            used = adam.param_groups[0]["lr"]
            model(torch.rand(3, 4)).pow(2).sum().backward()
            adam.step()
            curve.step()
            said = adam.param_groups[0]["lr"] if late else used
            print(f"step {step + first} | loss 3.1 | lr {said:.4e}", file=out)
    if not saved:
        state = {"model": model.state_dict(), "optimizer": adam.state_dict()}
        torch.save({**state, "sched": curve.state_dict()}, root / f"ckpt_{start + updates}.pt")
