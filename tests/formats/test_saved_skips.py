"""A flag that skips data says all that the next launch skips: what was asked, and what the saved
command line skips after the step."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon import surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.fields.skipped import uncounted, with_uncounted
from ckptsurgeon.formats.plain.fairseq import Fairseq
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support import megatron_engine, megatron_legacy
from tests.support.dcp_trainers import CONFIG, olmo
from tests.support.fairseq_files import make_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
PAIRS = st.tuples(st.integers(1, 40), st.integers(1, 9))


def hint(root: Path, *ranges: str, **more: bool) -> str:
    with pytest.raises(SurgeryError) as error:
        surgery.plan(Run.open(root), from_data({"skip": list(ranges), **more}))
    return " ".join(map(str, error.value.next))


def trained(flag: str, updates: int, last: int) -> list[int]:
    """The batch of each update after `updates` and up to `last`, as metaseq's `train` and
    `get_skip_batches` have it (`metaseq/cli/train.py`, f7ffa5f). Batches count on from there."""
    left: dict[int, int] = {}
    for word in filter(None, flag.split(",")):
        first, _, end = word.partition("-")
        left[int(first)] = int(end or first) - int(first) + 1
    out, batch, update = [], updates + 1, updates + 1
    while update <= last:
        if left.get(update, 0) > 0:
            left[update] -= 1
        else:
            out.append(batch)
            update += 1
        batch += 1
    return out


@given(st.integers(1, 20), st.lists(PAIRS), st.lists(PAIRS, min_size=1))
def test_metaseq_skips_what_it_skipped_and_what_was_asked(
    now: int, saved: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    """The updates are those that the log of the saved launch counts."""
    flag = ",".join(f"{first}-{first + n - 1}" if n > 1 else str(first) for first, n in saved)
    ranges = [(now + first, now + first + n - 1) for first, n in asked]
    batches = with_uncounted(ranges, uncounted(flag, now))
    new = re.search(r"batches ([\d,-]+)", str(Fairseq().advise_skip(batches)))
    assert new is not None
    before, unwanted = trained(flag, now, 100), {u for a, b in ranges for u in range(a, b + 1)}
    wanted = [b for u, b in zip(range(now + 1, 101), before, strict=True) if u not in unwanted]
    assert trained(new[1], now, now + len(wanted)) == wanted


def test_metaseq(tmp_path: Path) -> None:
    flags = {"dataset": {"skip_batches": "12-14,40-49,60"}}
    run = make_run(tmp_path / "run", command_line=flags)
    assert "--skip-batches 35-36,38-47,58-58;" in hint(run, "35-36")
    assert "--skip-batches 38-52,55-55;" in hint(run, "38-42")
    assert "--skip-batches 35-36;" in hint(run, "35-36", clear_skip=True)
    gone_back = hint(run, "15")
    assert "--to 10" in gone_back and "--skip-batches 12-14,15-15,39-48,59-59;" in gone_back


def test_megatron_lm(tmp_path: Path) -> None:
    run = megatron_legacy.save(tmp_path / "run", iterations_to_skip=[25, 32, 40])
    told = hint(run, "35-36")
    assert re.search(r"--iterations-to-skip 32 35 36 40(?!\d| \d)", told)
    assert re.search(r"--iterations-to-skip 35 36(?!\d| \d)", hint(run, "35-36", clear_skip=True))


@pytest.mark.long
def test_megatron_deepspeed(tmp_path: Path) -> None:
    ranges = deque([[3, 4], [20, 22]])
    with megatron_engine.megatron():
        megatron_engine.make(tmp_path / "run", skip_train_iteration_range=ranges)
    assert "--skip-train-iteration-range 9-10 20-22;" in hint(tmp_path / "run", "9-10")


def test_olmo_core(tmp_path: Path) -> None:
    steps = [{"start": 1, "stop": 2}, {"start": 12, "stop": 14}]
    trainer = {**CONFIG.get("trainer", {}), "steps_to_skip": steps}
    run = olmo(tmp_path / "run", config={**CONFIG, "trainer": trainer})
    assert "'[{start: 9, stop: 10}, {start: 12, stop: 14}]'" in hint(run, "9")
