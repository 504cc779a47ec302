"""nanotron: its own trainer saves on one rank and on two, and goes on from what was edited."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from ckptsurgeon import look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.schedules import nanotron, shapes
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.launch import run_module
from tests.support.newest_megatron import beside
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(not beside("nanotron").is_dir(), reason="make test-formats installs it"),
]
Maker = Callable[..., Path]
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "one rank": (1, ()),
    "zero 1": (2, ()),
    "zero 0": (2, ("--zero", 0)),
    "tensor parallel": (2, ("--tp", 2)),
}
"""Layout → ranks, and the words that its trainer takes."""
VALUES = {"lr": 3e-4, "beta2": 0.98, "eps": 1e-6, "weight_decay": 0.3}
SCHEDULE = {
    "learning_rate": 1e-3, "lr_warmup_steps": 2, "lr_warmup_style": "linear",
    "lr_decay_style": "cosine", "lr_decay_steps": 18, "min_decay_lr": 1e-5,
}  # fmt: skip
"""Of `tests.support.nanotron_trainer`."""


def train(
    root: Path, stop: int, layout: str = "one rank", log: Path | None = None, **config: Any
) -> dict[int, Any]:
    """To step `stop`, from where the trainer resumes by itself: what each update used. `config` has
    `__` for the dots of a key, and YAML for a text."""
    ranks, words = LAYOUTS[layout]
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in config.items()}
    given = [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
    done = run_module(
        "tests.support.nanotron_trainer",
        root,
        stop,
        *words,
        *(["--config", *given] if given else []),
        ranks=ranks,
        environment={"PYTHONWARNINGS": "ignore"},
    )
    lines = done.stdout.splitlines()
    if log is not None:
        log.write_text("\n".join(line for line in lines if not line.startswith('{"')))
    (line,) = (line for line in lines if line.startswith('{"'))
    return {int(step): used for step, used in json.loads(line).items()}


def scheduled(keys: str) -> dict[str, str]:
    """The config that a hint asks for, in its words."""
    section = nanotron.SECTION.replace(".", "__")
    pairs = (word.split(": ") for word in keys.split(", "))
    return {f"{section}__{key}": value for key, value in pairs}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A run of six steps, trained once, by layout; once more it stopped at 4 and went on."""
    made: dict[str, Path] = {}

    def make(layout: str) -> Path:
        if layout not in made:
            folder = tmp_path_factory.mktemp("nanotron")
            used = train(folder / "run", 4, layout)
            shutil.copytree(folder / "run", folder / "again")
            again = train(folder / "again", 6, layout)
            (folder / "used.json").write_text(json.dumps({"whole": used, "again": again}))
            train(folder / "run", 6, layout)
            made[layout] = folder
        return made[layout]

    return make


@pytest.fixture
def run(originals: Maker, tmp_path: Path) -> Maker:
    def copy(layout: str = "one rank") -> Path:
        return Path(shutil.copytree(originals(layout) / "run", tmp_path / "run"))

    return copy


def told(originals: Maker, kind: str, layout: str = "one rank") -> dict[int, Any]:
    found = json.loads((originals(layout) / "used.json").read_text())[kind]
    return {int(step): used for step, used in found.items()}


def refused(root: Path, recipe: dict[str, Any]) -> tuple[str, str]:
    """What is refused, and what to do instead."""
    with pytest.raises(SurgeryError) as caught:
        surgery.plan(Run.open(root), from_data(recipe))
    return caught.value.what, caught.value.next[0]


def apply(root: Path, recipe: dict[str, Any]) -> None:
    """Of what would do more if it were applied again."""
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    assert look.verify(Run.open(root), level=4).findings == ()


def call(*words: object) -> Result:
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(app, [str(w) for w in words])


# --- what the next update uses -------------------------------------------------------------------


