"""One setting of the param groups that a trainer makes itself at each start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ckptsurgeon.plans.frozen import frozen

KEYS = {"of", "instead"}


@frozen
class MadeAnew:
    """What to do in the trainer `instead` of editing a checkpoint. It makes the setting so in the
    param groups that have all of `of`, in every one where that is empty."""

    instead: str
    of: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, value: Any) -> MadeAnew | None:
        """As a page has it: the sentence, or a mapping of it and of what the groups have. None for
        what is neither."""
        if not isinstance(value, Mapping):
            return cls(str(value))
        of = value.get("of")
        if set(value) != KEYS or not isinstance(of, Mapping) or not of:
            return None
        return cls(str(value["instead"]), {str(key): item for key, item in of.items()})

    def takes(self, held: Callable[[str], Any]) -> bool:
        """Whether it is of the group that has `held(key)` under each key."""
        return all(held(key) == item for key, item in self.of.items())

    @property
    def groups(self) -> str:
        """Which groups, in words: `kind muon`."""
        return ", ".join(f"{key} {item}" for key, item in self.of.items())
