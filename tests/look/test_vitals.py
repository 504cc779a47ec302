"""Vital signs: no alarm on what real optimizers save, and each fault that should raise one."""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.formats import Adam
from ckptsurgeon.look.vitals.bound import Edited, limit, ratio
from ckptsurgeon.look.vitals.vitals import examine
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support import deepspeed_engine
from tests.support.deepspeed_engine import Options
from tests.support.torch_files import load_shard

OPTIM = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
LAST, EARLIER = 240, 200
DOCUMENT = Path(__file__).parents[2] / "docs" / "vitals.md"


def facts(root: Path, step: int | None = None, against: int | None = None) -> tuple[str, ...]:
    return look.verify(Run.open(root), step, level=4, against=against).findings


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "amsgrad", "Adamax", "SGD"])
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


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bf16 run of a real engine; every step around the last two is saved."""
    root = tmp_path_factory.mktemp("vitals") / "run"
    with deepspeed_engine.process_group():
        engine = deepspeed_engine.build(Options(dtype="bf16", model="wide"))
        for step in (*range(1, 7), EARLIER, *range(LAST - 2, LAST + 1)):
            deepspeed_engine.train(engine, step - engine.global_steps)
            engine.save_checkpoint(str(root), client_state=deepspeed_engine.client(step))
        yield root


def test_no_step_of_a_real_engine_raises_an_alarm(engines: Path) -> None:
    run = Run.open(engines)
    steps = run.steps()
    for step in steps:
        told = look.verify(run, step, level=4)
        assert (told.findings, told.not_compared) == ((), ())
    for before, step in pairwise(steps):
        told = look.verify(run, step, against=before)
        assert (told.findings, told.not_compared, told.level) == ((), (), 4)


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


# --- seeded faults, and what docs/vitals.md says of each -----------------------------------------


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    held = load_shard(path)
    change(held)
    torch.save(held, path)


def state(held: dict[str, Any], group: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = held["optimizer_state_dict"]["base_optimizer_state"]["state"][group]
    return found


def masters(held: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = held["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    return found


def earlier(root: Path) -> dict[str, Any]:
    return load_shard(root / f"global_step{EARLIER}" / OPTIM)


def zero(kind: str, part: float) -> Callable[[Path], None]:
    """A part of one moment is zeros, as a write that was cut off leaves it."""

    def change(root: Path) -> None:
        def inside(held: dict[str, Any]) -> None:
            for group in (0, 1):
                tensor = state(held, group)[kind]
                tensor[int(tensor.numel() * (1 - part)) :] = 0

        edit(root / f"global_step{LAST}" / OPTIM, inside)

    return change


def of_earlier(*kinds: str) -> Callable[[Path], None]:
    """Moments of an earlier step; Adam's step is the later one's."""

    def change(root: Path) -> None:
        old = earlier(root)

        def inside(held: dict[str, Any]) -> None:
            for group in (0, 1):
                state(held, group).update({kind: state(old, group)[kind] for kind in kinds})

        edit(root / f"global_step{LAST}" / OPTIM, inside)

    return change


def half_the_gradients(root: Path) -> None:
    """exp_avg_sq of a run whose gradients were half as large."""

    def inside(held: dict[str, Any]) -> None:
        for group in (0, 1):
            state(held, group)["exp_avg_sq"] /= 4

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def step_lost(root: Path) -> None:
    """The counter began anew an update ago, the moments did not."""

    def inside(held: dict[str, Any]) -> None:
        for group in (0, 1):
            state(held, group)["step"] = torch.tensor(1.0)

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def masters_stale(root: Path) -> None:
    old = earlier(root)

    def inside(held: dict[str, Any]) -> None:
        held["optimizer_state_dict"]["single_partition_of_fp32_groups"] = masters(old)

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def weights_stale(root: Path) -> None:
    old = load_shard(root / f"global_step{EARLIER}" / MODEL)
    path = root / f"global_step{LAST}" / MODEL
    edit(path, lambda held: held.update(module=old["module"]))


def saves_equal(root: Path) -> None:
    """Every tensor is that of an earlier step; counters and args go on."""
    old, weights = earlier(root), load_shard(root / f"global_step{EARLIER}" / MODEL)

    def inside(held: dict[str, Any]) -> None:
        held["optimizer_state_dict"]["single_partition_of_fp32_groups"] = masters(old)

    of_earlier("exp_avg", "exp_avg_sq")(root)
    edit(root / f"global_step{LAST}" / OPTIM, inside)
    path = root / f"global_step{LAST}" / MODEL
    edit(path, lambda held: held.update(module=weights["module"]))


def rebuilt(root: Path) -> None:
    """The optimizer was made anew six updates before the save, and its step was set as before."""

    def inside(held: dict[str, Any]) -> None:
        for group in (0, 1):
            state(held, group)["exp_avg"] *= 1 - 0.9**6
            state(held, group)["exp_avg_sq"] *= 1 - 0.95**6

    edit(root / f"global_step{LAST}" / OPTIM, inside)


def poisoned(root: Path) -> None:
    edit(
        root / f"global_step{LAST}" / OPTIM,
        lambda held: state(held)["exp_avg"].__setitem__(5, math.nan),
    )


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "exp_avg_sq is all zeros": (zero("exp_avg_sq", 1), ""),
    "exp_avg_sq: the second half was not written": (zero("exp_avg_sq", 0.5), ""),
    "exp_avg: the second half was not written": (zero("exp_avg", 0.5), ""),
    "exp_avg_sq of a run with gradients half as large": (half_the_gradients, ""),
    f"exp_avg of {LAST - EARLIER} steps earlier": (of_earlier("exp_avg"), ""),
    f"both moments of {LAST - EARLIER} steps earlier": (of_earlier("exp_avg", "exp_avg_sq"), ""),
    "Adam's step was lost, the moments were not": (step_lost, ""),
    f"masters of {LAST - EARLIER} steps earlier": (masters_stale, ""),
    f"weights of {LAST - EARLIER} steps earlier": (weights_stale, ""),
    "a NaN": (poisoned, ""),
    "the same, beside the step before": (
        of_earlier("exp_avg", "exp_avg_sq"),
        f"--against {LAST - 1}",
    ),
    "all saves are equal": (saves_equal, f"--against {EARLIER}"),
    "the moments were made anew six updates ago": (rebuilt, f"--against {LAST - 1}"),
}
WORDS = {
    "the bound": "no gradients lead beyond",
    "masters": "do not round to the weights",
    "NaN": "NaN or Inf",
    "the counter": "counter moved by",
    "contents": "Adam steps, and",
    "equal saves": "is bit for bit that of",
    "exp_avg_sq fell": "fell faster than",
    "ranks": "disagree",
}


def caught(findings: tuple[str, ...]) -> str:
    """By what, in the words of the table."""
    means = [mean for mean, words in WORDS.items() if any(words in text for text in findings)]
    assert len(means) >= bool(findings), findings
    return ", ".join(means) or "not caught"


def share(root: Path) -> float:
    """Of the elements, those beyond the bound."""
    seen = examine(Run.open(root))
    over = [text.split(": ")[-1] for text in seen.facts if WORDS["the bound"] in text]
    numel = sum(sign.elements for sign in seen.signs if sign.update_rms is not None)
    return sum(int(text.split(" of ")[0]) for text in over) / numel


def observed(root: Path) -> set[tuple[str, str]]:
    return {(item.parameter, item.kind) for item in examine(Run.open(root)).observations}


def ranks_swapped(root: Path, what: tuple[str, ...]) -> None:
    """Two data-parallel ranks have each other's tensors, all or some."""
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    paths = [root / "global_step8" / name for name in names]
    one, other = map(load_shard, paths)
    for group, (a, b) in enumerate(zip(masters(one), masters(other), strict=True)):
        if "masters" in what:
            masters(one)[group], masters(other)[group] = b, a
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind in what:
                mine, its = state(one, group), state(other, group)
                mine[kind], its[kind] = its[kind], mine[kind]
    for path, held in zip(paths, (one, other), strict=True):
        torch.save(held, path)


