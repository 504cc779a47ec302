"""Experts in Megatron-LM's legacy files that are cut otherwise than the attention: the state of
both is in the file of the first of the ranks that have the same, and of no other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support import megatron_legacy
from tests.support.new_numbers import MOMENTS

STEP, EXPERTS = 20, 4
DENSE = ("router.weight", "norm.weight")
EXPERT = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
KINDS = ("param", *MOMENTS)
Flat = dict[str, torch.Tensor]


def saved(root: Path, step: int, tensor: int, spread: int, cut: int) -> Path:
    """What the ranks of a step save, each process for itself, as `save_parameter_state` and
    `get_checkpoint_name` have it."""
    sizes = {
        "expert_model_parallel_size": spread, "expert_tensor_parallel_size": cut,
        "tensor_model_parallel_size": tensor,
    }  # fmt: skip
    megatron_legacy.save(root, (step,), tensor=1, pipeline=1, chained=2, **sizes)
    folder = root / f"iter_{step:07d}"
    template = folder / "mp_rank_00"
    with megatron_legacy.megatron_enums():
        state = torch.load(template / "model_optim_rng.pt", weights_only=False)
        for file in template.iterdir():
            file.unlink()
        template.rmdir()
        for process in range(math.lcm(tensor, cut * spread)):
            saves = process < tensor, process < cut * spread
            if any(saves):
                rank, piece, own = process % tensor, process % cut, process // cut % spread
                name = f"mp_rank_{rank:02d}" + (f"_{own:03d}" if spread > 1 else "")
                (folder / name).mkdir()  # once: no two processes save one file
                count = EXPERTS // spread
                mine = {EXPERT.format(i): f"{own * count + i} {piece}" for i in range(count)}
                both = [flat({n: f"{n} {rank}" for n in DENSE}, step), flat(mine, step)]
                state["model"] = {**both[0][1], **both[1][1]}
                torch.save(state, folder / name / "model_optim_rng.pt")
                kept = [b[0] if has else None for b, has in zip(both, saves, strict=True)]
                torch.save(kept, folder / name / "distrib_optim.pt")
    return root


def flat(seeds: Mapping[str, str], step: int) -> tuple[dict[Any, Any], Flat]:
    """The state of one optimizer, and the weights as views of one buffer."""
    numel = 32 if "norm.weight" in seeds else 24
    whole = {
        kind: torch.cat([numbers(f"{seed} {kind}", step, numel) for seed in seeds.values()])
        for kind in KINDS
    }
    whole["exp_avg"] *= 0.2  # what gradients can lead to beside such an exp_avg_sq
    data = whole["param"].bfloat16()
    views = {name: data[i * numel : (i + 1) * numel].view(-1, 4) for i, name in enumerate(seeds)}
    bucket = {(torch.bfloat16, torch.float32): {**whole, "numel_unpadded": len(data)}}
    return {"buckets_coalesced": True, 0: bucket}, views


def numbers(seed: str, step: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(ord(c) * i for i, c in enumerate(seed, 1)) + step)
    return torch.rand(numel, generator=generator) + 0.1


def held(root: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of the model and of its optimizers, by file and place."""
    out: dict[str, torch.Tensor] = {}
    for file in sorted((root / f"iter_{step:07d}").glob("*/*.pt")):
        with megatron_legacy.megatron_enums():
            tree = torch.load(file, weights_only=False)
        where = f"{file.parent.name} {file.name}"
        if file.name == "distrib_optim.pt":
            for i, state in enumerate(tree):
                for kind in KINDS if state else ():
                    (bucket,) = state[0].values()
                    out[f"{where} {i} {kind}"] = bucket[kind]
        else:
            out |= {f"{where} {name}": weight for name, weight in tree["model"].items()}
    return out


RANKS = st.sampled_from([1, 2, 4])


@given(RANKS, RANKS, RANKS)
@example(2, 1, 1)
@example(4, 2, 1)
@example(2, 4, 1)
@settings(max_examples=8, deadline=None)
@pytest.mark.long
def test_every_rank_has_what_the_same_rank_of_the_source_had(
    tensor: int, spread: int, cut: int
) -> None:
    assume(tensor % cut == 0)
    with TemporaryDirectory() as place:
        source = saved(Path(place) / "old", STEP, tensor, spread, cut)
        root = saved(Path(place) / "new", 1, tensor, spread, cut)
        before = held(root, 1)
        made = plan(Run.open(root), from_data({"transplant": {"source": str(source)}}))
        surgery.apply(Run.open(root), made)
        assert look.verify(Run.open(root), level=4).findings == ()
        found, known = held(root, STEP), held(source, STEP)
    assert found.keys() == known.keys() == before.keys()
    assert [name for name in known if not torch.equal(found[name], known[name])] == []
    assert not any(torch.equal(before[name], known[name]) for name in known)


@given(RANKS, RANKS, RANKS)
@example(2, 1, 1)
@example(1, 2, 1)
@settings(max_examples=5, deadline=None)
def test_what_several_ranks_have_is_the_same_after_an_edit(
    tensor: int, spread: int, cut: int
) -> None:
    """Weights are rounded from the masters, wherever these are."""
    assume(tensor % cut == 0)
    with TemporaryDirectory() as place:
        root = saved(Path(place), STEP, tensor, spread, cut)
        made = plan(Run.open(root), from_data({"scale": {"params": ".*", "by": 0.7}}))
        surgery.apply(Run.open(root), made)
        found = held(root, STEP)
    same: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for place, weight in found.items():
        folder, file, name, *_ = place.split()
        rank, *of_experts = (int(word) for word in folder.split("_")[2:])
        if file == "model_optim_rng.pt":
            whose = (rank % cut, *of_experts) if "experts" in name else (rank,)
            same.setdefault((name, *whose), []).append(weight)
    unlike = [
        key for key, (one, *more) in same.items() if any(not torch.equal(one, w) for w in more)
    ]
    assert unlike == []


def test_pieces_that_several_ranks_write_into_one_file_are_refused(tmp_path: Path) -> None:
    """Experts over more tensor ranks than the attention: a file has those of one of its writers."""
    roots = [tmp_path / name for name in ("old", "new")]
    for root, step in zip(roots, (STEP, 1), strict=True):
        saved(root, step, 2, 1, 2)
        for file in root.glob("iter_*/*/model_optim_rng.pt"):
            with megatron_legacy.megatron_enums():
                state = torch.load(file, weights_only=False)
                state["args"].expert_tensor_parallel_size = 4
                torch.save(state, file)
    source, run = roots
    with pytest.raises(SurgeryError, match="experts in 4 pieces, and files of 2 tensor ranks"):
        plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))
