"""torch's own schedulers load the edited state, and step on from the rate that was promised."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from tests.support import deepspeed_engine
from tests.support.deepspeed_engine import PEAK, Options, make, process_group, resume, schedulers
from tests.support.snapshot import snapshot
from tests.support.trainer_step import save_step

MORE = 8


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def edited(root: Path, **wanted: Any) -> float:
    """The lr that the plan promises; it is applied, verified, and empty when made again."""
    run = Run.open(root)
    recipe = from_data({"set": wanted})
    made = plan(run, recipe)
    surgery.apply(run, made)
    assert plan(Run.open(root), from_data(dict(made.recipe))).empty
    assert look.verify(Run.open(root)).findings == ()
    assert made.promise is not None
    return made.promise.lr


def all_rates(options: Options, root: Path) -> list[list[float]]:
    """Of a run that had these options from the start: the rates of MORE updates after step 6."""
    make(root, options)
    rates: list[list[float]] = resume(root, options, MORE)["rates"]
    return rates


@pytest.mark.thinned(4)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", schedulers())
def test_a_halved_lr_halves_every_rate_to_come(tmp_path: Path, name: str, stage: int) -> None:
    options = Options(stage=stage, scheduler=name)
    before = all_rates(options, tmp_path / "run")
    promised = edited(tmp_path / "run", lr="0.5x", **floor(name, 0.5))
    after = resume(tmp_path / "run", options, MORE)
    assert after["rates"] == [pytest.approx([rate / 2 for rate in step]) for step in before]
    assert after["lr"] == after["rates"][0] == [promised, promised]


def floor(name: str, share: float) -> dict[str, float]:
    """The end of a cosine is absolute: half of everything includes it."""
    return {"min_lr": 1e-5 * share} if name in ("CosineAnnealingLR", "SequentialLR") else {}


@pytest.mark.parametrize("stage", [0, 1])
def test_without_a_scheduler_groups_keep_their_proportions(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the two halves of Muon have: the first group's rate is the smaller one here."""
    plain = deepspeed_engine._groups

    def two_rates(model: Any, options: Options) -> list[dict[str, Any]]:
        first, second = plain(model, options)
        return [{**first, "lr": PEAK / 10}, second]

    monkeypatch.setattr(deepspeed_engine, "_groups", two_rates)
    options = Options(stage=stage)
    make(tmp_path, options)
    edited(tmp_path, lr="0.5x")
    halves = pytest.approx([PEAK / 20, PEAK / 2])
    assert resume(tmp_path, options)["rates"] == [halves] * 3
    edited(tmp_path, lr=2e-3)
    assert resume(tmp_path, options)["rates"] == [pytest.approx([2e-4, 2e-3])] * 3


def test_the_peak_is_what_a_recipe_sets(tmp_path: Path) -> None:
    """Not the rate at the position: a run with that peak from the start has the same rates."""
    make(tmp_path / "run", Options(scheduler="CosineAnnealingLR"))
    edited(tmp_path / "run", lr=4e-4)
    run = resume(tmp_path / "run", Options(scheduler="CosineAnnealingLR"), MORE)["rates"]
    born = all_rates(Options(scheduler="CosineAnnealingLR", lr=4e-4), tmp_path / "born")
    assert run == [pytest.approx(step) for step in born]


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "OneCycleLR-linear"])
def test_a_longer_schedule_is_the_one_of_a_run_that_had_it(tmp_path: Path, name: str) -> None:
    from torch.optim import lr_scheduler

    make(tmp_path / "run", Options(scheduler=name))
    edited(tmp_path / "run", decay=40, **({"warmup": 12} if "OneCycle" in name else {}))
    rates = resume(tmp_path / "run", Options(scheduler=name), 33)["rates"]
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=PEAK)
    if name == "CosineAnnealingLR":
        born: Any = lr_scheduler.CosineAnnealingLR(optimizer, 40, 1e-5)
    else:
        born = lr_scheduler.OneCycleLR(
            optimizer,
            PEAK,
            total_steps=40,
            pct_start=0.3,
            anneal_strategy="linear" if "linear" in name else "cos",
            three_phase="linear" in name,
        )
    wanted = []
    for _ in range(39):
        wanted.append([optimizer.param_groups[0]["lr"]] * 2)
        optimizer.step()
        born.step()
    assert rates == [pytest.approx(step) for step in wanted[6:39]]


def born(name: str, steps: int) -> list[list[float]]:
    """The rates of the first updates of a new run, by torch alone."""
    import torch

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=PEAK)
    scheduler, rates = schedulers()[name](optimizer), []
    for _ in range(steps):
        rates.append([optimizer.param_groups[0]["lr"]] * 2)
        optimizer.step()
        scheduler.step()
    return rates


MOVABLE = sorted(set(schedulers()) - {"CosineAnnealingWarmRestarts", "SequentialLR"})


