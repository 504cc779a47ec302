"""A run goes on in bf16 or fp32: its weights are torch's casts of the masters, in every shard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support import deepspeed_engine
from tests.support.deepspeed_engine import Options
from tests.support.launch import first_line, launch
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def masters(step: Path) -> dict[str, torch.Tensor]:
    """Every fp32 master as one flat tensor, joined rank after rank by the shards' own mappings."""
    parts: dict[str, list[torch.Tensor]] = {}
    for file in sorted(step.glob("*_optim_states.pt")):
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        flats, mappings = state["single_partition_of_fp32_groups"], state["param_slice_mappings"]
        for flat, mapping in zip(flats, mappings, strict=True):
            for name, at in mapping.items():
                parts.setdefault(name, []).append(flat.detach()[at.start : at.start + at.numel])
    return {name: torch.cat(found) for name, found in parts.items()}


def weights(step: Path) -> dict[str, torch.Tensor]:
    """Every weight, of the model file or of the layer files of a pipeline."""
    layers = {int(f.name.split("_")[1].split("-")[0]): f for f in step.glob("layer_*")}
    if layers:
        return {
            f"{number}.{name}": tensor
            for number, file in layers.items()
            for name, tensor in torch.load(file, weights_only=False).items()
        }
    (file,) = step.glob("mp_rank_*_model_states.pt")
    return dict(torch.load(file, weights_only=False)["module"])


def check_weights(step: Path, to: str) -> None:
    held, found = masters(step), weights(step)
    for name in [name for name in held if name.startswith("tied_modules.")]:
        inside = name.split(".", 2)[2]  # each of the two stages has a master of the one weight
        own = next(own for own in found if own.partition(".")[2] == inside)
        held[own], copy = held.pop(name).chunk(2)
        assert torch.equal(held[own], copy)
    assert found.keys() >= held.keys()
    for name, master in held.items():
        assert found[name].dtype == DTYPES[to]
        assert torch.equal(found[name].flatten(), master.to(DTYPES[to])), name


def go_on(root: Path, ranks: int, to: str) -> None:
    was, kept = snapshot(root), masters(root / "global_step8")
    made = operate(root, {"precision": {"to": to}})
    check_weights(root / "global_step8", to)
    now = masters(root / "global_step8")
    assert all(torch.equal(now[name], master) for name, master in kept.items())
    names = {file.name.partition("zero_")[0] for file in (root / "global_step8").glob("*optim*")}
    assert names == {"bf16_" if to == "bf16" else ""}
    assert made.promise is not None
    assert made.promise.loss_scale == 1.0
    assert f"dtype: {to}\n" in (root / "train.yaml").read_text()
    line = first_line(root, ranks)
    assert compare(made.promise, line) == []
    take_back(root, was)


@pytest.mark.parametrize(("ranks", "zero", "before"), [(2, 1, "fp16"), (1, 1, "fp32")])
@pytest.mark.witness("bundled trainer", "precision bf16", by="deepspeed")
@pytest.mark.long
def test_the_trainer_goes_on_in_bf16(trained: Trained, ranks: int, zero: int, before: str) -> None:
    go_on(trained(ranks=ranks, zero=zero, dtype=before), ranks, "bf16")


@pytest.mark.parametrize(("ranks", "zero", "before"), [(2, 1, "fp16"), (1, 2, "bf16")])
@pytest.mark.long
def test_the_trainer_goes_on_in_fp32(trained: Trained, ranks: int, zero: int, before: str) -> None:
    go_on(trained(ranks=ranks, zero=zero, dtype=before), ranks, "fp32")


@pytest.mark.long
def test_the_layers_of_a_pipeline_follow(corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "dtype=fp16", "train_iters=2", "save_interval=2", "pipeline_model_parallel_size=2",
        "zero_stage=1", ranks=2,
    )  # fmt: skip
    was = snapshot(root)
    made = operate(root, {"precision": {"to": "bf16"}})
    check_weights(root / "global_step2", "bf16")
    assert made.promise is not None
    assert compare(made.promise, first_line(root, 2)) == []
    take_back(root, was)


@pytest.fixture(scope="module")
def engines() -> Iterator[None]:
    with deepspeed_engine.process_group():
        yield


