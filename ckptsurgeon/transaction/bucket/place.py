"""The bucket that a run lies in: which object each name of an edit stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.remote import reads
from ckptsurgeon.remote.mirror import Mirror
from ckptsurgeon.remote.store import CONNECTIONS
from ckptsurgeon.remote.writes import Head, Writes

T = TypeVar("T")


@frozen
class Place:
    """The run at `root` in the mirror, and who writes to its objects."""

    root: Path
    mirror: Mirror
    writes: Writes

    @classmethod
    def of(cls, root: Path) -> Place | None:
        """None for a run on a disk."""
        mirror = reads.current()
        return cls(root, mirror, Writes(mirror.store)) if isinstance(mirror, Mirror) else None

    def key(self, name: str) -> str:
        """The key of what a plan calls so."""
        return self.mirror.key(self.root / name)

    def head(self, name: str) -> Head | None:
        """What the store says of it now."""
        return self.writes.head(self.key(name))

    def delete(self, names: Iterable[str]) -> None:
        """No object has these names any more."""
        at_once(lambda name: self.writes.delete(self.key(name)), names)

    def below(self, name: str) -> list[str]:
        """The keys below a folder, folder markers included."""
        return [item.key for item in self.mirror.store.list(f"{self.key(name)}/")]


def at_once(call: Callable[[T], object], items: Iterable[T]) -> None:
    """Call for each, so many at once as there are connections; the first error is raised once all
    that had begun are over."""
    items = list(items)
    if not items:
        return
    with ThreadPoolExecutor(min(CONNECTIONS, len(items))) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
