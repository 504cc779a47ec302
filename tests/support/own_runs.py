"""Runs of a trainer of somebody's own, which a page describes, and the table that it logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

BEGAN = 1.7e9
"""When the first update began."""


def saved(
    root: Path,
    steps: Mapping[int, int],
    page: str,
    *,
    adam: bool = True,
    times: Mapping[int, float] | None = None,
    logged: Callable[[int], int] = int,
) -> None:
    """Each step, with its updates in the optimizer and beside it, what a log counts of them, and
    when it was saved."""
    root.mkdir(parents=True)
    (root / "own.yaml").write_text(page)
    (root / "ckptsurgeon.yaml").write_text("format: own.yaml\n")
    layer = torch.nn.Linear(2, 2)
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(layer.parameters(), lr=1e-3)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for number, updates in steps.items():
        for state in optimizer.state.values():
            state["step"].fill_(updates)
        path = root / f"ckpt-{number}.pt"
        held = {"optimizer": optimizer.state_dict(), "updates": updates, "logged": logged(updates)}
        torch.save(held, path)
        os.utime(path, ((times or {}).get(number, BEGAN + updates),) * 2)


def left(log: Path) -> list[int]:
    """The numbers that are still there."""
    return [int(line.partition(",")[0]) for line in log.read_text().splitlines()[1:]]
