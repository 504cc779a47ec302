"""What the workers of a cluster did, and which of their nodes is the slowest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import shell
from ckptsurgeon.report.style import size
from ckptsurgeon.version import VERSION
from ckptsurgeon.workers import host


class Done(NamedTuple):
    """A job that was done: where, by which worker, in how many seconds, and of how many bytes, as
    far as the job says that."""

    host: str
    worker: str
    seconds: float
    size: int
    result: Any


@dataclass(frozen=True)
class Measured:
    """A function that is called on a worker, with how long that took. Raises SurgeryError on one
    that has another version of this package: it may have come since the others were asked."""

    function: Callable[..., Any]
    version: str

    def __call__(self, *job: Any) -> Done:
        if self.version != VERSION:
            raise SurgeryError(
                f"a worker on {host()} has {VERSION}; ckptsurgeon is {self.version} here",
                next=shell(["pip", "install", f"ckptsurgeon=={self.version}"], why="on its host"),
            )
        began = time.monotonic()
        result = self.function(*job)
        took = time.monotonic() - began
        return Done(host(), _worker(), took, sum(getattr(each, "size", 0) for each in job), result)


def _worker() -> str:
    from distributed import get_worker

    return str(get_worker().address)


@dataclass
class _Node:
    seconds: float = 0.0
    size: int = 0
    jobs: int = 0


@dataclass
class Tally:
    """What is known of the jobs of a command."""

    seconds: float = 0.0
    workers: set[str] = field(default_factory=set)
    nodes: dict[str, _Node] = field(default_factory=lambda: defaultdict(_Node))

    def add(self, done: Done) -> None:
        """One job more."""
        self.workers.add(done.worker)
        node = self.nodes[done.host]
        node.seconds += done.seconds
        node.size += done.size
        node.jobs += 1

    @property
    def jobs(self) -> int:
        """How many were done."""
        return sum(node.jobs for node in self.nodes.values())

    def who(self) -> str:
        """How many workers have done a job; empty before the first has."""
        if not self.workers:
            return ""
        return f"{_count(len(self.workers), 'worker')} on {_count(len(self.nodes), 'node')}"

    def told(self) -> str:
        """The same as its text; empty before a job is done."""
        return str(self) if self.workers else ""

    def __str__(self) -> str:
        """One line: who did how much, how fast, and the node whose workers took longest for it."""
        total = sum(node.size for node in self.nodes.values())
        parts = [self.who(), _count(self.jobs, "job")]
        if total and self.seconds:
            parts += [f"{size(total)}, {size(int(total / self.seconds))}/s"]
        if len(self.nodes) > 1:
            parts += [self._slowest(total)]
        return " · ".join(parts)

    def _slowest(self, total: int) -> str:
        def cost(node: _Node) -> float:
            return node.seconds / max(1, node.size if total else node.jobs)

        name = max(self.nodes, key=lambda name: cost(self.nodes[name]))
        rest = [cost(node) for other, node in self.nodes.items() if other != name]
        times = cost(self.nodes[name]) * len(rest) / max(sum(rest), 1e-12)
        return f"slowest {name}: {times:.1f} times as long for {'a byte' if total else 'a job'}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
