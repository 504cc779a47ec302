"""Whether a step goes on from an earlier one: the laws, and real trainers that began anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon import Run, look
from ckptsurgeon.look.ready import ready
from ckptsurgeon.look.resumed import aligned
from ckptsurgeon.look.resumed.laws import Moments, Movement, correction
from ckptsurgeon.look.resumed.verdict import AGREES, DIFFERS
from tests.conftest import Trained
from tests.support import cut_parts, deepspeed_engine
from tests.support.deepspeed_engine import Options
from tests.support.launch import launch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of DeepSpeed's stage 3
BETAS = [(0.9, 0.95), (0.9, 0.999), (0.8, 0.99), (0.0, 0.9), (0.95, 0.95)]
KINDS = ("exp_avg", "exp_avg_sq", "weights")
WIDTH = 48


# --- the laws: no gradients break them -----------------------------------------------------------


class Trainee:
    """One parameter under torch's AdamW."""

    def __init__(self, betas: tuple[float, float], rate: float, decay: float, **more: Any) -> None:
        self.weight = torch.nn.Parameter(torch.randn(WIDTH))
        self.adam = torch.optim.AdamW(
            [self.weight], lr=rate, betas=betas, weight_decay=decay, **more
        )

    def update(self, gradient: torch.Tensor) -> None:
        self.weight.grad = gradient.float()
        self.adam.step()

    def held(self) -> dict[str, Any]:
        state = self.adam.state[self.weight]
        found = {"weights": self.weight.detach(), **{kind: state[kind] for kind in KINDS[:2]}}
        return {kind: tensor.numpy().astype("f8") for kind, tensor in found.items()}


@st.composite
def gradients(draw: st.DrawFn, count: int) -> list[torch.Tensor]:
    """Noise of any scale, which may be heavy, rare, one-sided, or change by orders of magnitude."""
    maker = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scale = 10.0 ** draw(st.integers(-14, 8))
    growth = draw(st.sampled_from([1.0, 1.3, 0.7, 3.0]))
    kind = draw(st.sampled_from(["gauss", "cauchy", "rare", "constant", "zero"]))
    out = []
    for step in range(count):
        noise = torch.randn(WIDTH, generator=maker)
        if kind == "cauchy":
            noise = noise / torch.randn(WIDTH, generator=maker)
        elif kind == "rare":
            noise = noise * (torch.rand(WIDTH, generator=maker) > 0.9)
        elif kind == "constant":
            noise = torch.ones(WIDTH)
        elif kind == "zero" and step % 2:
            noise = torch.zeros(WIDTH)
        out.append((noise * scale * growth ** (step % 20)).clamp(-1e15, 1e15))
    return out


@given(st.data())
def test_what_adam_makes_of_any_gradients_breaks_no_law(data: st.DataObject) -> None:
    betas = data.draw(st.sampled_from(BETAS))
    first, more = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 30))
    rate = 10.0 ** data.draw(st.integers(-6, 0))
    decay = data.draw(st.sampled_from([0.0, 0.1]))
    how = data.draw(st.sampled_from([{"foreach": False}, {"foreach": True}, {"fused": True}]))
    trainee = Trainee(betas, rate, decay, **how)
    for gradient in data.draw(gradients(first)):
        trainee.update(gradient)
    if data.draw(st.booleans()):
        betas = operated(trainee, data)
    before = trainee.held()
    for gradient in data.draw(gradients(more)):
        trainee.update(gradient)
    now = trainee.held()
    law = Moments.of(betas, more, {"float32"}, True)
    assert law.fallen(before["exp_avg_sq"], now["exp_avg_sq"]) == 0
    assert law.apart(*(tuple(side[k] for k in KINDS[:2]) for side in (before, now))) == 0
    movement = Movement.of(betas, first + more, more, rate, decay)
    if movement is not None:
        moments = before["exp_avg"], before["exp_avg_sq"]
        assert movement.share(before["weights"], now["weights"], moments)[0] == 0


