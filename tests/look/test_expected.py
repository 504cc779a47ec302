"""The rates that a checkpoint leads to: those that its own later steps were saved with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsurgeon import Run
from ckptsurgeon.look.expected import expected
from tests.formats.matrix import FORMATS

IN_CODE = (
    "DeepSpeed ZeRO 0", "DeepSpeed ZeRO 1", "DeepSpeed ZeRO 3", "DeepSpeed ZeRO 1, fp16",
    "DeepSpeed universal", "Hugging Face", "torchtitan (DCP)", "OLMo-core, no scheduler",
    "FSDP2 (Accelerate, Trainer)",
)  # fmt: skip
"""Their LambdaLR is a function of the trainer's, which no checkpoint keeps."""
BY_CONFIG = ("OLMo-core", "OLMo-core, OLMoDDP", "metaseq, fairseq", "nanotron")
"""Their lr is computed anew when they load, from the config, the flags or base_lrs."""


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
@pytest.mark.parametrize("name", FORMATS)
def test_a_later_step_was_saved_with_the_rate_that_an_earlier_one_leads_to(
    run_of: Callable[[str], Path], name: str
) -> None:
    run = Run.open(run_of(name))
    first, last = run.steps()[0], run.steps()[-1]
    assert first < last
    here, there = expected(run, first), expected(run, last)
    assert here.rate(1, None) == here.promise.lr
    assert here.decides_lr == (name not in BY_CONFIG)
    rate = here.rate(last - first + 1, None)
    if name in IN_CODE + BY_CONFIG:
        assert rate is None
    else:
        assert rate == pytest.approx(there.promise.lr, rel=1e-12)
