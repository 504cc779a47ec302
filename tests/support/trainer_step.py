"""A step of Hugging Face's Trainer with the states that torch's own classes give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_step(
    folder: Path, optimizer: dict[str, Any], scheduler: dict[str, Any], step: int
) -> None:
    """The files that it needs to be whole, in a new folder."""
    folder.mkdir(parents=True)
    torch.save(optimizer, folder / "optimizer.pt")
    torch.save(scheduler, folder / "scheduler.pt")
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text(f'{{"global_step": {step}, "log_history": []}}')