@pytest.mark.thinned(4)
@pytest.mark.parametrize("position", [2, 11])
@pytest.mark.parametrize("name", MOVABLE)
def test_a_schedule_goes_on_from_another_position(tmp_path: Path, name: str, position: int) -> None:
    """IDEFICS-80B's came back at 0: last_epoch and _step_count were set by hand, and the rates."""
    make(tmp_path, Options(scheduler=name))
    before = look.inspect(Run.open(tmp_path)).promise.lr
    promised = edited(tmp_path, position=position)
    after = resume(tmp_path, Options(scheduler=name), 6)["rates"]
    expected = born(name, position + 6)[position:]
    assert after[0][0] == promised
    if name == "LambdaLR":  # its function is in code
        assert promised == before
        after, expected = after[1:], expected[1:]
    assert after == [pytest.approx(step) for step in expected]


def test_a_schedule_that_cannot_be_moved_is_refused(tmp_path: Path) -> None:
    for name in ("CosineAnnealingWarmRestarts", "SequentialLR"):
        make(tmp_path / name, Options(scheduler=name))
        with pytest.raises(SurgeryError, match="keeps no"):
            plan(Run.open(tmp_path / name), from_data({"set": {"position": 3}}))
    make(tmp_path / "none", Options())
    with pytest.raises(SurgeryError, match="keeps no scheduler position"):
        plan(Run.open(tmp_path / "none"), from_data({"set": {"position": 3}}))


def test_what_only_code_knows_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "run", Options(scheduler="LambdaLR"))
    run = Run.open(tmp_path / "run")
    for wanted in ({"warmup": 10}, {"decay": 10}, {"min_lr": 1e-6}, {"decay_style": "linear"}):
        with pytest.raises(SurgeryError, match="LambdaLR keeps no"):
            plan(run, from_data({"set": wanted}))


def test_a_schedule_that_cannot_be_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "run", Options(scheduler="OneCycleLR"))
    run = Run.open(tmp_path / "run")
    for wanted in ({"decay": 5}, {"warmup": 30}, {"warmup": 1}, {"decay_style": "constant"}):
        with pytest.raises(UsageError):
            plan(run, from_data({"set": wanted}))
    make(tmp_path / "cosine", Options(scheduler="CosineAnnealingLR"))
    with pytest.raises(UsageError, match="below min_lr"):
        plan(Run.open(tmp_path / "cosine"), from_data({"set": {"lr": 1e-6}}))


WEIRD = [None, "x", [], {}, -1, float("nan"), float("inf"), 10**400, [None], {"a": 1}]


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "SequentialLR", "StepLR"])
@pytest.mark.long
def test_a_state_that_no_trainer_saves_never_becomes_a_rate(tmp_path: Path, name: str) -> None:
    import torch

    make(tmp_path, Options(stage=0, scheduler=name))
    file = tmp_path / "global_step6" / "mp_rank_00_model_states.pt"
    good = torch.load(file, weights_only=False)
    for key in good["lr_scheduler"]:
        for value in WEIRD:
            torch.save({**good, "lr_scheduler": {**good["lr_scheduler"], key: value}}, file)
            try:
                made = plan(Run.open(tmp_path), from_data({"set": {"lr": 1e-4}}))
            except SurgeryError:
                continue
            assert made.promise is not None and made.promise.lr is not None
            assert 0 <= made.promise.lr < 1


def test_a_state_of_no_known_class_is_refused(tmp_path: Path) -> None:
    import torch

    make(tmp_path / "run", Options(scheduler="StepLR"))
    for file in (tmp_path / "run" / "global_step6").glob("*model_states.pt"):
        tree = torch.load(file, weights_only=False)
        tree["lr_scheduler"]["momentum_of_mine"] = 3
        torch.save(tree, file)
    with pytest.raises(SurgeryError, match="class of the saved scheduler is not known"):
        plan(Run.open(tmp_path / "run"), from_data({"set": {"lr": 1e-4}}))


def test_the_position_of_a_scheduler_in_a_file_of_its_own(tmp_path: Path) -> None:
    """As Hugging Face's Trainer saves it: optimizer.pt and scheduler.pt."""
    import torch

    def pair() -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=PEAK)
        return optimizer, schedulers()["CosineAnnealingLR"](optimizer)

    optimizer, scheduler = pair()
    for _ in range(6):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
    folder = tmp_path / "checkpoint-6"
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text('{"global_step": 6, "log_history": []}')
    promised = edited(tmp_path, position=11)
    optimizer, scheduler = pair()
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt"))
    assert (scheduler.last_epoch, scheduler._step_count) == (11, 12)
    rates = []
    for _ in range(4):
        rates.append([optimizer.param_groups[0]["lr"]] * 2)
        optimizer.step()
        scheduler.step()
    assert rates[0][0] == promised
    assert rates == [pytest.approx(step) for step in born("CosineAnnealingLR", 15)[11:]]


def saved(folder: Path, scheduler: Callable[[Any], Any], steps: int, lr: Any = PEAK) -> Any:
    """A step of Hugging Face's Trainer after so many steps of the scheduler, which is returned."""
    import torch

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr)
    made = scheduler(optimizer)
    for _ in range(steps):
        optimizer.step()
        made.step()
    save_step(folder, optimizer.state_dict(), made.state_dict(), steps)
    return made


