"""Re-warm: the moments fill, the weights stay, the window survives a requeue and ends by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, report, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import State
from ckptsurgeon.formats.schedules.rewarm import trained_after
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.operations.rewarm import samples_of
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.style import Style
from tests.conftest import Trained
from tests.support.launch import launch
from tests.support.promise import PROMISE
from tests.support.snapshot import snapshot
from tests.support.trained_run import edit, losses, step_back
from train.microbatches import BatchSizes
from train.progress import skip_range


def masters(run: Path, step: int) -> list[torch.Tensor]:
    """Every fp32 weight that an optimizer step changes, shard by shard, and the model's own."""
    found: list[torch.Tensor] = []
    for file in sorted((run / f"global_step{step}").glob("*.pt")):
        content = torch.load(file, weights_only=False)
        state = content.get("optimizer_state_dict") or {}
        for key in ("single_partition_of_fp32_groups", "fp32_flat_groups"):
            found += state.get(key, [])
        found += list((content.get("module") or {}).values())
    return [tensor.detach().clone() for tensor in found]


def moments(run: Path, step: int) -> dict[str, Any]:
    """The largest |exp_avg|, exp_avg_sq and step of all shards."""
    found: dict[str, float] = {}
    for file in sorted((run / f"global_step{step}").glob("*.pt")):
        content = torch.load(file, weights_only=False)
        state = content.get("optimizer_state_dict") or content.get("optimizer") or {}
        state = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state
        for one in (state.get("state") or {}).values():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                found[key] = max(found.get(key, 0.0), float(torch.as_tensor(one[key]).abs().max()))
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rates(stdout: str) -> dict[int, str]:
    found = re.findall(r"^ iteration +(\d+)/.*\| learning rate: (\S+) \|", stdout, re.MULTILINE)
    return {int(iteration): rate for iteration, rate in found}


STATE = State(
    step=0, promise=PROMISE, schedule=None, dialect="", data_parallel=1, model_parallel=1,
    dynamic_loss_scale=False, tokens=None, gigaflos=None, saved_at=0.0, batch_size=24,
)  # fmt: skip
RECIPE = {"rollback": {"to": 4}, "reset": ["moments"], "rewarm": {"iterations": 2}}


