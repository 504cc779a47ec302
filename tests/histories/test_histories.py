"""Every recipe of `recipes/history` on a small run of its own format: the plan is the golden one,
a restart uses what it promised, and undo leaves no trace.

After a wanted change of a plan's text: `GOLDEN=write python -m pytest tests/histories`, and read
the diff."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look, plan, report, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.diff.diff import diff
from ckptsurgeon.look.diff.sides import Side
from ckptsurgeon.look.diff.surgery import of_receipt
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data, load
from ckptsurgeon.surgery.fork import fork
from tests.histories.runs import Idefics, Megatron, Metaseq, consumed
from tests.support.launch import REPO
from tests.support.megatron_engine import megatron, resume
from tests.support.snapshot import snapshot
from tests.support.witness import of_diff, of_plan

RECIPES = REPO / "recipes" / "history"
GOLDEN = Path(__file__).parent / "golden"

# tr8-104B.slurm as it stood at each experiment: 1 to 4, 9, and 11.
TR8: dict[str, Any] = {"beta2": 0.999}
TR8_9: dict[str, Any] = {"lr": 3e-5, "warmup": 1_000_000}
TR8_11: dict[str, Any] = {"lr": 3e-5, "warmup": 300_000}
GLITCH = Megatron((6210, 7200), **TR8, logs=True)
# tr11-176B-ml.slurm.
TR11_RAMP = (192, 16, 9_765_625)
TR11: dict[str, Any] = {"ramp": TR11_RAMP, "warmup": 183_105, "decay": 200_000_000}
# LargeScale's glm-130b.sh, with the rates of the log: they are halved at 26000.
GLM_RAMP = (192, 24, 5_493_164)
GLM: dict[str, Any] = {
    "lr": 8e-5, "min_lr": 8e-6, "batch": 4224, "ramp": GLM_RAMP, "warmup": 1_098_632,
    "decay": 197_753_905,
}  # fmt: skip
GLM_LATE = {**GLM, "lr": 4e-5}
OPT: dict[str, dict[str, Any]] = {
    "opt-2": {"weight_decay": 0.01, "betas": (0.9, 0.98)},
    "opt-3": {"betas": (0.9, 0.98)},
    "opt-11.7": {"weight_decay": 0.05, "betas": (0.9, 0.98)},
    "opt-11.8": {},
    "opt-11.9": {"weight_decay": 0.05},
    "opt-12.16-plan-b": {},
    "opt-12.17": {},
    "opt-12.35": {},
}
# Recipe → the run that it is for, and numbers of the row that the next step must use.
CASES: dict[str, tuple[Megatron | Idefics, dict[str, Any]]] = {
    "tr8-exp1-glitch": (GLITCH, {"step": 6211, "consumed_samples": 193_600}),
    "tr8-exp3-again": (GLITCH, {"step": 6211, "consumed_samples": 193_600}),
    "tr8-exp4-lower-beta2": (
        Megatron((3000, 6210), **TR8),
        {"step": 3001, "betas": (0.9, 0.95), "adam_step": 3000},
    ),
    "tr8-exp10-lower-lr": (
        Megatron((6900, 7200), **TR8_9),
        {"step": 6901, "adam_step": 6900, "lr": pytest.approx(1e-5 * 251_312 / 1_000_000)},
    ),
    "tr8-exp11-from-zero": (
        Megatron((11100, 11400), **TR8_11),
        {"step": 1, "consumed_samples": 0, "lr": pytest.approx(3e-5, rel=1e-3)},
    ),
    "tr8-exp11-at-the-spike": (
        Megatron((11100, 11400), **TR8_11),
        {"step": 11101, "consumed_samples": 1_256_288, "lr": pytest.approx(3e-5, rel=1e-3)},
    ),
    "tr8b-bnb-exp6": (
        Megatron((12000, 12300)),
        {"step": 12001, "consumed_samples": 1_519_744, "lr": pytest.approx(5.84153e-5, abs=5e-11)},
    ),
    "tr8b-embed-norm-exp2": (
        Megatron((13250, 14000)),
        {"step": 13251, "consumed_samples": 3_014_320},
    ),
    "tr8b-embed-norm-exp3": (
        Megatron((16651, 18500)),
        {"step": 16652, "consumed_samples": consumed(18500, 2048, (16, 16, 6_000_000))},
    ),
    "tr8b-embed-norm-exp4": (
        Megatron((16651, 18500)),
        {"step": 16652, "consumed_samples": consumed(19500, 2048, (16, 16, 6_000_000))},
    ),
    "tr8b-embed-norm-reset": (
        Megatron((16800, 17400)),
        {"step": 16801, "consumed_samples": 7_594_208, "adam_step": 0},
    ),
    "lessons-skip-8401": (
        Megatron((8400, 8700)),
        {"step": 8401, "consumed_samples": consumed(8800, 2048, (16, 16, 6_000_000))},
    ),
    "tr3m-reset": (
        Megatron(
            (19686,),
            lr=2e-4,
            min_lr=1e-5,
            batch=512,
            ramp=(32, 32, 2_000_000),
            warmup=183_105,
            decay=73_242_187,
        ),
        {"step": 19687, "consumed_samples": 4_999_616, "adam_step": 0},
    ),
    "tr11-sync-layer-norms": (Megatron((20448,), **TR11, drifted=True), {"step": 20449}),
    "tr13-new-stage": (
        Megatron((95000,), **TR11),
        {"step": 1, "consumed_samples": 0, "lr": 2e-5, "adam_step": 0},
    ),
    "idefics-14500": (Idefics((14500, 15611)), {"step": 14501}),
    "idefics-16250": (Idefics((16250, 16500), lr=2.8125e-5), {"step": 16251}),
    "idefics-29000": (Idefics((29000, 29250), lr=1.875e-5), {"step": 29001}),
    "idefics-30500": (Idefics((30500, 30750), position=250), {"step": 30501}),
    "idefics-34000": (Idefics((34000, 34250), lr=1.875e-5), {"step": 34001}),
    "glm-22800": (Megatron((22800, 23200), **GLM), {"step": 22801}),
    "glm-26000": (Megatron((26000, 26400), **GLM), {"step": 26001}),
    "glm-skip-40701": (
        Megatron((40700, 40800), **GLM_LATE),
        {"step": 40701, "consumed_samples": consumed(40_900, 4224, GLM_RAMP)},
    ),
    "glm-skip-42401": (
        Megatron((42400, 42600), **GLM_LATE),
        {"step": 42401, "consumed_samples": consumed(42_600, 4224, GLM_RAMP)},
    ),
    "glm-42700": (Megatron((42700, 42800), **GLM_LATE), {"step": 42701}),
    "palm-rule": (
        Megatron((7000, 7100), batch=2048, ramp=None),
        {"step": 7001, "consumed_samples": 7300 * 2048},
    ),
}
PROMISED: dict[str, dict[str, Any]] = {
    "opt-2": {"weight_decay": (0.1,), "betas": (0.9, 0.98), "eps": 1e-8},
    "opt-3": {"weight_decay": (0.1,), "betas": (0.9, 0.95), "eps": 1e-6},
    "opt-11.7": {"weight_decay": (0.1,), "betas": (0.9, 0.95)},
    "opt-11.8": {"weight_decay": (0.05,), "betas": (0.9, 0.95)},
    "opt-11.9": {"weight_decay": (0.1,), "betas": (0.9, 0.95)},
    "opt-12.16-plan-b": {"adam_step": 0},
    "opt-12.17": {"loss_scale": 4.0},
    "opt-12.35": {"betas": (0.0, 0.95), "eps": 100.0},
}


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """One process group and one set of engines for the module."""
    with megatron():
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the metaseq run is made once."""
    return tmp_path_factory.mktemp("metaseq") / "run"


