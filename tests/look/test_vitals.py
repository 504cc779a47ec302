"""Vital signs: the bound on moments, and no alarm on what real optimizers save."""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.formats import Adam
from ckptsurgeon.look.vitals.bound import Edited, limit, ratio
from ckptsurgeon.recipe.file import from_data
from tests.look.conftest import EARLIER, facts
from tests.support import deepspeed_engine
from tests.support.deepspeed_engine import Options

# --- the bound -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("betas", "known"),
    [((0.9, 0.95), 1.1650), ((0.9, 0.98), 1.6977), ((0.9, 0.99), 2.3452), ((0.9, 0.999), 7.2703)],
)
def test_the_worst_gradients_reach_the_bound_and_do_not_pass_it(
    betas: tuple[float, float], known: float
) -> None:
    """Cauchy and Schwarz are equal where each gradient is b1 / b2 of the next one."""
    assert ratio(*betas, None) == pytest.approx(known, abs=1e-4)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = torch.optim.AdamW([parameter], betas=betas)
    steps = 120
    for step in range(1, steps + 1):
        parameter.grad = torch.full((1,), (betas[0] / betas[1]) ** (steps - step)).double()
        adam.step()
        state = adam.state[parameter]
        reached = float(state["exp_avg"] / state["exp_avg_sq"].sqrt())
        most = ratio(*betas, step)
        assert most is not None and reached <= most * (1 + 1e-9)
    assert reached == pytest.approx(most, rel=1e-9)


def test_nothing_is_said_where_there_is_no_bound() -> None:
    assert ratio(0.9, 0.8, None) is None and ratio(0.9, 0.0, None) is None
    assert ratio(0.0, 0.99, None) == pytest.approx(10)
    known = Adam(100, (0.9, 0.95), 1e-8, 1e-3, True)
    assert limit(known._replace(lawful=False)) is limit(known._replace(betas=None)) is None


def test_betas_that_were_edited_widen_the_bound_until_the_old_means_are_gone() -> None:
    """The hardest case: gradients that reach the old bound, then betas with a tighter one."""
    old, new = (0.9, 0.999), (0.9, 0.95)
    now = Adam(None, new, 1e-8, 1e-3, True)
    assert limit(now, [Edited(old, 19)]) is None
    first, second = 0.0, 0.0
    for step in range(400):
        gradient = (old[0] / old[1]) ** (399 - step)
        first = old[0] * first + (1 - old[0]) * gradient
        second = old[1] * second + (1 - old[1]) * gradient**2
    plain, passed = limit(now), 0
    assert plain is not None
    for updates in range(1, 200):
        first, second = new[0] * first, new[1] * second
        most = limit(now, [Edited(old, updates)])
        if most is not None:
            assert first / math.sqrt(second) <= most
            passed += first / math.sqrt(second) > plain
    assert limit(now, [Edited(old, 1000)]) == pytest.approx(plain)


# --- no false alarm: torch's own optimizers, at every step ---------------------------------------

HISTORIES: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "gaussian": lambda step, g: torch.randn(64, generator=g),
    "cauchy": lambda step, g: torch.randn(64, generator=g) / torch.randn(64, generator=g),
    "growing": lambda step, g: torch.full((64,), 1.06**step),
    "rare": lambda step, g: torch.rand(64, generator=g) * (torch.rand(64, generator=g) > 0.9),
    "tiny": lambda step, g: torch.randn(64, generator=g) * 1e-21,
    "huge": lambda step, g: torch.randn(64, generator=g) * 1e17,
}


def hugging_face(root: Path, optimizer: torch.optim.Optimizer, step: int) -> None:
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    schedule = {"last_epoch": step, "_step_count": step + 1, "base_lrs": [1e-3], "_last_lr": [1e-3]}
    torch.save(schedule, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "amsgrad", "Adamax", "SGD"])