SWAPS = {
    "whole shards of two ranks are swapped": ("masters", "exp_avg", "exp_avg_sq"),
    "both moments of two ranks are swapped": ("exp_avg", "exp_avg_sq"),
    "exp_avg of two ranks is swapped": ("exp_avg",),
}


def documented(what: str, command: str, found: str, part: float, seen: set[str]) -> None:
    """The row of docs/vitals.md says so; its share is that of one machine, to a factor of two."""
    start = f"| {what} | `verify {command or '--level 4'}` |"
    said = f"{start} {found} | {part:.1g} | {', '.join(sorted(seen)) or 'nothing'} |"
    rows = [r for r in DOCUMENT.read_text("utf-8").splitlines() if r.startswith(start)]
    assert rows, said
    cells = [cell.strip() for cell in rows[0].split("|")[3:6]]
    assert (cells[0], cells[2]) == (found, ", ".join(sorted(seen)) or "nothing"), said
    assert part / 2 <= float(cells[1]) <= part * 2, said


@pytest.mark.parametrize("what", FAULTS)
def test_a_seeded_fault_is_caught_as_the_table_says(
    engines: Path, tmp_path: Path, what: str
) -> None:
    fault, command = FAULTS[what]
    root = tmp_path / "run"
    shutil.copytree(engines, root)
    assert facts(root) == ()
    before = observed(root)
    fault(root)
    against = int(command.split()[-1]) if command else None
    found = facts(root, against=against)
    seen = {kind for _, kind in observed(root) - before}
    documented(what, command, caught(found), share(root), seen)


@pytest.mark.parametrize("what", SWAPS)
def test_swapped_ranks_are_caught_as_the_table_says(trained: Trained, what: str) -> None:
    root = trained(ranks=2)
    assert facts(root) == ()
    before = observed(root)
    ranks_swapped(root, SWAPS[what])
    seen = {kind for _, kind in observed(root) - before}
    documented(what, "", caught(facts(root)), share(root), seen)
