"""Which optimizers keep Adam's two moments, so that its bound on their ratio holds."""

from __future__ import annotations

from collections.abc import Sequence

from ckptsurgeon.formats.fields.values import StateDict
from ckptsurgeon.formats.optimizers.table import LARGEST, TABLE, Known, candidates

NAMES = frozenset(
    {
        "Adam", "AdamW", "FusedAdam", "CPUAdam", "AdamC", "GaLore", "Fira",
        "Adam, AdamW, LAMB or AdEMAMix of bitsandbytes",
    }
)  # fmt: skip
"""exp_avg and exp_avg_sq are running means of one gradient and of its square, in all of these.

GaLore and Fira, which can't be told from Adam by their keys, keep those of a projected gradient."""
PLAIN = frozenset({"Adam", "AdamW", "FusedAdam", "CPUAdam"})
"""Those that move a weight by lr times m^ / (sqrt(v^) + eps), and its decay, and no further."""


def is_adam(state_dict: StateDict, known: Known = TABLE) -> bool:
    """Whether every optimizer that has these keys is one of `NAMES`; AMSGrad is not."""
    if LARGEST in state_dict.state:
        return False
    if any(place.value for place in state_dict.group.get("amsgrad", ())):
        return False
    names = {entry.name for entry in candidates(state_dict, known)}
    return bool(names) and names <= NAMES


def moves_by_its_rate(state_dicts: Sequence[StateDict], known: Known = TABLE) -> bool:
    """Whether every optimizer with these keys is one of `PLAIN`, so that lr bounds its updates."""
    names = {entry.name for each in state_dicts for entry in candidates(each, known)}
    return bool(names) and names <= PLAIN and all(is_adam(each, known) for each in state_dicts)