def text(made: Plan, name: str) -> str:
    """The plan as it is shown, without the bytes that depend on torch's release."""
    shown = report.plan(made, load(RECIPES / f"{name}.yaml").name, report.Style(100))
    return re.sub(r"(  cost +)\S+ \w+ written", r"\1… written", shown) + "\n"


def compare(name: str, shown: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(shown)
    assert shown == path.read_text()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [*CASES, *OPT])
@pytest.mark.long
def test_the_history_is_a_recipe(tmp_path: Path, original: Path, name: str) -> None:
    root = tmp_path / "run"
    kind: Any
    kind, expected = (
        CASES[name] if name in CASES else (Metaseq(original, OPT[name]), PROMISED[name])
    )
    kind.make(root)
    before = snapshot(root)
    made = plan(Run.open(root), load(RECIPES / f"{name}.yaml"))
    assert made.promise is not None and not made.empty
    assert {key: getattr(made.promise, key) for key in expected} == expected
    compare(name, text(made, name))
    original_run = shutil.copytree(root, tmp_path / "before", symlinks=True)
    receipt = surgery.apply(Run.open(root), made)
    witness(original_run, root, made, receipt.id)
    found = look.verify(Run.open(root), level=4)
    assert (found.findings, found.promise) == ((), made.promise)
    kind.check(root, made.promise)
    assert plan(Run.open(root), from_data(dict(made.recipe))).empty
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before


