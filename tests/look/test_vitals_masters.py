"""Masters held against their weights, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look
from tests.support import deepspeed_engine
from tests.support.dcp_trainers import torchtitan
from tests.support.deepspeed_engine import Options
from tests.support.megatron_legacy import megatron_enums, save
from tests.support.universal import convert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def engine(options: Options) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        with deepspeed_engine.process_group():
            deepspeed_engine.make(root, options, 6)

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (engine(Options(stage=3, dtype="bf16")), "the step keeps no weights beside them"),
        (engine(Options(stage=0)), "the step keeps none beside the weights"),
        (torchtitan, "the step keeps none beside the weights"),
        (engine(Options(stage=0, dtype="bf16")), "none is known by its weight here"),
    ],
    ids=["zero3", "fp32", "torchtitan", "zero0-bf16"],
)
def test_why_no_master_is_compared(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    make(tmp_path / "run")
    told = look.verify(Run.open(tmp_path / "run"), level=4)
    assert told.findings == ()
    assert [text for text in told.not_compared if "masters" in text] == [f"masters: {said}"]


@pytest.mark.parametrize("kind", ["param", "weights"])
def test_a_stale_half_of_a_megatron_rank_is_found(tmp_path: Path, kind: str) -> None:
    """Masters, or weights, of another step in one of four ranks."""
    root = save(tmp_path)
    assert look.verify(Run.open(root), level=4).not_compared == ()
    now, other = (root / f"iter_{step:07d}" / "mp_rank_01_000" for step in (30, 20))
    name = "distrib_optim.pt" if kind == "param" else "model_optim_rng.pt"
    with megatron_enums():
        held, old = (torch.load(path / name, weights_only=False) for path in (now, other))
        if kind == "param":
            for pair, bucket in held[0].items():
                bucket["param"] = old[0][pair]["param"]
        else:
            held["model"] = old["model"]
        torch.save(held, now / name)
    (finding,) = look.verify(Run.open(root), level=4).findings
    assert "the fp32 masters do not round to the weights" in finding
    assert "mp_rank_01_000" in finding and "stage0.up.weight" in finding


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    held = torch.load(path, weights_only=False)
    change(held)
    torch.save(held, path)


def test_a_universal_copy_is_held_to_the_bound(tmp_path: Path) -> None:
    """Beside its shards, whose weights it shares."""
    root = tmp_path / "run"
    engine(Options(dtype="bf16"))(root)
    convert(root)
    assert look.verify(Run.open(root), level=4).findings == ()
    (path,) = root.glob("global_step6_universal/zero/0.weight/exp_avg_sq.pt")
    edit(path, lambda held: held["param"].zero_())
    (finding,) = look.verify(Run.open(root), level=4).findings
    assert "no gradients lead beyond" in finding and "0.weight" in finding