def test_a_class_with_the_keys_of_torchs_and_another_rule_is_refused(tmp_path: Path) -> None:
    import torch

    class Warming(torch.optim.lr_scheduler.CosineAnnealingLR):
        """Its warm-up is in its code, and not among its keys."""

        def get_lr(self) -> list[Any]:
            return [min(1.0, (self.last_epoch + 1) / 9) * rate for rate in self.base_lrs]

    def warming(optimizer: Any) -> Any:
        return Warming(optimizer, T_max=20)

    saved(tmp_path / "checkpoint-6", warming, 6)
    for wanted in ({"lr": 1e-4}, {"min_lr": 1e-6}, {"position": 3}):
        with pytest.raises(SurgeryError, match="CosineAnnealingLR at step 6 gives"):
            plan(Run.open(tmp_path), from_data({"set": wanted}))


def test_a_state_without_the_last_rates_is_compared_with_nothing(tmp_path: Path) -> None:
    import torch

    saved(tmp_path / "checkpoint-6", lambda o: schedulers()["CosineAnnealingLR"](o), 6)
    state = torch.load(path := tmp_path / "checkpoint-6" / "scheduler.pt")
    del state["_last_lr"]
    torch.save(state, path)
    assert plan(Run.open(tmp_path), from_data({"set": {"lr": 1e-4}})).promise is not None


@pytest.mark.long
@given(
    name=st.sampled_from(["CosineAnnealingLR", "StepLR", "LinearLR", "PolynomialLR", "OneCycleLR"]),
    end=st.integers(2, 400),
    passed=st.floats(0.0, 1.0),
    floor=st.sampled_from([0.0, 1e-6]),
    tensor=st.booleans(),
)
@example(name="OneCycleLR", end=2, passed=0.0, floor=0.0, tensor=False)  # warm-up ends at -0.1
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_class_of_torch_is_taken_for_another(
    tmp_path: Path, name: str, end: int, passed: float, floor: float, tensor: bool
) -> None:
    """Wherever its schedule stands, and with the errors of its own arithmetic."""
    import torch
    from torch.optim import lr_scheduler

    kinds: dict[str, Callable[[Any], Any]] = {
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, end, eta_min=floor),
        "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=max(1, end // 3)),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=end),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, end, power=2.0),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, PEAK, total_steps=end + 1),
    }
    root = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    rate = torch.tensor(PEAK) if tensor and name != "OneCycleLR" else PEAK
    steps = int(passed * end)
    with warnings.catch_warnings():  # of a step that has no gradients
        warnings.simplefilter("ignore")
        saved(root / f"checkpoint-{steps}", kinds[name], steps, rate)
    for wanted in ({"lr": PEAK / 2}, {"position": steps // 2}):
        assert plan(Run.open(root), from_data({"set": wanted})).promise is not None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_rate_in_a_tensor_is_promised_as_the_tensor_holds_it(tmp_path: Path, dtype: str) -> None:
    """As torch.compile and CUDA graphs want it: 3e-4 is no number of float32."""
    import torch

    def adam() -> Any:
        rate = torch.tensor(PEAK, dtype=getattr(torch, dtype))
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate)

    optimizer = adam()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    file = tmp_path / "state_1.pt"
    torch.save({"optimizer": optimizer.state_dict()}, file)
    before = snapshot(tmp_path)
    run = Run.open(tmp_path, "torch:state_{step}.pt=optimizer")
    made = plan(run, from_data({"set": {"lr": 3e-4}}))
    assert surgery.apply(run, made)
    assert plan(run, from_data(dict(made.recipe))).empty
    optimizer = adam()
    optimizer.load_state_dict(torch.load(file)["optimizer"])
    assert made.promise is not None
    assert optimizer.param_groups[0]["lr"].item() == made.promise.lr == pytest.approx(3e-4)
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(tmp_path) == before


def test_a_rate_that_numpy_computed_is_a_number(tmp_path: Path) -> None:
    """A lambda with numpy's cosine leaves numpy's numbers in the groups and in the scheduler."""
    import numpy as np
    import torch

    def pair() -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=PEAK)
        falls = lambda step: 0.5 * (1 + np.cos(np.pi * step / 20))  # noqa: E731
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, falls)

    def rates(optimizer: Any, schedule: Any) -> list[float]:
        used = []
        for _ in range(3):
            used.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
            optimizer.step()
            schedule.step()
        return used

    optimizer, schedule = pair()
    rates(optimizer, schedule)
    assert isinstance(optimizer.param_groups[0]["lr"], np.float64)
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    wanted = [rate / 2 for rate in rates(optimizer, schedule)]
    before = snapshot(tmp_path)
    promised = edited(tmp_path, lr="0.5x")
    optimizer, schedule = pair()
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=False))
    schedule.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=False))
    used = rates(optimizer, schedule)
    assert used[0] == promised
    assert used == pytest.approx(wanted)
    surgery.apply(Run.open(tmp_path), surgery.plan_undo(Run.open(tmp_path)))
    assert snapshot(tmp_path) == before