def witness(before: Path, after: Path, made: Plan, id: str) -> None:
    """What differs between the run before and after is what the plan lists, and no more; and so is
    what the receipt's files say."""
    whole = diff(Side(Run.open(before), None), Side(Run.open(after), None), tensors=True)
    kept = of_receipt(Run.open(after), id, tensors=True)
    for found in map(of_diff, (whole, kept)):
        assert found == of_plan(made.changes, found)


def test_every_history_is_tested() -> None:
    named = {*CASES, *OPT}
    assert {path.stem for path in RECIPES.glob("*.yaml")} == named
    assert {path.stem for path in GOLDEN.glob("*.txt")} == named
    table = (REPO / "docs" / "histories.md").read_text()
    assert {name for name in named if f"`{name}`" not in table} == set()


# --- what is said differently, or refused --------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("opt-3", {"set": {"clip_grad": 1.0}}, "--clip-norm 1.0"),
    ("opt-11.1", {"set": {"lr": 7.5e-5}}, "--lr 7.5e-05"),
    ("opt-11.2", {"set": {"clip_grad": 1.5}}, "--clip-norm 1.5"),
    ("opt-11.5", {"set": {"clip_grad": 1.0}}, "--clip-norm 1.0"),
    ("opt-11.8", {"set": {"clip_grad": 0.0}}, "--clip-norm 0.0"),
    ("opt-11.9", {"set": {"lr": 6e-5}}, "--lr 6e-05"),
    ("opt-12.16", {"set": {"clip_grad": 0.3}}, "--clip-norm 0.3"),
    ("opt-12.35", {"set": {"lr": 9e-3}}, "--lr 0.009"),
    ("opt-12.41", {"swap_optimizer": {"to": "sgdw", "momentum": 0.0}}, "--reset-optimizer"),
    ("opt-before-12.42", {"set": {"lr": 9e-5}}, "--lr 9e-05"),
    ("opt-12.42", {"set": {"lr": 6e-5}}, "--lr 6e-05"),
    ("opt-12.44", {"set": {"lr": 5.4e-5}}, "--lr 5.4e-05"),
    ("opt-12.46", {"set": {"lr": 4e-5}}, "--lr 4e-05"),
    ("opt-12.51", {"set": {"lr": 6e-5}}, "--lr 6e-05"),
    ("opt-12.51-lower", {"set": {"lr": 4.5e-5}}, "--lr 4.5e-05"),
    ("opt-12.53", {"set": {"lr": 3e-5}}, "--lr 3e-05"),
]


def refusal(root: Path, recipe: dict[str, Any]) -> str:
    before = snapshot(root)
    with pytest.raises(SurgeryError) as refused:
        plan(Run.open(root), from_data(recipe))
    assert snapshot(root) == before
    return "\n".join(refused.value.next) + "\n"