def operated(trainee: Trainee, data: st.DataObject) -> tuple[float, float]:
    """Other betas, and moments that are anew, of another scale, or no true pair; Adam's step
    stays."""
    betas = data.draw(st.sampled_from(BETAS))
    trainee.adam.param_groups[0]["betas"] = betas
    state = trainee.adam.state[trainee.weight]
    for kind in KINDS[:2]:
        state[kind] *= data.draw(st.sampled_from([0.0, 1e-6, 1.0, 50.0]))
    if data.draw(st.booleans()):
        state["exp_avg"] = state["exp_avg"].roll(5)
    return betas


@pytest.mark.thinned(3)
@pytest.mark.parametrize("betas", BETAS[:3])
def test_the_worst_gradients_move_a_weight_as_far_as_the_law_says(
    betas: tuple[float, float],
) -> None:
    """Each gradient is b1 / b2 of the next one, as in the bound on the moments."""
    steps, rate = 5000, 1e-3
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=rate, betas=betas, eps=0.0)
    for step in range(1, steps + 1):
        state = adam.state[weight]
        held = [state[kind].numpy().copy() if state else None for kind in KINDS[:2]]
        before = weight.detach().numpy().copy()
        gradient = (betas[0] / betas[1]) ** (steps - step)
        weight.grad = torch.tensor([max(gradient, 1e-100)], dtype=torch.float64)
        adam.step()
    movement = Movement.of(betas, steps, 1, rate, 0.0)
    assert movement is not None
    count, share = movement.share(before, weight.detach().numpy(), (held[0], held[1]))
    assert count == 0 and 0.97 <= share <= 1


def test_betas_without_a_bound_say_nothing_of_weights() -> None:
    assert Movement.of((0.9, 0.8), 5, 1, 1e-3, 0.0) is None
    assert correction((0.9, 0.95), 1, 1) == pytest.approx(1.01 * 0.05**0.5 / 0.1)
    assert correction((0.9, 0.999), 1, 1) == 1
    assert correction((0.9, 0.95), 5000, 1) == pytest.approx(1, rel=0.02)


# --- what breaks them ----------------------------------------------------------------------------

Change = Callable[[torch.Tensor], torch.Tensor]


def rolled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(7)


FAULTS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "both moments anew": (torch.zeros_like, KINDS[:2]),
    "exp_avg anew": (torch.zeros_like, ("exp_avg",)),
    "exp_avg_sq anew": (torch.zeros_like, ("exp_avg_sq",)),
    "both moments of another rank": (rolled, KINDS[:2]),
    "exp_avg of another rank": (rolled, ("exp_avg",)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("betas", "more"), [((0.9, 0.999), 3), ((0.9, 0.95), 1)])
def test_moments_that_were_not_loaded_break_them(
    betas: tuple[float, float], more: int, fault: str
) -> None:
    torch.manual_seed(0)
    trainee = Trainee(betas, 1e-3, 0.1)
    for _ in range(40):
        trainee.update(torch.randn(WIDTH) * torch.arange(1, WIDTH + 1))
    before = trainee.held()
    change, kinds = FAULTS[fault]
    state = trainee.adam.state[trainee.weight]
    for kind in kinds:
        state[kind].copy_(change(state[kind]))
    for _ in range(more):
        trainee.update(torch.randn(WIDTH) * torch.arange(1, WIDTH + 1))
    now = trainee.held()
    law = Moments.of(betas, more, {"float32"}, True)
    assert law.telling
    broken = law.fallen(before["exp_avg_sq"], now["exp_avg_sq"])
    broken += law.apart(*(tuple(side[k] for k in KINDS[:2]) for side in (before, now)))
    assert broken >= WIDTH // 4


def test_weights_of_another_run_break_them() -> None:
    before, now = numpy.random.default_rng(0).normal(size=(2, 100))
    movement = Movement.of((0.9, 0.95), 50, 10, 1e-3, 0.1)
    assert movement is not None
    assert movement.share(before, now, (0.1 * before, before**2))[0] > 90