@pytest.mark.witness(
    "nanotron", "rollback", "set-lr", "set betas", "set eps", "set weight_decay", by="nanotron"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_promise_is_what_its_trainer_uses(run: Maker, layout: str) -> None:
    """Its first update after a load has the rate of step 0: 0, where the warm-up is linear."""
    root = run(layout)
    before = snapshot(root)
    opened = Run.open(root)
    assert (opened.format.name, opened.steps(), opened.latest()) == ("nanotron", [2, 4, 6], 6)
    assert look.verify(opened, level=4).findings == ()
    plan = operate(root, {"rollback": {"to": 4}, "set": VALUES})
    promise = plan.promise
    assert promise is not None and promise.step == 5 and promise.asked
    assert promise.lr == 0 and "lr" in promise.one_step
    used = train(Path(shutil.copytree(root, root.with_name("twin"))), 6, layout)
    assert sorted(used) == [5, 6]
    assert used[5]["lr"] == [0.0]
    rate = 3e-4 * (nanotron.factor(SCHEDULE, 5, 1e-3) or 0)
    assert used[6]["lr"] == [pytest.approx(rate, rel=1e-12)]
    assert f"at {rate:g}" in promise.one_step["lr"]
    for update in used.values():
        assert update["betas"] == [[0.9, 0.98]] and update["eps"] == [1e-6]
        assert update["weight_decay"] == [0.3]
    assert used[5]["adam_step"] == promise.adam_step == 4
    take_back(root, before)


def test_a_constant_warm_up_has_the_rate_at_once(tmp_path: Path) -> None:
    config = scheduled("lr_warmup_style: constant, lr_warmup_steps: 3, lr_decay_starting_step: 5")
    root = tmp_path / "run"
    train(root, 4, **config)
    plan = operate(root, {"set": {"lr": 5e-4}})
    assert plan.promise is not None and plan.promise.lr == pytest.approx(5e-4)
    used = train(root, 8, **config)
    assert used[5]["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)]
    assert used[8]["lr"][0] < used[7]["lr"][0] < 5e-4


@pytest.mark.witness("nanotron", "reset moments", by="nanotron")
@pytest.mark.parametrize("layout", ["one rank", "zero 1"])
def test_moments_that_are_reset_are_zero_at_the_next_update(run: Maker, layout: str) -> None:
    root = run(layout)
    plan = operate(root, {"reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    used = train(root, 8, layout)
    assert (used[7]["adam_step"], used[7]["moments"]) == (0, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollback_alone_is_followed_by_the_same_updates(
    run: Maker, originals: Maker, layout: str
) -> None:
    """As those of a run that stopped there and went on: rate, masters, moments, data, weights."""
    root = run(layout)
    operate(root, {"rollback": {"to": 4}})
    assert train(root, 6, layout) == told(originals, "again", layout)
    weights = sorted((root / "6/model").rglob("*.safetensors"))
    other = originals(layout) / "again"
    assert weights  # the headers have their keys in any order
    for path in weights:
        mine, its = load_file(path), load_file(other / path.relative_to(root))
        assert mine["data"].equal(its["data"])


# --- the data ------------------------------------------------------------------------------------


@pytest.mark.witness(
    "nanotron", "set consumed_samples", "set iteration", "skip --by-counters", by="nanotron"
)
@pytest.mark.parametrize("layout", ["one rank", "zero 1"])
def test_the_data_goes_on_where_the_metadata_says(
    run: Maker, originals: Maker, layout: str
) -> None:
    root, size = run(layout), 2 * LAYOUTS[layout][0]
    before = snapshot(root)
    operate(root, {"set": {"consumed_samples": 3 * size, "iteration": 3}})
    used = train(Path(shutil.copytree(root, root.with_name("twin"))), 4, layout)
    assert used[4]["batch"] == told(originals, "whole", layout)[4]["batch"]
    take_back(root, before)
    plan = operate(root, {"rollback": {"to": 4}, "skip": ["5"], "skip_by_counters": True})
    assert plan.promise is not None and plan.promise.consumed_samples == 5 * size
    used = train(root, 6, layout)
    assert used[5]["batch"] == told(originals, "again", layout)[6]["batch"]


# --- new numbers ---------------------------------------------------------------------------------


@pytest.mark.witness("nanotron", "scale", "average", "graft moments", by="nanotron")
@pytest.mark.parametrize("layout", ["zero 1", "tensor parallel"])
def test_new_masters_and_moments_are_what_it_loads(run: Maker, layout: str) -> None:
    """Its weights are the masters, rounded, so its next update goes on from both."""
    root = run(layout)
    before = snapshot(root)
    old = train(Path(shutil.copytree(root, root.with_name("old"))), 7, layout)[7]
    files = sorted((root / "6/model").rglob("*.safetensors"))
    weights = {path: load_file(path)["data"].float() for path in files}
    apply(root, {"scale": {"params": ".", "by": 0.5}})
    new = train(Path(shutil.copytree(root, root.with_name("new"))), 7, layout)[7]
    assert new["norm"] == pytest.approx(old["norm"] / 2, rel=1e-12)
    assert all(load_file(path)["data"].float().equal(weights[path] / 2) for path in files)
    take_back(root, before)
    apply(root, {"average": {"last": 3}})
    mean = train(Path(shutil.copytree(root, root.with_name("mean"))), 7, layout)[7]
    assert mean["masters"] != old["masters"] and mean["moments"] == old["moments"]
    take_back(root, before)
    apply(root, {"graft": {"step": 2}})
    grafted = train(root, 7, layout)[7]
    assert (grafted["masters"], grafted["adam_step"]) == (old["masters"], 2)
    assert grafted["moments"] != old["moments"]


# --- hints, carried out --------------------------------------------------------------------------


def test_a_schedule_of_its_config_is_set_as_it_is_said(run: Maker) -> None:
    root = run()
    what, hint = refused(root, {"set": {"min_lr": 2e-5, "warmup": 4, "decay": 12}})
    assert what == "nanotron takes decay, min_lr, warmup from its config alone"
    keys = hint.removeprefix(f"relaunch with these under {nanotron.SECTION}: ")
    used = train(root, 14, **scheduled(keys))
    wanted = {**SCHEDULE, **yaml.safe_load(f"{{{keys}}}")}
    assert wanted["lr_decay_steps"] == 8
    rates = [used[step]["lr"][0] for step in range(8, 15)]
    factors = [nanotron.factor(wanted, step - 1, 1e-3) or 0 for step in range(8, 15)]
    assert rates == pytest.approx([1e-3 * factor for factor in factors], rel=1e-12)
    assert rates[-1] == pytest.approx(2e-5)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_cooldown_goes_down_as_it_is_said(run: Maker, shape: str) -> None:
    """From the rate that the next step would have had, in the first update too."""
    root = run()
    rate = 1e-3 * (nanotron.factor(SCHEDULE, 6, 1e-3) or 0)
    recipe = from_data({"cooldown": {"steps": 4, "shape": shape, "to": 1e-5}})
    plan = surgery.plan(Run.open(root), recipe)
    surgery.apply(Run.open(root), plan)
    hint = plan.warnings[-1]
    assert refused(root, dict(plan.recipe))[1] in hint
    keys = hint.removeprefix(f"relaunch with these under {nanotron.SECTION}: ")
    log = root.with_name("log")
    config = scheduled(keys.partition(": the decay is in")[0])
    used = train(root, 12, log=log, **config)
    wanted = [1e-5 + (rate - 1e-5) * shapes.share(shape, k / 4) for k in range(5)] + [1e-5]
    rates = [used[step]["lr"][0] for step in range(7, 13)]
    assert rates == pytest.approx(wanted, rel=1e-12)
    done = call("verify", "6", "--log", log, "-C", root)
    assert done.exit_code == 0 and "as before the surgery" not in done.output, done.output


def test_a_shape_that_it_lacks_leads_to_one_that_it_has(run: Maker) -> None:
    what, hint = refused(run(), {"cooldown": {"steps": 4, "shape": "1-sqrt"}})
    assert "no decay of the shape 1-sqrt" in what and "--shape linear" in hint


def test_clipping_and_the_seed_of_the_data_are_set_as_it_is_said(
    run: Maker, originals: Maker
) -> None:
    root, old = run(), told(originals, "again")
    operate(root, {"rollback": {"to": 4}})
    config = {}
    for key, value in (("clip_grad", 0.25), ("seed", 4321)):
        _, hint = refused(root, {"set": {key: value}})
        said = re.fullmatch(
            r"in the trainer's config, set (\S+) to (\S+), then relaunch(?: \(.*\))?", hint
        )
        assert said is not None
        config[said[1].replace(".", "__")] = yaml.safe_load(said[2])
    used = train(root, 6, **config)
    assert used[5]["gradient"] == pytest.approx(0.25, rel=1e-4) and old[5]["gradient"] > 0.5
    assert used[5]["batch"] != old[5]["batch"]


def test_weights_alone_are_taken_as_it_is_said(run: Maker) -> None:
    """As another optimizer is: this release has AdamW alone."""
    root = run()
    assert "model.init_method.path" in refused(root, {"swap_optimizer": {"to": "sgdw"}})[1]
    old = train(Path(shutil.copytree(root, root.with_name("old"))), 7)[7]
    new = root.with_name("new")
    start = {"path": str(root / "6")}
    used = train(new, 2, checkpoints__resume_checkpoint_path=None, model__init_method=start)
    assert used[1]["adam_step"] == 0
    assert used[1]["norm"] == pytest.approx(old["norm"], rel=1e-3)


# --- what it prints ------------------------------------------------------------------------------


def test_what_it_prints_is_compared_with_the_promise(run: Maker, tmp_path: Path) -> None:
    root, new, old = run(), tmp_path / "new.txt", tmp_path / "old.txt"
    train(Path(shutil.copytree(root, tmp_path / "twin")), 8, log=old)
    operate(root, {"rollback": {"to": 4}, "set": {"lr": 3e-4}})
    train(root, 8, log=new)
    done = call("verify", "4", "--log", new, "-C", root)
    assert done.exit_code == 0, done.output
    assert "lr of update 6: 0.00028" in done.output
    stale = call("verify", "4", "--log", old, "-C", root)
    assert "agrees with the promise of step 5: lr" not in stale.output
    assert call("advise", "--log", new).exit_code in (0, 3)