@pytest.fixture(scope="module")
def metaseq(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test changes."""
    root = tmp_path_factory.mktemp("unchanged") / "run"
    Metaseq(original).make(root)
    return root


@pytest.mark.parametrize(("row", "recipe", "flag"), REFUSED, ids=[row for row, _, _ in REFUSED])
def test_a_restart_of_opt_by_flags(metaseq: Path, row: str, recipe: dict, flag: str) -> None:  # type: ignore[type-arg]
    told = refusal(metaseq, recipe)
    assert re.search(rf"{re.escape(flag)}(?![\d.])", told), told


@pytest.mark.parametrize(
    ("step", "recipe", "flags"),
    [
        (6210, {"set": {"seed": 43}}, ["--seed 43"]),
        (8400, {"skip": ["8401-8800"]}, ["--skip-train-iteration-range 8401-8800"]),
        (13250, {"skip": ["13251-14000"]}, ["--skip-train-iteration-range 13251-14000"]),
        (
            16800,
            {"rewarm": {"iterations": 100}},
            ["set lr=0 min_lr=0", "--train-samples 7799008"],
        ),
        (
            16800,
            {"rewarm": {"iterations": 300}},
            ["set lr=0 min_lr=0", "--train-samples 8208608"],
        ),
        (
            22800,
            {"rewarm": {"iterations": 500, "kind": "ramp"}},
            ["--warmup-samples-after-loading"],
        ),
    ],
    ids=[
        "tr8-exp2-seed",
        "lessons-skip",
        "embed-norm-2-by-flag",
        "embed-norm-6",
        "embed-norm-7",
        "glm-rewarm",
    ],
)
def test_a_restart_of_megatron_by_flags(
    tmp_path: Path, step: int, recipe: dict[str, Any], flags: list[str]
) -> None:
    Megatron((step,)).make(tmp_path)
    told = refusal(tmp_path, recipe)
    assert [flag for flag in flags if flag not in told] == []


# --- rows that go on from each other -------------------------------------------------------------


def test_the_same_rollback_twice_keeps_both_branches(tmp_path: Path) -> None:
    """B4: what the first rollback set aside is not in the way of the second."""
    GLITCH.make(tmp_path)
    states = [snapshot(tmp_path)]
    for name in ("tr8-exp1-glitch", "tr8-exp3-again"):
        wanted = load(RECIPES / f"{name}.yaml")
        surgery.apply(Run.open(tmp_path), plan(Run.open(tmp_path), wanted))
        assert Run.open(tmp_path).steps() == [6210]
        assert look.verify(Run.open(tmp_path), level=4).findings == ()
        if name == "tr8-exp1-glitch":
            assert (tmp_path / "tensorboard" / "tb-7k-glitch").is_dir()
            GLITCH.save(tmp_path, 7200)
            states.append(snapshot(tmp_path))
    surgery.apply(Run.open(tmp_path), surgery.plan_undo(Run.open(tmp_path)))
    assert snapshot(tmp_path) == states[1]


def test_a_copy_beside_the_scheduler_is_told(tmp_path: Path) -> None:
    """I4: Accelerate counted it as a state, loaded none, and the warm-up began anew."""
    Idefics((30500,)).make(tmp_path)
    inside = tmp_path / "opt_step-30500" / "accelerator_state"
    (inside / "custom_checkpoint_0.pkl.orig").write_bytes(b"as it was")
    (told,) = look.verify(Run.open(tmp_path)).findings
    assert "custom_checkpoint_0.pkl.orig" in told


def test_the_spike_is_studied_in_a_branch(tmp_path: Path) -> None:
    """B9: the branch begins at iteration 1 and sample 0 with the weights of 11100; the run itself
    is as it was."""
    run, branch = tmp_path / "run", tmp_path / "branch"
    Megatron((11100, 11400)).make(run)
    before = snapshot(run)
    fork(Run.open(run), 11100, branch, load(RECIPES / "tr8-exp11-from-zero.yaml"), how="copy")
    held = resume(branch, 1, use_checkpoint_lr_scheduler=True)
    assert (held["iteration"], held["consumed_samples"]) == (0, 0)
    assert held["steps"] == {11100} and held["moments"] > 0
    assert snapshot(run) == before


def test_the_numbers_of_the_chronicles() -> None:
    """What tr8, BNB, Embed-Norm and tr11 logged as consumed samples at these iterations."""
    logged = {
        6900: 251_312, 7000: 260_912, 7220: 282_032, 11_447: 1_256_288, 12_000: 1_519_744,
        13_251: 2_333_840, 14_000: 3_014_320, 16_800: 7_594_208,
    }  # fmt: skip
    assert {at: consumed(at, 2048, (16, 16, 6_000_000)) for at in logged} == logged
    assert consumed(94_768, 2048, TR11_RAMP) == 177_927_088


@pytest.mark.parametrize(
    "path",
    sorted([*RECIPES.glob("*.yaml"), *RECIPES.parent.glob("*.yaml")]),
    ids=lambda path: path.stem,
)
def test_a_recipe_says_why_and_names_its_source(path: Path) -> None:
    assert load(path).why
    assert re.search(r"^# Source: \S.*", path.read_text(), re.MULTILINE)
