"""In every format of the table: steps of one training go on from each other, and steps that only
look like it do not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ckptsurgeon import Run, look
from ckptsurgeon.look.resumed.verdict import AGREES, DIFFERS
from tests.formats.matrix import FORMATS

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
INVENTED = (
    "Megatron-LM legacy", "Megatron-LM torch_dist", "Megatron-LM torch_dcp",
    "Megatron-LM fsdp_dtensor", "Megatron-Bridge", "NeMo 2",
)  # fmt: skip
"""Their steps are written by a test, each with random numbers for weights and moments."""
NOT_ADAM = ("OLMo-core, OLMoDDP",)
"""Its optimizer is none that is known to keep plain means."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_a_format_of_the_table(run_of: Callable[[str], Path], name: str) -> None:
    run = Run.open(run_of(name))
    compared = 0
    for before, step in pairwise(run.steps()):
        since = look.verify(run, step, against=before).since
        seen = {each.subject: each.verdict for each in since if not each.differs}
        seen |= {each.subject: each.verdict for each in since if each.differs}
        if name in INVENTED:
            assert seen["moments"] == seen["weights"] == DIFFERS, since
        else:
            assert DIFFERS not in seen.values(), since
            assert (seen.get("moments") == AGREES) == (name not in NOT_ADAM), since
        compared += 1
    assert compared
