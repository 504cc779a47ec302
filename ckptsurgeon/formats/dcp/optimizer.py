"""One optimizer of torch in a folder that torch.distributed.checkpoint wrote, by its names.

It is a flat dict, as torch flattens it: `<prefix>state.<parameter>.exp_avg`,
`<prefix>param_groups.<parameter or number>.lr`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.plans.edits import Key

Paths = list[tuple[Key, ...]]


class Optimizer:
    """The names in `saved` that begin with `prefix`."""

    def __init__(self, saved: Saved, prefix: str) -> None:
        self.saved = saved
        self.prefix = prefix
        self.inside = f"{prefix}state."
        self.groups: dict[str, list[str]] = {}
        """Key of a param group → the name of each value."""
        pattern = re.compile(re.escape(prefix) + r"param_groups\.(.+)\.(\w+)")
        for name in saved.items:
            if match := pattern.fullmatch(name):
                self.groups.setdefault(match[2], []).append(name)

    def has(self, name: str) -> bool:
        """Whether a value of this name is one of this optimizer's."""
        return name.startswith((self.inside, f"{self.prefix}param_groups."))

    def steps(self) -> Iterator[str]:
        """The name of each parameter's step."""
        pattern = re.compile(re.escape(self.inside) + r".+\.step")
        return (name for name in self.saved.items if pattern.fullmatch(name))

    def owner(self, name: str) -> str:
        """What owns the setting `name`: a parameter, or the number of a group."""
        return name.removeprefix(f"{self.prefix}param_groups.").rpartition(".")[0]

    def parameters(self, name: str, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The parameters of the group that has the setting `name`, where groups are saved by their
        numbers; else the one that owns it."""
        owner = self.owner(name)
        params = f"{self.prefix}param_groups.{owner}.params"
        if params not in self.saved.items:
            return (owner,)
        return tuple(str(parameter) for parameter in values[params])

    def states(self) -> dict[str, dict[str, Paths]]:
        """Parameter → key → the path of each value."""
        states: dict[str, dict[str, Paths]] = {}
        for name in self.saved.items:
            if name.startswith(self.inside):
                owner, _, key = name.removeprefix(self.inside).rpartition(".")
                states.setdefault(owner, {})[key] = self.saved.paths(name)
        return states

    def alike(self, states: Mapping[str, Mapping[str, Any]], values: Any) -> list[list[str]]:
        """The parameters, and the groups without a state, by what is kept of them."""
        keys: dict[str, list[str]] = {owner: list(own_keys) for owner, own_keys in states.items()}
        for key, names in self.groups.items():
            for name in names:
                for owner in self.parameters(name, values):
                    keys.setdefault(owner, []).append(f"group {key}")
        out: dict[frozenset[str], list[str]] = {}
        for owner, own_keys in keys.items():
            out.setdefault(frozenset(own_keys), []).append(owner)
        return list(out.values())
