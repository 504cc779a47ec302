"""Checkpoints that megatron-core saved and loads back: what the next step uses after a surgery.


Run by `make test-formats`; without megatron-core they are skipped."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.schedules import megatron as megatron_scheduler
from ckptsurgeon.hints import text
from ckptsurgeon.look.listen import listen
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support import newest_megatron
from tests.support.launch import REPO, run_module
from tests.support.newest_megatron import by
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.formats
pytest.importorskip("megatron.core")

NEWEST = newest_megatron.FOLDER
PROGRAM = "tests.support.megatron_real"
KINDS = {
    "legacy": ["--sharding", "legacy"],
    "legacy-plain": ["--sharding", "legacy", "--no-distributed"],
    "legacy-fp16": ["--sharding", "legacy", "--fp16"],
    "fully": ["--sharding", "fully_reshardable", "--verify-integrity"],
    "buckets": ["--sharding", "dp_reshardable"],
    "torch_dcp": ["--sharding", "torch_dcp", "--no-distributed", "--fp16"],
}
LIBRARIES = ["installed", "newest"]
RECIPE: dict[str, Any] = {
    "rollback": {"to": 4},
    "set": {"lr": 3e-4, "min_lr": 3e-5, "beta2": 0.99, "eps": 1e-7, "weight_decay": 0.05},
    "reset": ["moments"],
}
FLAGS = ["--lr", "3e-4", "--min-lr", "3e-5", "--weight-decay", "0.05"]
"""What the plan says to relaunch with."""


def megatron(what: str, root: Path, *flags: str, status: int = 0) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-W", "ignore", "-m", PROGRAM, what, str(root)]
    done = subprocess.run(
        [*command, *flags], cwd=REPO, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout if status == 0 else done.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, ...], Path] = {}

    def make(kind: str, *more: str) -> Path:
        key = (kind, *more)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind) / "run"
            megatron("save", made[key], *KINDS[kind], *more)
        return made[key]

    return make


@pytest.mark.thinned(3)
@pytest.mark.witness(
    "Megatron-LM legacy",
    "rollback",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="megatron-core",
)
@pytest.mark.witness(
    "Megatron-LM torch_dist",
    "rollback",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="megatron-core",
)
@pytest.mark.witness(
    "Megatron-LM legacy",
    "rollback",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="newest megatron-core",
)
@pytest.mark.witness(
    "Megatron-LM torch_dist",
    "rollback",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="newest megatron-core",
)
@pytest.mark.witness(
    "Megatron-LM torch_dcp",
    "rollback",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="newest megatron-core",
)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_set_is_what_megatron_uses(
    kind: str, library: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved(kind, *by(library)), root)
    if kind in ("fully", "buckets"):
        assert (root / "iter_0000004" / "common.pt").exists() == (library == "installed")
    before = snapshot(root)
    recipe = json.loads(json.dumps(RECIPE))
    if "--fp16" in KINDS[kind]:
        recipe["set"]["loss_scale"] = 64
    promise = operate(root, recipe).promise
    assert promise is not None
    told = json.loads(megatron("load", root, *KINDS[kind], *FLAGS, *by(library)))
    assert told["iteration"] == promise.step - 1 == 4
    assert told["lr"] == [promise.lr, promise.lr]
    assert told["betas"] == [list(promise.betas or ())] * 2 == [[0.9, 0.99]] * 2
    assert told["eps"] == [promise.eps] * 2 == [1e-7] * 2
    assert tuple(told["weight_decay"]) == promise.weight_decay == (0.05, 0.0)
    assert told["adam_step"] == [0, 0]
    assert promise.adam_step == (None if kind == "torch_dcp" else 0)
    assert told["exp_avg"] == told["exp_avg_sq"] == 0
    assert told["weights"] > 0
    assert told["consumed_samples"] == promise.consumed_samples == 32
    assert told["loss_scale"] == promise.loss_scale
    assert told["then"]["adam_step"] == [1, 1]
    take_back(root, before)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["fully", "buckets"])
def test_two_ranks_that_share_an_optimizer_use_what_was_set(kind: str, tmp_path: Path) -> None:
    """Data ranks of the newest version, over gloo: each has half of the masters and moments."""
    root = tmp_path / "run"
    flags = [*KINDS[kind], *by("newest")]
    run_module(PROGRAM, "save", root, *flags, ranks=2)
    assert len(list((root / "iter_0000004").glob("*.distcp"))) == (1 if kind == "fully" else 2)
    before = snapshot(root)
    promise = operate(root, RECIPE).promise
    assert promise is not None
    done = run_module(PROGRAM, "load", root, *flags, *FLAGS, ranks=2)
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["iteration"], told["lr"]) == (promise.step - 1, [promise.lr, promise.lr])
    assert told["betas"] == [[0.9, 0.99]] * 2 and told["eps"] == [1e-7] * 2
    assert tuple(told["weight_decay"]) == promise.weight_decay == (0.05, 0.0)
    assert told["adam_step"] == [0, 0] and told["then"]["adam_step"] == [1, 1]
    assert told["exp_avg"] == told["exp_avg_sq"] == 0 < told["weights"]
    take_back(root, before)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["legacy-plain", "legacy-fp16", "fully"])
def test_the_groups_of_mup_are_found_with_the_flags_of_the_plan(
    kind: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    """Hidden layers have rates and an eps of 1 / width; the loader finds a group by its rates."""
    mup = ["--mup-width", "3", *by("newest")]
    root = tmp_path / "run"
    shutil.copytree(saved(kind, *mup), root)
    before = snapshot(root)
    values = {"lr": 7.123456789e-4, "min_lr": 1.23456789e-5, "eps": 3e-7, "beta2": 0.99}
    plan = operate(root, {"rollback": {"to": 4}, "set": values})
    assert plan.promise is not None
    (text,) = [text for text in plan.warnings if text.startswith("relaunch with")]
    flags = text.removeprefix("relaunch with ").partition(":")[0].split()
    assert flags == ["--lr", "0.0007123456789", "--min-lr", "1.23456789e-05"]
    told = json.loads(megatron("load", root, *KINDS[kind], *mup, *flags))
    hidden, main = told["lr"]
    assert main == plan.promise.lr and hidden == pytest.approx(main / 3, rel=1e-12)
    assert told["eps"] == [3e-7 * (1 / 3), 3e-7] and plan.promise.eps == 3e-7
    assert told["betas"] == [[0.9, 0.99]] * 2
    assert plan.promise.groups is not None
    assert [eps for _, eps in plan.promise.groups] == told["eps"]
    lost = megatron("load", root, *KINDS[kind], *mup, status=1)
    assert "Could not find parameter group with key" in lost or "KeyError" in lost
    take_back(root, before)


def test_the_weight_decay_of_the_first_update_is_the_command_lines(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    """Megatron-LM steps its scheduler before it reads the decay that was saved."""
    newest = by("newest")
    root = tmp_path / "run"
    shutil.copytree(saved("legacy", *newest), root)
    plan = operate(root, {"set": {"weight_decay": 0.05}})
    (text,) = [text for text in plan.warnings if text.startswith("relaunch with")]
    assert text.startswith("relaunch with --weight-decay 0.05:")
    assert "--lr, --min-lr and --weight-decay all the same" in text
    told = json.loads(megatron("load", root, *newest, "--weight-decay", "0.05"))
    assert told["weight_decay"][0] == told["then"]["weight_decay"][0] == 0.05
    told = json.loads(megatron("load", root, *newest, "--use-checkpoint"))
    assert told["weight_decay"][0] == 0.1 and told["then"]["weight_decay"][0] == 0.05


def test_torch_dcp_loses_adams_step_and_the_plan_says_so(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    """Its loader asks for what a new optimizer has, and FusedAdam's groups get a step later."""
    more = by("newest")
    root = tmp_path / "run"
    shutil.copytree(saved("torch_dcp", *more), root)
    plan = operate(root, {"set": {"beta2": 0.99}})
    assert any("Adam's step is not loaded" in text for text in plan.warnings)
    told = json.loads(megatron("load", root, *KINDS["torch_dcp"], *more))
    assert told["adam_step"] == [0, 0] and told["exp_avg"] > 0


