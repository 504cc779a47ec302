"""What can't be done with each parameter: raised at once, or kept for a map of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckptsurgeon.errors import SurgeryError


class Refusals:
    """`by_name` has what was refused of each parameter, under "" what is refused of the whole step.
    It stays empty where refusals are not `kept`: the first one is raised then."""

    def __init__(self, kept: bool = False) -> None:
        self._kept = kept
        self.by_name: dict[str, list[SurgeryError]] = {}

    @contextmanager
    def of(self, name: str = "") -> Iterator[None]:
        """What is refused inside is refused of this parameter; it goes on behind the block."""
        try:
            yield
        except SurgeryError as why:
            if not self._kept:
                raise
            known = self.by_name.setdefault(name, [])
            if why.what not in [each.what for each in known]:
                known.append(why)
