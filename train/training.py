"""What one process holds of a run while it trains."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from .activation_norm import ActivationNorm
from .blend import BlendedStream
from .config import Config
from .course import Course
from .data import SampleStream
from .grid import Grid
from .loader import Loader
from .microbatches import BatchSizes
from .progress import Progress
from .step import Step


@dataclass
class Training:
    """One process's part of a run, ready for the iteration after `progress`."""

    config: Config
    grid: Grid
    engine: Any
    step: Step
    activations: ActivationNorm
    device: Any
    stream: SampleStream | BlendedStream
    loader: Loader
    held_out: SampleStream | BlendedStream
    sizes: BatchSizes
    progress: Progress
    course: Course
    flops_per_token: int
    parameters: int
    saved_args: argparse.Namespace | None = None

    def length(self) -> int:
        """The tokens of each sample in the next iteration."""
        return self.course.length(self.progress.iteration + 1, self.config.seq_length)