def test_the_untouched_state_is_what_megatron_uses(saved: Callable[[str], Path]) -> None:
    promise = look.inspect(Run.open(saved("fully"))).promise
    told = json.loads(megatron("load", saved("fully"), *KINDS["fully"]))
    assert told["lr"] == [promise.lr] * 2
    assert tuple(told["weight_decay"]) == promise.weight_decay
    assert told["adam_step"] == [promise.adam_step] * 2 == [6, 6]


def test_other_flags_than_the_plan_says_are_refused_by_megatron(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved("legacy"), root)
    plan = operate(root, {"set": {"lr": 3e-4}})
    assert any("relaunch with --lr 0.0003:" in warning for warning in plan.warnings)
    assert "do not match" in megatron("load", root, *KINDS["legacy"], status=1)


def test_the_schedules_and_weight_decays_are_megatrons() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    class Group:
        param_groups: list[dict[str, Any]] = []  # noqa: RUF012

    for style in ("linear", "cosine", "constant", "inverse-square-root", "WSD"):
        for wsd in ("linear", "cosine", "exponential", "minus_sqrt") if style == "WSD" else ("",):
            for wd in ("linear", "cosine", "constant"):
                unsaved = {
                    "init_lr": 1e-6, "wsd_decay_steps": 300, "lr_wsd_decay_style": wsd or "linear",
                }  # fmt: skip
                end_wd = 0.1 if wd != "constant" else 0.01
                scheduler = OptimizerParamScheduler(
                    Group(), init_lr=1e-6, max_lr=6e-5, min_lr=6e-6, lr_warmup_steps=100,
                    lr_decay_steps=1000, lr_decay_style=style, start_wd=0.01, end_wd=end_wd,
                    wd_incr_steps=500, wd_incr_style=wd, wsd_decay_steps=300,
                    lr_wsd_decay_style=wsd or "linear",
                )  # fmt: skip
                for number in (0, 1, 50, 100, 101, 499, 500, 501, 700, 701, 850, 999, 1000, 1001):
                    scheduler.num_steps = number
                    state = scheduler.state_dict()
                    for group in (
                        {"wd_mult": 1.0},
                        {"max_lr": 1e-5, "min_lr": 1e-7, "wd_mult": 0.5},
                        {"start_wd": 0.2, "end_wd": 0.2 if wd == "constant" else 0.4, "wd_mult": 1},
                    ):
                        wanted = scheduler.get_lr(group)
                        found = megatron_scheduler.learning_rate(state, group, unsaved)
                        assert math.isclose(found, wanted, rel_tol=1e-15), (style, wsd, number)
                        decay = megatron_scheduler.weight_decay(state, group)
                        assert decay == scheduler.get_wd(group) * group["wd_mult"]


