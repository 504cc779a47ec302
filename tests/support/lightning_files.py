"""Files as Lightning saves them, without it."""

from __future__ import annotations

from pathlib import Path

import torch


def lightning(folder: Path, step: int, weight: torch.Tensor) -> None:
    """What Lightning saves of one AdamW."""
    model = torch.nn.Linear(4, 4)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    folder.mkdir(parents=True, exist_ok=True)
    saved = {
        "pytorch-lightning_version": "2.6.0", "global_step": step, "epoch": 0, "callbacks": {},
        "loops": {}, "lr_schedulers": [], "optimizer_states": [adam.state_dict()],
        "state_dict": {"weight": weight},
    }  # fmt: skip
    for name in (f"epoch=0-step={step}.ckpt", "last.ckpt"):
        torch.save(saved, folder / name)
