"""Every kind of DeepSpeed checkpoint: real engines write it and load what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import MOMENTS
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.deepspeed_engine import Options, launched, make, process_group, resume
from tests.support.snapshot import snapshot
from tests.support.surgeries import WANTED

FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
ELASTIC = {"elastic_checkpoint": True}
VARIANTS = {
    **{
        f"zero{stage}-{dtype}": Options(stage=stage, dtype=dtype)
        for stage in range(4)
        for dtype in ("fp32", "bf16", "fp16")
    },
    "bf16-optimizer": Options(dtype="bf16", config=FP32_SUMS),
    "fused-zero0": Options(stage=0, optimizer="fused"),
    "fused-fp16-optimizer": Options(stage=0, dtype="fp16", optimizer="fused"),
    "fused-bf16": Options(stage=1, dtype="bf16", optimizer="fused"),
    "fused-zero3": Options(stage=3, optimizer="fused"),
    "apex-bf16-optimizer": Options(dtype="bf16", config=FP32_SUMS, optimizer="apex"),
    "experts-zero0": Options(stage=0, model="moe"),
    "experts-zero1": Options(stage=1, dtype="bf16", model="moe"),
    "experts-zero2": Options(stage=2, model="moe"),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def operate(root: Path, **recipe: Any) -> Plan:
    """Apply, verify every level, and find nothing left to do."""
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    assert look.verify(Run.open(root), level=4).findings == ()
    assert plan(Run.open(root), from_data(recipe)).empty
    return made


def held(values: dict[str, Any]) -> dict[str, Any]:
    """What the promise says, from the loaded engine."""
    (rate,) = set(values["lr"])
    (betas,) = {tuple(pair) for pair in values["betas"]}
    (eps,) = set(values["eps"])
    return {
        "lr": rate,
        "betas": betas,
        "eps": eps,
        "weight_decay": tuple(values["weight_decay"]),
        "consumed_samples": values["consumed_samples"],
    }


def promised(made: Plan) -> dict[str, Any]:
    keys = ("lr", "betas", "eps", "weight_decay", "consumed_samples")
    return {key: getattr(made.promise, key) for key in keys}


@pytest.mark.thinned(3)
@pytest.mark.witness(
    "DeepSpeed ZeRO 0",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="deepspeed",
)
@pytest.mark.witness(
    "DeepSpeed ZeRO 1",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="deepspeed",
)
@pytest.mark.witness(
    "DeepSpeed ZeRO 3",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="deepspeed",
)
@pytest.mark.witness(
    "DeepSpeed ZeRO 1, fp16",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="deepspeed",
)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.long
def test_the_engine_uses_what_was_set_and_reset(tmp_path: Path, name: str) -> None:
    options = VARIANTS[name]
    make(tmp_path / "run", options)
    before, files = resume(tmp_path / "run", options), snapshot(tmp_path / "run")
    assert before["moments"]["exp_avg"] > 0 and before["moments"]["exp_avg_sq"] > 0

    # The 16-bit wrappers of stage 0 make one update of zero gradients when they are built.
    counted = 7 if name in ("zero0-bf16", "zero0-fp16", "fused-fp16-optimizer") else 6
    assert counted == max([*before["steps"], *(step or 0 for step in before["group_step"])])

    made = operate(tmp_path / "run", set=WANTED)
    assert made.promise is not None and made.promise.adam_step == counted
    after = resume(tmp_path / "run", options)
    assert held(after) == promised(made)
    assert after["rates"] == [[5e-4] * len(after["lr"])] * 3
    assert [w for w in after["weight_decay"] if w] == [0.3] * before["weight_decay"].count(0.1)
    kept = ("moments", "steps", "group_step", "loss_scale", "clip_grad", "step")
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}

    operate(tmp_path / "run", reset=["moments"])
    zeroed = resume(tmp_path / "run", options)
    assert zeroed["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    assert set(zeroed["steps"]) <= {0} and not any(zeroed["group_step"])
    assert held(zeroed) == promised(made)

    for _ in range(2):
        surgery.apply(Run.open(tmp_path / "run"), surgery.plan_undo(Run.open(tmp_path / "run")))
    assert snapshot(tmp_path / "run") == files


@pytest.mark.witness(
    "DeepSpeed ZeRO 1, fp16",
    "set loss_scale",
    "reset loss-scale",
    by="deepspeed",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.long
def test_the_loss_scale_of_fp16_is_set_and_reset(tmp_path: Path, stage: int) -> None:
    options = Options(stage=stage, dtype="fp16")
    make(tmp_path / "run", options)
    made = operate(tmp_path / "run", set={"loss_scale": 64.0})
    assert resume(tmp_path / "run", options)["loss_scale"] == 64.0
    assert made.promise is not None and made.promise.loss_scale == 64.0
    operate(tmp_path / "run", reset=["loss_scale"])
    assert resume(tmp_path / "run", options)["loss_scale"] == 2.0**8


@pytest.mark.parametrize("name", ["zero2-bf16", "bf16-optimizer", "fused-fp16-optimizer"])
def test_the_clip_of_a_zero_shard_is_the_one_that_is_used(tmp_path: Path, name: str) -> None:
    make(tmp_path / "run", VARIANTS[name])
    operate(tmp_path / "run", set={"clip_grad": 0.25})
    assert resume(tmp_path / "run", VARIANTS[name])["clip_grad"] == 0.25


@pytest.mark.parametrize("name", ["zero0-fp32", "zero0-fp16", "zero3-bf16"])
def test_a_clip_that_only_the_command_line_decides_is_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path / "run", VARIANTS[name])
    with pytest.raises(SurgeryError) as refused:
        plan(Run.open(tmp_path / "run"), from_data({"set": {"clip_grad": 0.25}}))
    assert '"gradient_clipping": 0.25' in "\n".join(refused.value.next)


# --- elastic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_an_elastic_checkpoint_is_reset_and_says_what_it_does_not_keep(
    tmp_path: Path, stage: int
) -> None:
    options = Options(stage=stage, optimizer="fused", zero=ELASTIC)
    make(tmp_path / "run", options)
    for wanted in ({"beta2": 0.9}, {"eps": 1e-6}, {"weight_decay": 0.2}, {"lr": 1e-4}):
        with pytest.raises(SurgeryError, match="keeps no") as refused:
            plan(Run.open(tmp_path / "run"), from_data({"set": wanted}))
        assert "command line" in "\n".join(refused.value.next)
    made = operate(tmp_path / "run", reset=["moments"])
    assert made.promise is not None and made.promise.lr is made.promise.betas is None
    assert any("elastic" in warning for warning in made.warnings)
    after = resume(tmp_path / "run", options)
    assert after["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0} and after["steps"] == [0]


def test_an_elastic_checkpoint_that_cannot_be_loaded_is_found(tmp_path: Path) -> None:
    options = Options(zero=ELASTIC)
    make(tmp_path / "run", options)
    with pytest.raises(AssertionError):
        resume(tmp_path / "run", options)
    (finding,) = look.verify(Run.open(tmp_path / "run")).findings
    assert "base_optimizer_state_step" in finding


# --- experts -------------------------------------------------------------------------------------


def test_without_zero_the_optimizer_of_the_experts_is_the_one_that_is_loaded(
    tmp_path: Path,
) -> None:
    make(tmp_path / "run", VARIANTS["experts-zero0"])
    checkpoint = Run.open(tmp_path / "run").checkpoint(6)
    winners = {place.file.name for place in checkpoint.locate("betas") if place.wins}
    others = {place.file.name for place in checkpoint.locate("betas") if not place.wins}
    assert winners == {"expp_rank_0_mp_rank_00_optim_states.pt"}
    assert others == {"mp_rank_00_model_states.pt"}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("experts-zero0", "expp_rank_0_mp_rank_00_optim_states.pt"),
        ("experts-zero1", "layer_0_expert_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_step_without_a_file_of_an_expert_is_incomplete(
    tmp_path: Path, name: str, file: str
) -> None:
    make(tmp_path / "run", VARIANTS[name])
    (tmp_path / "run" / "global_step6" / file).unlink()
    with pytest.raises(SurgeryError, match=file):
        Run.open(tmp_path / "run").checkpoint(6)


def test_the_weights_of_the_experts_are_exported_too(tmp_path: Path) -> None:
    make(tmp_path / "run", VARIANTS["experts-zero1"])
    names = {weight.name for weight in Run.open(tmp_path / "run").checkpoint(6).weights()}
    saved: set[str] = set()
    for path in (tmp_path / "run" / "global_step6").glob("*model_states.pt"):
        tree = torch.load(path, weights_only=False)
        saved |= set(tree.get("module", tree))
    assert names == saved and any("experts.1" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_experts_on_two_ranks(tmp_path: Path, stage: int) -> None:
    """Without ZeRO each rank loads the optimizer of its own experts."""
    options = Options(stage=stage, model="moe-on-two-ranks")
    launched("make", tmp_path, options)
    made = operate(tmp_path, set=WANTED, reset=["moments"])
    ranks = launched("resume", tmp_path, options)
    assert len(ranks) == 2
    for rank in ranks:
        assert held(rank) == promised(made)
        assert rank["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0} and rank["steps"] == [0]


# --- ranks ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_compiled_cpu_adam_uses_what_was_set_and_reset(tmp_path: Path) -> None:
    """DeepSpeed compiles it at its first use, with g++ and ninja."""
    options = Options(optimizer="cpu_adam", zero={"offload_optimizer": {"device": "cpu"}})
    make(tmp_path / "run", options)
    assert resume(tmp_path / "run", options)["steps"] == [6]
    made = operate(tmp_path / "run", set=WANTED, reset=["moments"])
    after = resume(tmp_path / "run", options)
    assert held(after) == promised(made) and after["steps"] == [0]
    assert after["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0}


@pytest.mark.parametrize("name", ["zero1-bf16", pytest.param("zero3-fp32", marks=pytest.mark.slow)])
def test_every_rank_uses_what_was_set(tmp_path: Path, name: str) -> None:
    launched("make", tmp_path / "run", VARIANTS[name])
    made = operate(tmp_path / "run", set=WANTED, reset=["moments"])
    ranks = launched("resume", tmp_path / "run", VARIANTS[name])
    assert len(ranks) == 2
    for rank in ranks:
        assert held(rank) == promised(made)
        assert rank["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0} and rank["steps"] == [0]


def test_the_places_of_the_moments_are_listed_once_however_many_shards_there_are(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for each shard anew, all of them: that grows with the square."""
    root = trained(ranks=2)
    checkpoint = Run.open(root).checkpoint(8)
    listed: list[str] = []
    locate = checkpoint.locate

    def counted(name: str) -> Any:
        listed.append(name)
        return locate(name)

    monkeypatch.setattr(checkpoint, "locate", counted)
    assert len({part.place.file for part in checkpoint.parts() if part.kind in MOMENTS}) == 2
    assert sorted(name for name in listed if name in MOMENTS) == sorted(MOMENTS)
