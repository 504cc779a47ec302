"""MMEngine's own Runner trains, is edited by its pages, and resumes; its schedulers follow a new
peak. Run by `make test-formats`."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.logged import own
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork
from tests.support.launch import by_step
from tests.support.newest_megatron import beside
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
KINDS = {"mmengine": (8, 4, 4), "mmengine-epochs": (12, 2, 6)}
"""Page → updates, a step to go back to, and its updates."""
PEAK, FLOOR = 1e-2, 1e-4
WARM = {"type": "LinearLR", "by_epoch": False, "start_factor": 0.1, "end": 3}
COSINE = {
    "type": "CosineAnnealingLR", "by_epoch": False, "begin": 3, "end": 20, "T_max": 17,
    "eta_min": FLOOR,
}  # fmt: skip


def trained(name: str, root: Path, *words: object) -> dict[int, Any]:
    """What each update of this start used, by its number."""
    epochs = ["--epochs"] * (name == "mmengine-epochs")
    schedules = json.dumps([WARM, COSINE])
    given = (root, KINDS[name][0], schedules, "--best", *epochs, *words)
    # Its loader does not say whether it takes weights alone, which torch wants since 2.6.
    usual = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    return by_step("tests.support.mmengine_trainer", *given, environment=usual)


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[int, Any]]]:
    """By the page a run, and what its updates used."""
    needed()
    roots = {name: tmp_path_factory.mktemp("began") / name for name in KINDS}
    return {name: (root, trained(name, root)) for name, root in roots.items()}


def needed() -> None:
    if not (beside("trainers") / "mmengine").is_dir():
        pytest.skip("make test-formats installs MMEngine")


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(began: dict[str, tuple[Path, Any]], name: str, tmp_path: Path) -> Path:
    """A copy where the trainer may have written it: its pointer has its path."""
    root = Path(shutil.copytree(began[name][0], tmp_path / name))
    pointer = root / "last_checkpoint"
    pointer.write_text(str(root / Path(pointer.read_text()).name))
    return root


def test_it_is_known_and_resumes_what_was_promised(
    began: dict[str, tuple[Path, Any]], root: Path, name: str
) -> None:
    _, to, updates = KINDS[name]
    assert Run.open(root).format.name == name
    before = snapshot(root)
    wanted = {"lr": PEAK / 2, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3}
    promise = operate(root, {"rollback": {"to": to}, "set": wanted}).promise
    tables = [*root.glob("*/vis_data/*.json")]
    assert len(tables) == 2  # one is called by the time of the start
    for table in tables:
        rows = [json.loads(line) for line in table.read_text().splitlines()]
        assert [row["iter"] for row in rows if "iter" in row] == [*range(1, updates + 1)]
    saved = shutil.copytree(root, root.with_name("saved"))
    said = trained(name, root, "--resume")
    first = said[updates + 1]
    assert [*said] == [*range(updates + 1, KINDS[name][0] + 1)] and promise is not None
    assert (first["lr"], first["betas"][1], first["eps"]) == (promise.lr, 0.9, 1e-6)
    assert first["weight_decay"] == 0.3 and first["norm"] > 0
    assert first["adam_step"] == promise.adam_step == updates
    for number, used in said.items():  # half of the peak, the same floor
        plain = began[name][1][number]["lr"] - FLOOR
        share = (PEAK / 2 - FLOOR) / (PEAK - FLOOR)
        assert used["lr"] == pytest.approx(plain * share + FLOOR, rel=1e-6)
    shutil.rmtree(root)
    saved.rename(root)
    take_back(root, before)


def test_a_cooldown_is_resumed(root: Path, name: str) -> None:
    """By the LinearLR that made the warm-up; the cosine rests."""
    _, to, updates = KINDS[name]
    before = snapshot(root)
    promise = operate(root, {"rollback": {"to": to}, "cooldown": {"steps": 4}}).promise
    cooled = shutil.copytree(root, root.with_name("cooled"))
    said = trained(name, root, "--resume")
    assert promise is not None and promise.lr is not None and [*said][:1] == [updates + 1]
    for k, used in enumerate(said.values()):
        assert used["lr"] == pytest.approx(promise.lr * max(0, 1 - k / 4), rel=1e-9, abs=1e-15)
    shutil.rmtree(root)
    cooled.rename(root)
    take_back(root, before)


def test_a_reset_and_a_fork_are_resumed(root: Path, name: str, tmp_path: Path) -> None:
    """The pointer of the fork names its own file, and not that of the first run."""
    _, to, updates = KINDS[name]
    fork(Run.open(root), to, tmp_path / "branch", from_data({"reset": ["moments"]}), "copy")
    first = trained(name, tmp_path / "branch", "--resume")[updates + 1]
    assert (first["adam_step"], first["norm"]) == (0, 0)


def test_its_log_is_read(root: Path, name: str) -> None:
    loss = own(Run.open(root), {}).kept["loss"]
    assert [*loss.steps] == [*range(1, KINDS[name][0] + 1)]
    assert look.verify(Run.open(root), level=4).findings == ()


# --- its schedulers ------------------------------------------------------------------------------

LENGTH = 12
LINEAR = st.builds(
    lambda start, end: {"type": "LinearLR", "start_factor": start, "end": end},
    st.sampled_from([0.1, 0.5]), st.integers(2, 5),
)  # fmt: skip
RESTARTS = {"periods": [4, 3], "restart_weights": [1, 0.5]}
LATER = st.one_of(
    st.builds(lambda size: {"type": "StepLR", "step_size": size}, st.integers(1, 4)),
    st.builds(lambda at: {"type": "MultiStepLR", "milestones": at}, st.just([4, 7])),
    st.just({"type": "ExponentialLR", "gamma": 0.9}),
    st.just({"type": "ConstantLR", "factor": 0.5, "end": 9}),
    st.builds(
        lambda floor: {"type": "CosineAnnealingLR", "T_max": 20, "eta_min": floor},
        st.sampled_from([0.0, 1e-3]),
    ),
    st.just({"type": "CosineAnnealingLR", "T_max": 20, "eta_min_ratio": 0.1}),
    st.builds(
        lambda power: {"type": "PolyLR", "power": power, "eta_min": 1e-3, "end": 20},
        st.sampled_from([0.9, 1.0, 2.0]),
    ),
    st.builds(
        lambda floor: {"type": "CosineRestartLR", **RESTARTS, **floor},
        st.sampled_from([{"eta_min": 0}, {"eta_min": 1e-3}, {"eta_min_ratio": 0.1}]),
    ),
    st.builds(
        lambda shape: {
            "type": "OneCycleLR", "eta_max": PEAK, "total_steps": 20, **shape
        },
        st.sampled_from([{"three_phase": True}, {"anneal_strategy": "linear"}]),
    ),
)  # fmt: skip


def wrapped(peak: float, groups: int) -> Any:
    """An optimizer of `groups`, of which the second has half the rate, as MMEngine wraps it."""
    from mmengine.optim import OptimWrapper

    torch.manual_seed(1)
    sets = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "lr": peak / 2**i} for i in range(groups)
    ]
    return OptimWrapper(torch.optim.AdamW(sets, lr=peak))


def scheduled(adam: Any, configs: list[dict[str, Any]]) -> list[Any]:
    from mmengine.optim import scheduler

    return [
        getattr(scheduler, each["type"])(
            adam, **{"by_epoch": False, **{k: v for k, v in each.items() if k != "type"}}
        )
        for each in configs
    ]


def stepped(adam: Any, schedules: list[Any], updates: int) -> Iterator[list[float]]:
    """The rates of so many updates."""
    for _ in range(updates):
        yield [group["lr"] for group in adam.param_groups]
        for group in adam.optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones(2)
        adam.step()
        for schedule in schedules:
            schedule.step()


def rates_from_the_start(peak: float, configs: list[dict[str, Any]], groups: int) -> list[Any]:
    adam = wrapped(peak, groups)
    return [*stepped(adam, scheduled(adam, configs), LENGTH)]


def saved(root: Path, adam: Any, schedules: list[Any], at: int) -> Run:
    """A run with one step, as the Runner names what is in it."""
    held = {
        "meta": {"iter": at, "epoch": 0},
        "state_dict": {},
        "message_hub": {},
        "optimizer": adam.state_dict(),
        "param_schedulers": [schedule.state_dict() for schedule in schedules],
    }
    torch.save(held, root / f"iter_{at}.pth")
    (root / "last_checkpoint").write_text(str(root / f"iter_{at}.pth"))
    return Run.open(root)


def resumed(run: Run, configs: list[dict[str, Any]], groups: int) -> tuple[Any, list[Any]]:
    (file,) = run.root.glob("iter_*.pth")
    loaded = torch.load(file, weights_only=False)
    adam = wrapped(PEAK, groups)
    schedules = scheduled(adam, configs)
    adam.load_state_dict(loaded["optimizer"])
    for schedule, state in zip(schedules, loaded["param_schedulers"], strict=True):
        schedule.load_state_dict(state)
    return adam, schedules


def one_after_another(
    first: dict[str, Any] | None, later: dict[str, Any], overlap: int = 0
) -> list[dict[str, Any]]:
    begin = max(0, (first or {}).get("end", 0) - overlap)
    return [each for each in (first, {"begin": begin, **later}) if each]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@example(None, {"type": "PolyLR", "power": 2.0, "eta_min": 1e-3, "end": 10}, 11, 1, 5e-3, 0)
@example({"type": "LinearLR", "start_factor": 0.1, "end": 3}, COSINE, 2, 2, 2e-2, 0)
@example({"type": "LinearLR", "start_factor": 0.1, "end": 5}, COSINE, 8, 1, 5e-3, 3)
@example(None, {"type": "CosineRestartLR", **RESTARTS, "eta_min": 1e-3}, 9, 2, 5e-3, 0)
@given(
    first=st.one_of(st.none(), LINEAR),
    later=LATER,
    at=st.integers(1, LENGTH - 1),
    groups=st.integers(1, 2),
    peak=st.sampled_from([5e-3, 2e-2]),
    overlap=st.sampled_from([0, 0, 1, 3]),
)
def test_a_new_peak_gives_the_rates_of_a_run_that_began_with_it(
    tmp_path_factory: pytest.TempPathFactory,
    first: dict[str, Any] | None,
    later: dict[str, Any],
    at: int,
    groups: int,
    peak: float,
    overlap: int,
) -> None:
    """From wherever it is set, or it is refused: by the classes of the library."""
    needed()
    imported()
    configs = one_after_another(first, later, overlap)
    adam = wrapped(PEAK, groups)
    schedules = scheduled(adam, configs)
    assert [*stepped(adam, schedules, at)]
    run = saved(tmp_path_factory.mktemp("run"), adam, schedules, at)
    try:
        plan = surgery.plan(run, from_data({"set": {"lr": peak}}))
    except SurgeryError as error:
        assert overlap and first and "moved the rate, too" in error.what
        return
    surgery.apply(run, plan)
    rates = [*stepped(*resumed(run, configs, groups), LENGTH - at)]
    born = [{**each, **({"eta_max": peak} if "eta_max" in each else {})} for each in configs]
    wanted = rates_from_the_start(peak, born, groups)[at:]
    assert plan.promise is not None and rates[0][0] == plan.promise.lr
    assert torch.tensor(rates).allclose(torch.tensor(wanted), rtol=1e-5, atol=0)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    first=st.one_of(st.none(), LINEAR),
    later=LATER,
    at=st.integers(4, LENGTH - 1),
    groups=st.integers(1, 2),
    shape=st.sampled_from(["linear", "cosine", "1-sqrt"]),
    to=st.sampled_from([0.0, 1e-7]),
    halved=st.integers(0, 5),
)
def test_a_cooldown_has_its_shape_and_stays_at_its_end(
    tmp_path_factory: pytest.TempPathFactory,
    first: dict[str, Any] | None,
    later: dict[str, Any],
    at: int,
    groups: int,
    shape: str,
    to: float,
    halved: int,
) -> None:
    """Where a scheduler of a fitting class is among them; and follows a new peak then, too."""
    needed()
    imported()
    configs = one_after_another(first, later)
    adam = wrapped(PEAK, groups)
    schedules = scheduled(adam, configs)
    assert [*stepped(adam, schedules, at)]
    start = [group["lr"] for group in adam.param_groups]
    run = saved(tmp_path_factory.mktemp("run"), adam, schedules, at)
    before = snapshot(run.root)
    fits = {"linear": {"LinearLR", "PolyLR"}, "cosine": {"CosineAnnealingLR"}}.get(shape, set())
    names = {each["type"] for each in configs} & fits
    try:
        plan = surgery.plan(run, from_data({"cooldown": {"steps": 4, "shape": shape, "to": to}}))
    except SurgeryError as error:
        assert not names and "can decay" in error.what
        return
    surgery.apply(run, plan)
    adam, schedules = resumed(run, configs, groups)
    own = to if names - {"LinearLR"} else 0.0
    ends = [own or to * rate / max(start) for rate in start]
    left = {"linear": lambda k: 1 - k / 4, "cosine": lambda k: (1 + math.cos(math.pi * k / 4)) / 2}
    wanted = [
        [end + (rate - end) * left[shape](min(k, 4)) for rate, end in zip(start, ends, strict=True)]
        for k in range(10)
    ]
    rates = [*stepped(adam, schedules, halved)]
    assert names and plan.promise is not None and plan.promise.lr == start[0]
    assert torch.tensor(rates).allclose(torch.tensor(wanted[:halved]), rtol=1e-5, atol=1e-12)
    again = saved(tmp_path_factory.mktemp("again"), adam, schedules, at + halved)
    surgery.apply(again, surgery.plan(again, from_data({"set": {"lr": "0.5x"}})))
    rates = [*stepped(*resumed(again, configs, groups), 10 - halved)]
    half = [[own + (rate - own) / 2 for rate in each] for each in wanted[halved:]]
    if own:
        half = [
            [own + (rate / 2 - own) * left[shape](min(k, 4)) for rate in start]
            for k in range(halved, 10)
        ]
    assert torch.tensor(rates).allclose(torch.tensor(half), rtol=1e-4, atol=1e-12)
    take_back(run.root, before)


def imported() -> None:
    """In this process, once; what comes later finds the usual packages alone."""
    from tests.support import mmengine_trainer

    assert mmengine_trainer.PEAK == PEAK and "mmengine" in sys.modules
    sys.path[:] = [path for path in sys.path if path != str(beside("trainers"))]


def test_a_rate_that_a_metric_lowers_is_halved(tmp_path: Path) -> None:
    needed()
    imported()
    config = {"type": "ReduceOnPlateauLR", "by_epoch": True, "monitor": "loss", "rule": "less"}
    configs = [{**config, "factor": 0.5, "patience": 1}]

    def evaluated(adam: Any, schedule: Any, times: int) -> list[float]:
        rates = []
        for _ in range(times):
            rates.append(next(stepped(adam, [schedule], 1))[0])
            schedule.step({"loss": 1.0})
        return rates

    adam = wrapped(PEAK, 1)
    (schedule,) = scheduled(adam, configs)
    assert evaluated(adam, schedule, 4)[-1] == PEAK / 2
    run = saved(tmp_path, adam, [schedule], 4)
    wanted = evaluated(adam, schedule, 6)
    plan = surgery.plan(run, from_data({"set": {"lr": "0.5x"}}))
    assert any("until its metric stops improving" in line for line in plan.warnings)
    surgery.apply(run, plan)
    adam, (schedule,) = resumed(run, configs, 1)
    assert evaluated(adam, schedule, 6) == [rate / 2 for rate in wanted]


def test_a_share_is_of_the_rate_and_not_of_the_momentum(tmp_path: Path) -> None:
    needed()
    imported()
    momentum = {"type": "LinearMomentum", "start_factor": 0.5, "end": 3}
    adam, configs = wrapped(PEAK, 1), [momentum, {"type": "StepLR", "step_size": 3}]
    schedules = scheduled(adam, configs)
    assert [*stepped(adam, schedules, 2)]
    plan = surgery.plan(saved(tmp_path, adam, schedules, 2), from_data({"set": {"lr": "0.5x"}}))
    assert plan.promise is not None and plan.promise.lr == PEAK / 2


def test_a_class_that_is_not_known_is_refused(tmp_path: Path) -> None:
    needed()
    imported()
    adam = wrapped(PEAK, 1)
    schedules = scheduled(adam, [{"type": "StepLR", "step_size": 3}])
    assert [*stepped(adam, schedules, 2)]
    schedules[0].momentum_of_mine = 3
    run = saved(tmp_path, adam, schedules, 2)
    for wanted in ({"set": {"lr": 1e-3}}, {"cooldown": {"steps": 1}}):
        with pytest.raises(SurgeryError, match="one of MMEngine's with gamma, momentum_of_mine"):
            surgery.plan(run, from_data(wanted))