def test_after_many_updates_nothing_is_left_that_could_tell() -> None:
    assert not Moments.of((0.9, 0.95), 100, {"float32"}, True).telling
    assert Moments.of((0.9, 0.999), 100, {"float32"}, True).telling


# --- the same elements in steps that are cut in other ways ---------------------------------------


@given(st.data())
def test_each_element_is_found_where_it_lies(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    whole = numpy.arange(numpy.prod(shape)).reshape(shape)
    sides = []
    for _ in range(2):
        held = {}
        found = data.draw(cut_parts.steps(shape, whole))
        for part, tensor in found:
            held[part.cut, part.first] = tensor
        runs = [(run, held[run.part.cut, run.part.first]) for run in _runs(found)]
        sides.append(sorted(runs, key=lambda item: item[0].first))
    seen = []
    for first, end, rows in aligned.shared([[run for run, _ in side] for side in sides]):
        tensors = [{id(run): held for run, held in side} for side in sides]
        for row, names in zip(rows, tensors, strict=True):
            start = row.start + first - row.first
            assert names[id(row)][start : start + end - first].tolist() == [*range(first, end)]
        seen += range(first, end)
    assert seen == [*range(whole.size)]


def _runs(found: Any) -> Iterator[Any]:
    for part, _ in found:
        yield from aligned.runs(part)


# --- real trainers -------------------------------------------------------------------------------


def verdicts(root: Path, step: int, before: int) -> dict[str, str]:
    """Subject → verdict; where any of a subject differs, it differs."""
    seen: dict[str, str] = {}
    for each in look.verify(Run.open(root), step, against=before).since:
        if seen.get(each.subject) != DIFFERS:
            seen[each.subject] = each.verdict
    return seen


def engine(root: Path, options: Options, step: int, more: int, **load: Any) -> None:
    """A new engine that loads a step as `load` says, trains on and saves."""
    made = deepspeed_engine.build(options)
    loaded, _ = made.load_checkpoint(str(root), tag=f"global_step{step}", **load)
    assert loaded is not None
    deepspeed_engine.train(made, more)
    made.save_checkpoint(str(root), client_state=deepspeed_engine.client(step + more))


ENGINES = [
    Options(stage=stage, dtype=dtype, scheduler=scheduler, optimizer=optimizer)
    for stage, dtype, scheduler, optimizer in (
        (0, "fp32", None, "adamw"), (1, "bf16", "CosineAnnealingLR", "adamw"),
        (1, "fp16", "LinearLR", "adamw"), (2, "bf16", "CosineAnnealingWarmRestarts", "adamw"),
        (2, "fp32", "StepLR", "adamw"), (3, "bf16", "LambdaLR", "adamw"),
        (3, "fp32", "SequentialLR", "adamw"), (1, "fp32", "WarmupLR", "torch.Adam"),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """Step 12 of each of `ENGINES`, in a folder that is the caller's own."""
    with deepspeed_engine.process_group():
        folder = tmp_path_factory.mktemp("engines")

        def run(number: int) -> Path:
            root = folder / str(number)
            if not root.exists():
                deepspeed_engine.make(root, ENGINES[number], 12)
            return Path(shutil.copytree(root, tmp_path_factory.mktemp("run") / "run"))

        yield run


@pytest.mark.thinned(4)
@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_an_engine_that_loads_everything_goes_on(began: Callable[[int], Path], number: int) -> None:
    root = began(number)
    for step in (12, 14, 16):
        engine(root, ENGINES[number], step, 2)
        seen = verdicts(root, step + 2, step)
        assert DIFFERS not in seen.values()
        for subject in ("Adam's counter", "data", "moments", "parameters"):
            assert seen[subject] == AGREES, subject
    assert ready(Run.open(root), level=4).ready


@pytest.mark.thinned(4)
@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_an_engine_without_its_optimizer_began_anew(
    began: Callable[[int], Path], number: int
) -> None:
    """As transformers#48569 and NeMo-RL#3171: the weights go on, the optimizer is cold."""
    root = began(number)
    engine(root, ENGINES[number], 12, 2, load_optimizer_states=False)
    seen = verdicts(root, 14, 12)
    assert seen["moments"] == DIFFERS and seen["Adam's counter"] == DIFFERS
    assert seen["data"] == AGREES
    engine(root, ENGINES[number], 14, 2)  # its rate is not on the curve that its schedule names
    assert DIFFERS not in verdicts(root, 16, 14).values()


@pytest.mark.parametrize("number", [1, 4, 6])
def test_moments_that_are_lost_beside_a_counter_that_is_not_are_seen(
    began: Callable[[int], Path], number: int
) -> None:
    """The counter came back, and the moments did not: nothing else shows it."""
    root = began(number)
    made = deepspeed_engine.build(ENGINES[number])
    made.load_checkpoint(str(root))
    for state in deepspeed_engine.live(made).state.values():
        for kind in KINDS[:2]:
            if kind in state:
                state[kind].zero_()
    deepspeed_engine.train(made, 2)
    made.save_checkpoint(str(root), client_state=deepspeed_engine.client(14))
    seen = verdicts(root, 14, 12)
    assert (seen["moments"], seen["Adam's counter"]) == (DIFFERS, AGREES)
    assert ready(Run.open(root), level=3).ready
    start = ready(Run.open(root), level=4)
    assert start.found[0].what.startswith("step 14 does not go on from step 12: ")
    assert (start.sound, str(start.next)) == (14, str(start.found[0].next))


def test_betas_that_change_at_each_update_are_not_compared(tmp_path: Path) -> None:
    options = Options(dtype="bf16", scheduler="OneCycleLR")
    with deepspeed_engine.process_group():
        deepspeed_engine.make(tmp_path, options, 12)
        engine(tmp_path, options, 12, 2)
    seen = verdicts(tmp_path, 14, 12)
    assert DIFFERS not in seen.values() and "moments" not in seen


def test_data_that_begins_anew_is_seen(began: Callable[[int], Path]) -> None:
    root = began(1)
    made = deepspeed_engine.build(ENGINES[1])
    made.load_checkpoint(str(root))
    deepspeed_engine.train(made, 2)
    made.save_checkpoint(str(root), client_state={**deepspeed_engine.client(14), **_anew(2)})
    assert verdicts(root, 14, 12)["data"] == DIFFERS


def _anew(step: int) -> dict[str, Any]:
    return {"args": deepspeed_engine.client(step)["args"]}


def test_a_schedule_that_begins_anew_is_seen(began: Callable[[int], Path]) -> None:
    root = began(1)
    engine(root, ENGINES[1], 12, 2, load_lr_scheduler_states=False)
    seen = verdicts(root, 14, 12)
    assert (seen["lr"], seen["moments"]) == (DIFFERS, AGREES)


def test_the_bundled_trainer_goes_on(trained: Trained) -> None:
    root = trained()
    for before, step in ((2, 4), (4, 6), (6, 8), (2, 8)):
        seen = verdicts(root, step, before)
        assert set(seen.values()) == {AGREES}
        assert {"Adam's counter", "data", "lr", "moments", "parameters", "weights"} == {*seen}


@pytest.mark.slow
def test_two_ranks_that_load_each_others_moments_are_seen(trained: Trained) -> None:
    """A shard of the other rank has the right sizes, and nothing is printed."""
    root = trained(ranks=2, zero=1)
    shards = sorted((root / "global_step8").glob("*optim_states.pt"))
    assert len(shards) == 2
    contents = [shard.read_bytes() for shard in shards]
    for shard, content in zip(shards, reversed(contents), strict=True):
        shard.write_bytes(content)
    launch(f"--config={root / 'train.yaml'}", "train_iters=9", "save_interval=1", ranks=2)
    for shard, content in zip(shards, contents, strict=True):
        shard.write_bytes(content)
    assert verdicts(root, 9, 8)["moments"] == DIFFERS