@pytest.mark.long
def test_no_step_of_a_torch_optimizer_raises_an_alarm(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Every kind of gradients in one run; the rates make the weights move, too."""
    more: dict[str, Any] = {"betas": (0.9, 0.95)} if name not in ("SGD", "Adamax") else {}
    kind = getattr(torch.optim, "AdamW" if name == "amsgrad" else name)
    if name == "amsgrad":
        more["amsgrad"] = True
    weights = [torch.nn.Parameter(torch.randn(64).to(dtype)) for _ in HISTORIES]
    optimizer = kind(weights, lr=1e-3, **more)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 25):
        for weight, history in zip(weights, HISTORIES.values(), strict=True):
            weight.grad = history(step, generator).to(dtype)
        optimizer.step()
        hugging_face(tmp_path, optimizer, step)
        assert facts(tmp_path, step) == ()
    assert facts(tmp_path, 24, against=4) == ()
    compared = look.verify(Run.open(tmp_path), 24, level=4).not_compared
    assert any("bound" in text for text in compared) == (name not in ("Adam", "AdamW"))


def test_thousands_of_tensors_are_read_with_few_open_files(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.randn(4)) for _ in range(600)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    for weight in weights:
        weight.grad = torch.randn(4)
    optimizer.step()
    hugging_face(tmp_path, optimizer, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 64, hard))
    try:
        assert facts(tmp_path, 1) == ()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- real DeepSpeed, and what is done to it ------------------------------------------------------


@pytest.mark.long
def test_no_step_of_a_real_engine_raises_an_alarm(engines: Path) -> None:
    run = Run.open(engines)
    steps = run.steps()
    for step in steps:
        told = look.verify(run, step, level=4)
        assert (told.findings, told.not_compared) == ((), ())
    for before, step in pairwise(steps):
        told = look.verify(run, step, against=before)
        unsaid = [f"lr: step {before} does not say its rates to come"]  # it has no scheduler
        if step - before > 13:
            unsaid.append("moments: of exp_avg_sq")
        assert (told.findings, told.level) == ((), 4)
        assert all(map(str.startswith, told.not_compared, unsaid))
        assert len(told.not_compared) == len(unsaid)


@pytest.mark.parametrize(
    "recipe",
    [
        {"reset": ["moments"]},
        {"reset": ["moments"], "moments": {"params": "weight"}},
        {"reset": ["moments"], "moments": {"only": "exp_avg"}},
        {"set": {"beta1": 0.8, "beta2": 0.99}},
        {"set": {"lr": "0.5x", "eps": 1e-6, "weight_decay": 0.3}},
        {"rollback": {"to": EARLIER}},
    ],
    ids=["reset", "reset-part", "reset-exp_avg", "betas", "rates", "rollback"],
)
def test_our_own_edits_raise_no_alarm(engines: Path, tmp_path: Path, recipe: Any) -> None:
    root = tmp_path / "run"
    shutil.copytree(engines, root)
    surgery.apply(Run.open(root), plan(Run.open(root), from_data(recipe)))
    run = Run.open(root)
    assert facts(root) == ()
    before = [step for step in run.steps() if step < run.latest()][-1]
    assert facts(root, against=before) == ()


def test_what_is_trained_after_an_edit_of_betas_raises_none(tmp_path: Path) -> None:
    """The receipt is read until the old means are gone."""
    root = tmp_path / "run"
    options = Options(model="wide")
    with deepspeed_engine.process_group():
        deepspeed_engine.make(root, options, 30)
        edit = from_data({"set": {"beta1": 0.95, "beta2": 0.92}})
        surgery.apply(Run.open(root), plan(Run.open(root), edit))
        engine = deepspeed_engine.build(options)
        engine.load_checkpoint(str(root))
        for step in range(31, 60):
            deepspeed_engine.train(engine, 1)
            engine.save_checkpoint(str(root), client_state=deepspeed_engine.client(step))
            told = look.verify(Run.open(root), step, level=4)
            assert told.findings == ()
            soon = any("betas were edited" in text for text in told.not_compared)
            assert soon == (step - 30 < 1 / (1 - 0.92))