def resumed(
    root: Path, stage: int, to: str, config: dict[str, Any], before: Options | None = None
) -> None:
    before = before or Options(stage=stage, dtype="fp16", scheduler="LambdaLR")
    deepspeed_engine.make(root, before)
    was = snapshot(root)
    made = operate(root, {"precision": {"to": to}})
    assert made.promise is not None
    step = root / "global_step6"
    check_weights(step, to)

    options = Options(stage=stage, dtype=to, scheduler="LambdaLR", config=config)
    engine = deepspeed_engine.build(options)
    loaded, _ = engine.load_checkpoint(str(root))
    assert loaded is not None
    held, live = masters(step), dict(engine.module.named_parameters())
    for name, master in held.items():
        assert torch.equal(live[name].detach().flatten(), master.to(DTYPES[to])), name
    used = deepspeed_engine.effective(engine)
    assert used["steps"] == [made.promise.adam_step]
    assert used["lr"] == [made.promise.lr] * 2
    assert used["loss_scale"] in (None, 1.0)
    (shard,) = step.glob("*_optim_states.pt")
    saved = torch.load(shard, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
    states = deepspeed_engine.live(engine).state.values()
    for mine, theirs in zip(states, saved["state"].values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
    assert deepspeed_engine.train(engine, 2)[0] == [made.promise.lr] * 2
    assert all(math.isfinite(float(p.detach().float().sum())) for p in engine.module.parameters())
    take_back(root, was)


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
"""With it ZeRO 1 in bf16 has another wrapper, BF16_Optimizer."""


@pytest.mark.parametrize(("stage", "config"), [(1, {}), (2, {}), (1, FP32_GRADIENTS)])
@pytest.mark.witness("DeepSpeed ZeRO 1, fp16", "precision bf16", by="deepspeed")
def test_an_engine_in_bf16_uses_what_was_promised(
    engines: None, tmp_path: Path, stage: int, config: dict[str, Any]
) -> None:
    resumed(tmp_path / "run", stage, "bf16", config)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.witness("DeepSpeed ZeRO 1, fp16", "precision fp32", by="deepspeed")
def test_an_engine_in_fp32_uses_what_was_promised(
    engines: None, tmp_path: Path, stage: int
) -> None:
    resumed(tmp_path / "run", stage, "fp32", {})


@pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning")
@pytest.mark.witness("DeepSpeed ZeRO 3", "precision bf16", by="deepspeed")
@pytest.mark.long
def test_zero_3_rounds_its_masters_itself_and_its_scaler_stands_still(
    engines: None, tmp_path: Path
) -> None:
    for before, to in (("fp16", "bf16"), ("fp16", "fp32"), ("fp32", "bf16")):
        root = tmp_path / f"{before}-{to}"
        deepspeed_engine.make(root, Options(stage=3, dtype=before))
        was = snapshot(root)
        made = operate(root, {"precision": {"to": to}})
        assert made.promise is not None
        engine = deepspeed_engine.build(Options(stage=3, dtype=to))
        loaded, _ = engine.load_checkpoint(str(root))
        assert loaded is not None
        (shard,) = (root / "global_step6").glob("*_optim_states.pt")
        assert shard.name.startswith("bf16_") == (to == "bf16")
        saved = torch.load(shard, weights_only=False)["optimizer_state_dict"]
        wrapper = engine.optimizer
        for master, mine, rounded in zip(
            saved["fp32_flat_groups"],
            wrapper.fp32_partitioned_groups_flat,
            wrapper.fp16_partitioned_groups_flat,
            strict=True,
        ):
            assert torch.equal(mine.detach(), master.detach())
            assert torch.equal(rounded.detach(), master.detach().to(DTYPES[to]))
        used = deepspeed_engine.effective(engine)
        assert used["steps"] == [made.promise.adam_step]
        assert used["loss_scale"] == made.promise.loss_scale == 1.0
        deepspeed_engine.train(engine, 2)
        for overflow in (True, False, True):
            wrapper._update_scale(overflow)  # a scaler of fp16 would move, or end the run
        assert wrapper.loss_scale == 1.0
        take_back(root, was)


def test_the_trainer_goes_on_from_zero_3(trained: Trained) -> None:
    root = trained(ranks=2, zero=3, dtype="fp32")
    was = snapshot(root)
    made = operate(root, {"precision": {"to": "bf16"}})
    assert made.promise is not None
    assert compare(made.promise, first_line(root, 2)) == []
    take_back(root, was)


def test_the_shards_of_bf16_optimizer_are_those_of_zero_1(engines: None, tmp_path: Path) -> None:
    before = Options(stage=1, dtype="bf16", scheduler="LambdaLR", config=FP32_GRADIENTS)
    resumed(tmp_path / "run", 1, "fp32", {}, before)
    run = Run.open(tmp_path / "run")
    assert plan(run, from_data({"precision": {"to": "bf16"}})).empty
    (shard,) = (tmp_path / "run" / "global_step6").glob("*_optim_states.pt")
    saved = torch.load(shard, weights_only=False)
    assert "zero_stage" not in saved["optimizer_state_dict"]
    model = shard.with_name("mp_rank_00_model_states.pt")
    state = torch.load(model, weights_only=False)
    state["ds_config"]["zero_optimization"]["stage"] = 0  # as BLOOM was trained
    torch.save(state, model)
    warnings = plan(run, from_data({"precision": {"to": "fp32"}})).warnings
    assert any("and with ZeRO stage 1" in text for text in warnings)


@pytest.mark.parametrize(
    ("dtype", "to", "said"),
    [
        ("fp16", "bf16", "masters without the names of their parameters"),
        ("fp16", "fp32", "keeps flat moments"),
        ("fp32", "bf16", "keeps no fp32 masters"),
    ],
)
def test_zero_0_is_refused(engines: None, tmp_path: Path, dtype: str, to: str, said: str) -> None:
    deepspeed_engine.make(tmp_path, Options(stage=0, dtype=dtype))
    was = snapshot(tmp_path)
    with pytest.raises(SurgeryError, match=f"was saved by ZeRO 0: it .*{said}") as refused:
        plan(Run.open(tmp_path), from_data({"precision": {"to": to}}))
    assert refused.value.next
    assert snapshot(tmp_path) == was
    if dtype == "fp32":
        assert plan(Run.open(tmp_path), from_data({"precision": {"to": "fp32"}})).empty


def test_what_is_bf16_already_stays(trained: Trained) -> None:
    """ZeRO 1 of the bundled trainer in bf16 has BF16_Optimizer's shards."""
    root = trained(ranks=1, zero=1, dtype="bf16")
    assert plan(Run.open(root), from_data({"precision": {"to": "bf16"}})).empty
    assert not plan(Run.open(root), from_data({"precision": {"to": "fp32"}})).empty


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"precision": {"to": "fp8"}}, "precision.to"),
        ({"precision": {"to": "fp16"}}, "the precision can't become fp16"),
        ({"precision": {"to": "bf16"}, "average": {"last": 2}}, "both `precision` and `average`"),
        (
            {"precision": {"to": "bf16"}, "scale": {"params": "weight", "by": 2}},
            "both `precision` and `scale`",
        ),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        from_data(data)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.long
def test_an_average_with_steps_of_the_old_precision_is_of_the_masters(
    trained: Trained, zero: int
) -> None:
    """Those are fp32 in both; the weights get the dtype that the edited step has now."""
    root = trained(ranks=2, zero=zero, dtype="fp16")
    operate(root, {"precision": {"to": "bf16"}})
    step = root / "global_step8"
    was, first, last = snapshot(root), masters(root / "global_step4"), masters(step)
    assert {tensor.dtype for tensor in weights(root / "global_step4").values()} == {torch.float16}
    recipe = {"average": {"steps": ["4", "8"], "weights": ["1", "3"]}}
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    found = masters(step)
    for name, master in last.items():
        mean = ((first[name].double() + 3 * master.double()) / 4).float()
        assert torch.equal(found[name], mean), name
        assert not torch.equal(mean, master) or torch.equal(first[name], master)
    check_weights(step, "bf16")
    assert made.promise is not None
    assert compare(made.promise, first_line(root, 2)) == []
    take_back(root, was)
