"""Every checkpoint answers every field of `FIELDS`, and nothing else is asked of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run
from ckptsurgeon.errors import Impossible
from ckptsurgeon.formats import FIELDS
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.report.run import SHOWN
from tests.formats.matrix import make

CHEAP = ("Megatron-LM legacy", "torchtitan (DCP)", "metaseq, fairseq", "nanotron", "Hugging Face")
ADAM = {"lr", "betas", "eps", "weight_decay", "adam_step", "exp_avg", "exp_avg_sq"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
@pytest.mark.parametrize("name", CHEAP)
def test_each_field_has_a_list_of_places(tmp_path: Path, name: str) -> None:
    run = Run.open(make(name, tmp_path / "run"))
    checkpoint = run.checkpoint(run.latest())
    kept = {field for field in FIELDS if checkpoint.locate(field)}
    assert kept >= ADAM
    assert kept < FIELDS.keys()  # none keeps them all, and what is not kept is an empty list
    with pytest.raises(AssertionError, match="no field is called learning_rate"):
        checkpoint.locate("learning_rate")


def test_what_is_shown_is_a_field() -> None:
    assert set(SHOWN) <= FIELDS.keys()


def test_an_impossible_value_is_refused_each_time_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    group: dict[str, Any] = {"lr": float("nan"), "betas": (0.9, 0.95), "params": [0]}
    torch.save({"state": {}, "param_groups": [group]}, file)
    checkpoint = TorchCheckpoint(file, 1, *read_shards([file]), optimizers=((file, ()),))
    for _ in range(2):
        with pytest.raises(Impossible, match=r"param_groups\.0\.lr is nan"):
            checkpoint.locate("lr")
