"""An optimizer in two files: the states of its parameters, and beside them its param groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.fields.understood import mapping, not_understood
from ckptsurgeon.formats.fields.values import Located, Place, StateDict
from ckptsurgeon.formats.optimizers import state_dict
from ckptsurgeon.formats.places import optimizer_state
from ckptsurgeon.formats.plain import parts
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.plans.edits import Key


@dataclass
class GroupsBeside(TorchCheckpoint):
    """`groups_in` says where the param groups are of the optimizer in a file that lacks them. Its
    states stay one and all: nothing is taken out of such a file."""

    groups_in: Mapping[Path, Located] = field(default_factory=dict)

    def _in_groups(self, item: Located, name: str, wins: bool) -> Iterator[Place]:
        if item[0] not in self.groups_in:
            return super()._in_groups(item, name, wins)
        file, base = self.groups_in[item[0]]
        return optimizer_state.in_groups(self, file, base, self._beside(item[0]), name, wins)

    def _beside(self, states: Path) -> Sequence[Any]:
        file, base = self.groups_in[states]
        groups = get(self.trees[file], base)
        if not isinstance(groups, (list, tuple)):
            raise not_understood(file, base, groups, "a list of param groups")
        return groups

    def named(self, item: Located) -> Mapping[Key, str]:
        """By both files."""
        if item[0] not in self.groups_in:
            return super().named(item)
        saved = mapping(get(self.trees[item[0]], item[1]))
        return parts.named({**saved, "param_groups": self._beside(item[0])})

    def state_dicts(self) -> list[StateDict]:
        """One for each optimizer, with its groups where they are."""
        return [self._joined(each) for each in super().state_dicts()]

    def _joined(self, each: StateDict) -> StateDict:
        if each.file not in self.groups_in:
            return each
        groups = state_dict.in_groups(*self.groups_in[each.file], self._beside(each.file))
        return each._replace(group=groups, whole=())
