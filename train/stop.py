"""What ends a run before train_iters: a signal of the scheduler, or the kill-switch file."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from . import distributed

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What SLURM sends before it takes the nodes away: SIGTERM, or what --signal names."""
KILL_SWITCH = 1
"""No number of SIGNALS, and below them: a signal is the better reason to tell."""


class StopRequest:
    """Whether the run should stop, the same answer on every rank.

    A signal to any rank counts for all of them: the iteration is finished and saved first. More of
    them change nothing, since a launcher may pass on what its ranks have got already. The file is
    looked for by rank 0 alone.
    """

    def __init__(self, kill_switch_path: str | None, device: Any) -> None:
        self._kill_switch = None if kill_switch_path is None else Path(kill_switch_path)
        self._device = device
        self._received = 0

    def listen(self) -> None:
        """From now on a signal asks instead of ending the process."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def agreed(self) -> str | None:
        """Why all ranks stop now, or None. Every rank must call it at the same point."""
        asked = self._received
        if not asked and distributed.rank() == 0 and self._kill_switch is not None:
            asked = KILL_SWITCH if self._kill_switch.exists() else 0
        answer = torch.tensor(asked, device=self._device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        if not answer:
            return None
        if answer == KILL_SWITCH:
            return f"kill switch {self._kill_switch} is there"
        return f"{signal.Signals(int(answer)).name} received"

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = number