def line(told: dict[str, Any]) -> str:
    """What Megatron-LM prints of the update that was just made, from the live optimizer."""
    iteration, samples = told["iteration"] + 1, told["consumed_samples"] + 8
    then = told["then"]
    return (
        f" [2026-08-22 15:22:22.0] iteration {iteration:8d}/{100:8d} |"
        f" consumed samples: {samples:12d} | learning rate: {then['lr'][0]:.6E} |"
        f" global batch size: {8:5d} | loss scale: {then['loss_scale']:.1f} |"
        f" number of skipped iterations: {0:3d} |"
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["legacy", "legacy-fp16", "fully"])
def test_the_word_of_megatron_is_kept(
    kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved(kind), root)
    recipe = json.loads(json.dumps(RECIPE))
    if "--fp16" in KINDS[kind]:
        recipe["set"]["loss_scale"] = 64
    operate(root, recipe)
    told = json.loads(megatron("load", root, *KINDS[kind], *FLAGS))
    (tmp_path / "out").write_text(line(told))
    word = listen(Run.open(root), log=tmp_path / "out")
    assert (word.differs, word.not_compared) == ([], [])
    names = [item.partition(":")[0] for item in word.agrees]
    assert names[:2] == ["step 5", "lr of update 6"]
    assert {"consumed samples 40", "global batch size 8"} <= set(word.agrees)
    assert ("loss scale 64.0" in word.agrees) == (kind == "legacy-fp16")


def test_flags_that_override_megatrons_schedule_are_caught(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """With --override-opt_param-scheduler the load takes a decay that the checkpoint has not."""
    root = tmp_path / "run"
    shutil.copytree(saved("legacy"), root)
    operate(root, {"set": {"lr": 3e-4, "min_lr": 3e-5}})
    flags = ["--lr", "3e-4", "--min-lr", "3e-5", "--lr-decay-samples", "100", "--override"]
    (tmp_path / "out").write_text(line(json.loads(megatron("load", root, *flags))))
    word = listen(Run.open(root), log=tmp_path / "out")
    assert word.differs[0].startswith("lr of update 8: promised 0.000")
    assert "ckptsurgeon relaunch --print-flags" in " ".join(map(text, word.expected.remedy))


def test_a_damaged_file_does_not_get_a_new_sum(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved("fully"), root)
    manifest = root / "iter_0000006" / "integrity.json"
    manifest.write_text(manifest.read_text().replace('"common.pt": "', '"common.pt": "0'))
    with pytest.raises(SurgeryError, match=r"integrity\.json has 0"):
        surgery.plan(Run.open(root), from_data({"set": {"eps": 1e-6}}))
    findings = look.verify(Run.open(root), level=3).findings
    assert any("common.pt" in finding and "sha256" in finding for finding in findings)
