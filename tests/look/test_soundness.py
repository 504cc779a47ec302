"""verify: what each level finds, on checkpoints of the real trainer, and that it writes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.look.soundness import CRC, MEANING, NAMES, VALUES
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.look.conftest import OPTIM, change, flip, found, one
from tests.support.torch_files import load_shard, shards

LEVELS = range(NAMES, VALUES + 1)


# --- sound ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "zero", "dtype"), [(1, 1, "fp32"), (2, 1, "fp32"), (1, 0, "fp32"), (1, 1, "bf16")]
)
def test_what_the_trainer_saved_is_sound_at_all_levels(
    trained: Trained, ranks: int, zero: int, dtype: str
) -> None:
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    for level in LEVELS:
        told = look.verify(Run.open(root), level=level)
        assert (told.findings, told.level) == ((), level)
        assert told.no_crc == (None if level == NAMES else 0)
        assert (told.moments is None) == (level < VALUES)


def test_the_norms_are_those_of_all_shards(trained: Trained) -> None:
    root = trained(ranks=2)
    told = look.verify(Run.open(root), level=VALUES)
    states = [
        state
        for path in shards(root)
        if "optim" in path.name
        for optimizer in [load_shard(path)["optimizer_state_dict"]]
        for state in optimizer["base_optimizer_state"]["state"].values()
    ]
    assert told.moments is not None
    for name, moment in told.moments.items():
        values = torch.cat([state[name] for state in states]).double().abs()
        assert moment.l1 == pytest.approx(values.sum().item(), rel=1e-9)
        assert moment.max == values.max().item()


def test_surgeries_leave_a_sound_checkpoint(trained: Trained) -> None:
    root = trained(ranks=2)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"reset": ["moments"], "set": {"lr": 5e-4}})))
    assert all(found(root, level) == () for level in LEVELS)
    surgery.apply(run, surgery.plan_compact(run))
    assert all(found(root, level) == () for level in LEVELS)
    moments = look.verify(run, level=VALUES).moments
    assert moments is not None
    assert [(moment.l1, moment.max) for moment in moments.values()] == [(0, 0), (0, 0)]


# --- names and meaning ---------------------------------------------------------------------------


def test_missing_and_foreign_ranks_are_named(trained: Trained) -> None:
    folder = trained(ranks=2) / "global_step8"
    (folder / OPTIM.format(1)).rename(folder / OPTIM.format(7))
    missing, foreign = found(folder.parent, NAMES)
    assert missing == f"global_step8: missing: {OPTIM.format(1)}"
    assert foreign.startswith(OPTIM.format(7))


def test_a_layer_file_lacks_for_one_tensor_rank(trained: Trained) -> None:
    folder = trained() / "global_step8"
    for layer, rank in ((1, 0), (1, 1), (3, 0)):
        torch.save({"w": torch.rand(64)}, folder / f"layer_0{layer}-model_0{rank}-model_states.pt")
    one(found(folder.parent, NAMES), "missing: layer_03-model_01-model_states.pt")
    flip(folder / "layer_01-model_01-model_states.pt", "data/0")
    assert len(found(folder.parent, MEANING)) == 1
    assert "layer_01-model_01-model_states.pt: byte " in found(folder.parent, CRC)[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shard_of_another_step_is_found(trained: Trained, ranks: int) -> None:
    root = trained(ranks=ranks)
    name = OPTIM.format(ranks - 1)
    shutil.copy(root / "global_step2" / name, root / "global_step8" / name)
    findings = found(root)
    assert any("Adam step" in text or "adam_step" in text for text in findings)
    if ranks == 2:
        assert any(f"adam_step: 2 in {name}" in text or name in text for text in findings)
    assert found(root, step=4) == ()


def test_a_model_file_of_another_step_is_found(trained: Trained) -> None:
    root = trained()
    name = "mp_rank_00_model_states.pt"
    shutil.copy(root / "global_step4" / name, root / "global_step8" / name)
    assert f"{name}: holds step 4, not 8" in found(root)


def test_a_shard_of_another_world_size_is_found(trained: Trained, _originals: Any) -> None:
    root = trained()
    other = _originals(2, 1, "fp32") / "global_step8" / OPTIM.format(0)
    shutil.copy(other, root / "global_step8" / OPTIM.format(0))
    findings = found(root)
    assert f"{OPTIM.format(0)}: is one of 2 data-parallel partitions, not of 1" in findings


def _gap(outer: dict[str, Any]) -> None:
    list(outer["param_slice_mappings"][0].values())[1].numel -= 1


def _overlap(outer: dict[str, Any]) -> None:
    list(outer["param_slice_mappings"][0].values())[1].numel += 1


def _end(outer: dict[str, Any]) -> None:
    outer["param_slice_mappings"][1].popitem()


def _beyond(outer: dict[str, Any]) -> None:
    list(outer["param_slice_mappings"][1].values())[-1].numel += 1


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_gap, "param group 0: no parameter has the elements"),
        (_overlap, "overlaps what ends at"),
        (_end, "param group 1: no parameter has the elements"),
        (_beyond, "the parameters end at element"),
    ],
)
def test_mappings_cover_the_flat_partition(trained: Trained, edit: Any, says: str) -> None:
    root = trained(ranks=2)
    name = OPTIM.format(0)
    change(root / "global_step8" / name, edit)
    one(found(root), name, says)


@pytest.mark.long
def test_one_shard_of_a_thousand_that_differs_is_named(trained: Trained) -> None:
    root = trained()
    shutil.rmtree(root / "global_step2")
    folder = root / "global_step8"

    def count(outer: dict[str, Any]) -> None:
        outer["partition_count"] = [1000, 1000]

    first = folder / OPTIM.format(0)
    change(first, count)
    model = load_shard(folder / "mp_rank_00_model_states.pt") | {"dp_world_size": 1000}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(1, 1000):
        os.link(first, folder / OPTIM.format(rank))
    for level in (NAMES, MEANING):
        assert look.verify(Run.open(root), level=level).findings == ()
    other = folder / OPTIM.format(617)
    states = load_shard(other)
    other.unlink()
    states["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]["lr"] = 1.5
    torch.save(states, other)
    (finding,) = look.verify(Run.open(root)).findings
    assert finding.startswith("shards disagree on lr of param group 1: ")
    assert finding.endswith(f" in 999 shards, 1.5 in {other.name}")


def test_a_value_without_end_is_compared_all_the_same(trained: Trained) -> None:
    root = trained(ranks=2)
    endless: list[Any] = []
    endless.append(endless)
    wide: list[Any] = [0]
    for _ in range(40):
        wide = [wide, wide]
    for scale in (endless, wide):
        path = root / "global_step8" / OPTIM.format(0)
        change(path, lambda outer, scale=scale: outer.update(dynamic_loss_scale=scale))
        assert any("dynamic_loss_scale" in finding for finding in found(root))


@pytest.mark.long
def test_the_command_says_level_and_exits_4(trained: Trained) -> None:
    root = trained()

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ckptsurgeon", "verify", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True)

    assert typed("--level", "4", "--jobs", "2").stdout.startswith(
        "sound: step 8: 2 files, deepspeed, level 4\n"
    )
    assert typed("--level", "5").returncode == 2
    flip(root / "global_step8" / OPTIM.format(0), "data/2")
    assert typed().returncode == 0
    bad = typed("--level", "3")
    assert bad.returncode == 4
    assert "not sound: step 8: 2 files, deepspeed, level 3, 1 finding\n" in bad.stdout
    document = json.loads(typed("--level", "3", "--json").stdout)
    assert (document["sound"], document["level"], document["no_crc"]) == (False, 3, 0)