@pytest.mark.parametrize(
    ("ranks", "zero", "dtype"),
    [
        (1, 1, "fp32"),
        (1, 0, "fp32"),
        pytest.param(1, 3, "fp32", marks=pytest.mark.slow),
        pytest.param(2, 1, "fp32", marks=pytest.mark.slow),
        pytest.param(1, 1, "bf16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_a_held_window_fills_the_moments_and_moves_no_weight(
    trained: Trained, ranks: int, zero: int, dtype: str
) -> None:
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    before, start = snapshot(root), masters(root, 4)
    run = Run.open(root)
    wanted = plan(run, from_data(RECIPE))
    assert wanted.promise is not None and wanted.promise.lr == 0.0
    receipt = surgery.apply(run, wanted)
    verdict = report.done(receipt, Style(100)).splitlines()[0]
    assert verdict.endswith("verified: step 5 holds the weights; lr 9.963e-04 from step 7")

    again = ["--config", str(root / "train.yaml"), "save_interval=1"]
    done = launch(*again, "train_iters=7", ranks=ranks)
    assert compare(wanted.promise, done.stdout.splitlines()[0]) == []
    assert same(masters(root, 5), start) and same(masters(root, 6), start)
    assert not same(masters(root, 7), start)
    held = moments(root, 6)
    assert held["exp_avg"] > 0 and held["exp_avg_sq"] > 0 and held["step"] == 2
    # The schedule went on meanwhile: cosine from sample 16 to 800, as if nothing had been held.
    assert rates(done.stdout) == {5: "0.000E+00", 6: "0.000E+00", 7: "9.963E-04"}
    assert "re-warm ended after iteration 6" in done.stdout
    assert look.inspect(run, 5).promise.rewarm == ("hold", 32, 48)
    assert look.inspect(run, 6).promise.rewarm == ()

    if zero == 1:  # a requeue in the middle of the window
        end = masters(root, 7)
        step_back(root, 5)
        (root / "latest_checkpointed_iteration.txt").write_text("5")
        requeued = launch(*again, "train_iters=7", ranks=ranks)
        assert compare(look.inspect(run, 5).promise, requeued.stdout.splitlines()[0]) == []
        assert losses(requeued.stdout) == {i: losses(done.stdout)[i] for i in (6, 7)}
        assert same(masters(root, 7), end)

    surgery.apply(run, surgery.plan_undo(run))
    left = snapshot(root)
    checkpoints = [name for name in before if name.startswith("global_step")]
    assert [name for name in checkpoints if left[name] != before[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("more", ["tensor", "pipeline"])
def test_ranks_that_share_the_model_hold_it_together(
    tmp_path: Path, corpus: Path, more: str
) -> None:
    root = tmp_path / "run"
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        f"{more}_model_parallel_size=2", "train_iters=4", "save_interval=4", ranks=2,
    )  # fmt: skip
    start = masters(root, 4)
    run = Run.open(root)
    wanted = plan(run, from_data(RECIPE))
    assert wanted.promise is not None
    surgery.apply(run, wanted)
    again = ["--config", str(root / "train.yaml"), "save_interval=1", "train_iters=7"]
    done = launch(*again, ranks=2)
    assert compare(wanted.promise, done.stdout.splitlines()[0]) == []
    assert same(masters(root, 6), start) and not same(masters(root, 7), start)
    assert moments(root, 6)["exp_avg_sq"] > 0


def test_a_ramp_climbs_to_the_schedule_and_skipped_iterations_are_no_part_of_it(
    trained: Trained,
) -> None:
    root = trained()
    run = Run.open(root)
    recipe = {"rollback": {"to": 4}, "skip": ["5-7"], "rewarm": {"iterations": 4, "kind": "ramp"}}
    surgery.apply(run, plan(run, from_data(recipe)))
    done = launch("--config", str(root / "train.yaml"), "train_iters=12", "save_interval=10")
    rate = {i: float(text) for i, text in rates(done.stdout).items()}
    assert sorted(rate) == [8, 9, 10, 11, 12] and rate[8] == 0.0
    assert [rate[i] / rate[12] for i in (9, 10, 11)] == pytest.approx([0.25, 0.5, 0.75], rel=0.02)
    saved = look.inspect(run, 10).promise
    assert saved.rewarm == ("ramp", 32, 64)
    assert saved.lr == pytest.approx(rate[11], rel=1e-3)


@given(
    consumed=st.integers(0, 400),
    iterations=st.integers(0, 60),
    ramp=st.none() | st.tuples(st.sampled_from([4, 8]), st.just(4), st.integers(0, 300)),
    first=st.integers(1, 40),
    length=st.integers(0, 20),
)
def test_the_window_is_as_long_as_the_iterations_of_the_trainer(
    consumed: int, iterations: int, ramp: tuple[int, int, int] | None, first: int, length: int
) -> None:
    """The surgeon's arithmetic against the trainer's own batch sizes and skip rule."""
    state = replace(STATE, step=consumed // 24, rampup=ramp)
    skip = [(first, first + length)]
    sizes = BatchSizes(24, 4, 1, ramp)
    step, at, trained, left = state.step, consumed, 0, iterations
    while left:
        step += 1
        size = sizes.at(at)
        if skip_range(skip, step) is None:
            trained, left = trained + size, left - 1
        at += size
    assert samples_of(iterations, state, consumed, skip) == trained
    begin = replace(PROMISE, step=state.step + 1, consumed_samples=consumed, skip=tuple(skip))
    while skip_range(skip, step + 1) is not None:
        step += 1
    assert trained_after(replace(state, promise=begin), 7, 7 + trained) == (step + 1, 7 + trained)


def test_a_window_opens_where_the_same_recipe_sets_the_counters(trained: Trained) -> None:
    """Seen from where the run goes on, not from where it stood: ramp-up and skips included."""
    root = trained()

    def ramped(content: dict[str, Any]) -> None:
        content["args"].rampup_batch_size = [4, 4, 16]

    edit(root / "global_step8" / "mp_rank_00_model_states.pt", ramped)
    run = Run.open(root)
    window = {"rewarm": {"iterations": 2}}

    def opened(recipe: dict[str, Any]) -> tuple[Any, ...]:
        promise = plan(run, from_data({**window, **recipe})).promise
        assert promise is not None and promise.rewarm is not None
        return promise.rewarm

    assert opened({}) == ("hold", 64, 80)
    assert opened({"set": {"position": 400}}) == ("hold", 400, 416)
    assert opened({"set": {"consumed_samples": 0}}) == ("hold", 64, 72)
    skipped = {"consumed_samples": 0, "iteration": 99}
    assert opened({"set": skipped, "skip": ["100-102"]}) == ("hold", 64, 76)


def test_another_trainer_gets_the_three_launches_of_bigscience(trained: Trained) -> None:
    """tr8b-104B, Embed-Norm 6: 7_594_208 samples, 100 iterations of 2048, stop at 7_799_008."""
    root = trained()

    def theirs(content: dict[str, Any]) -> None:
        del content["trainer"], content["rewarm"], content["skip_train_iteration_range"]
        content["args"].consumed_train_samples = 7_594_208
        content["args"].global_batch_size = 2048

    edit(root / "global_step8" / "mp_rank_00_model_states.pt", theirs)
    before = snapshot(root)
    with pytest.raises(SurgeryError, match="keeps no re-warm window") as refused:
        plan(Run.open(root), from_data({"reset": ["moments"], "rewarm": {"iterations": 100}}))
    assert "--use-checkpoint-lr-scheduler --train-samples 7799008" in "".join(refused.value.next)
    with pytest.raises(SurgeryError, match="keeps no re-warm window") as refused:
        plan(Run.open(root), from_data({"rewarm": {"iterations": 9, "kind": "ramp"}}))
    assert "--warmup-samples-after-loading" in "".join(refused.value.next)
    assert snapshot(root) == before


def test_zero_iterations_close_a_window(trained: Trained) -> None:
    run = Run.open(trained())
    surgery.apply(run, plan(run, from_data({"rewarm": {"iterations": 50}})))
    assert look.inspect(run).promise.lr == 0.0
    surgery.apply(run, plan(run, from_data({"rewarm": {"iterations": 0}})))
    closed = look.inspect(run).promise
    assert closed.rewarm == () and closed.lr > 0
