"""Composer: its own Trainer writes files and, on two ranks, folders, and resumes from edits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ckptsurgeon import look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.composer import needed, train
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [pytest.mark.formats, needed]
Maker = Callable[..., Path]
VALUES = {"lr": 3e-4, "beta2": 0.98, "eps": 1e-6, "weight_decay": 0.3}


def call(*words: object) -> Result:
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(app, [str(w) for w in words])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A run of six batches, trained once, by optimizer and ranks."""
    made: dict[tuple[str, int], Path] = {}

    def make(optimizer: str, ranks: int) -> Path:
        if (optimizer, ranks) not in made:
            root = tmp_path_factory.mktemp("composer") / "run"
            used = train(root, 6, "--optimizer", optimizer, ranks=ranks)
            (root.parent / "used.json").write_text(json.dumps(used))
            made[optimizer, ranks] = root
        return made[optimizer, ranks]

    return make


@pytest.fixture
def run(originals: Maker, tmp_path: Path) -> Maker:
    def copy(optimizer: str = "AdamW", ranks: int = 1) -> Path:
        original = originals(optimizer, ranks)
        shutil.copy(original.parent / "used.json", tmp_path)
        return Path(shutil.copytree(original, tmp_path / "run", symlinks=True))

    return copy


@pytest.mark.parametrize(
    ("optimizer", "ranks"), [("AdamW", 1), ("DecoupledAdamW", 1), ("AdamW", 2)]
)
def test_the_promise_is_what_its_trainer_uses(run: Maker, optimizer: str, ranks: int) -> None:
    root = run(optimizer, ranks)
    before = snapshot(root)
    opened = Run.open(root)
    assert opened.format.name == ("composer" if ranks == 1 else "composer-sharded")
    assert (opened.steps(), opened.latest()) == ([2, 4, 6], 6)
    assert look.verify(opened, level=4).findings == ()
    plan = operate(root, {"rollback": {"to": 4}, "set": VALUES})
    assert plan.promise is not None and plan.promise.step == 5
    twin = shutil.copytree(root, root.with_name("twin"), symlinks=True)
    used = train(twin, 6, "--optimizer", optimizer, ranks=ranks)
    assert sorted(used) == [5, 6]
    assert used[5]["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)]
    assert used[6]["lr"][0] < used[5]["lr"][0] < 3e-4
    for update in used.values():
        assert update["betas"] == [[0.9, 0.98]] and update["eps"] == [1e-6]
        assert update["weight_decay"] == [0.3]
    assert used[5]["adam_step"] == plan.promise.adam_step == 4
    take_back(root, before)


@pytest.mark.parametrize(
    ("optimizer", "ranks"), [("AdamW", 1), ("DecoupledAdamW", 1), ("AdamW", 2)]
)
def test_moments_that_are_reset_are_zero_at_the_next_update(
    run: Maker, optimizer: str, ranks: int
) -> None:
    root = run(optimizer, ranks)
    before = snapshot(root)
    plan = operate(root, {"reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    take_back(root, before)
    operate(root, {"reset": ["moments"]})
    used = train(root, 8, "--optimizer", optimizer, ranks=ranks)
    assert (used[7]["adam_step"], used[7]["moments"]) == (0, 0)
    assert used[7]["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rollback_alone_is_followed_by_the_same_updates(run: Maker, ranks: int) -> None:
    """Of rate, moments and data."""
    root = run(ranks=ranks)
    first = json.loads((root.parent / "used.json").read_text())
    operate(root, {"rollback": {"to": 4}})
    assert train(root, 6, ranks=ranks) == {int(step): first[step] for step in ("5", "6")}


def test_what_it_counts_is_not_where_its_loader_goes_on(run: Maker) -> None:
    """`Timestamp.sample` only counts: the loader goes by `batch_in_epoch`, and no number of samples
    is promised."""
    root = run()
    opened = Run.open(root)
    promise = look.inspect(opened).promise
    assert promise is not None and promise.consumed_samples is None
    with pytest.raises(SurgeryError, match="keeps no consumed_samples"):
        surgery.plan(opened, from_data({"set": {"consumed_samples": 40}}))


def said(root: Path, recipe: dict[str, Any]) -> str:
    """What is to be done instead of a surgery that is refused."""
    with pytest.raises(SurgeryError) as caught:
        surgery.plan(Run.open(root), from_data(recipe))
    return caught.value.next[0]


def test_another_seed_is_taken_as_it_is_said(run: Maker) -> None:
    root = run()
    assert "load_ignore_keys=['state/rank_zero_seed', 'rng']" in said(root, {"set": {"seed": 5}})
    again = shutil.copytree(root, root.with_name("again"), symlinks=True)
    assert train(again, 8, seed=5)[7]["seed"] == 7
    used = train(
        root, 8, seed=5, autoresume=False, load_path=str(root / "ep0-ba6-rank0.pt"),
        load_ignore_keys=["state/rank_zero_seed", "rng"],
    )  # fmt: skip
    assert used[7]["seed"] == 5 and used[7]["adam_step"] == 6


def test_another_optimizer_is_taken_as_it_is_said(run: Maker) -> None:
    root = run()
    wanted = {"swap_optimizer": {"to": "sgdw"}}
    assert "load_ignore_keys=['state/optimizers']" in said(root, wanted)
    used = train(
        root, 8, "--optimizer", "DecoupledAdamW", autoresume=False,
        load_path=str(root / "ep0-ba6-rank0.pt"), load_ignore_keys=["state/optimizers"],
    )  # fmt: skip
    assert used[7]["adam_step"] == 0 and sorted(used) == [7, 8]


def test_what_it_prints_and_logs_is_compared_with_the_promise(run: Maker, tmp_path: Path) -> None:
    root, says = run(), tmp_path / "says"
    says.mkdir()
    old, log, points = tmp_path / "old.txt", says / "log", says / "tb"
    twin = shutil.copytree(root, tmp_path / "twin", symlinks=True)
    train(twin, 8, "--says", str(says))
    log.rename(old)
    shutil.rmtree(points)
    operate(root, {"rollback": {"to": 4}, "set": {"lr": 3e-4}})
    train(root, 8, "--says", str(says))
    agreed = call("verify", "--log", log, "-C", root, "--json")
    assert agreed.exit_code == 0 and "[batch=5/8]" in agreed.stdout, agreed.stdout
    assert call("verify", "--tb", points, "-C", root).exit_code == 0
    old.touch()  # what was not written to since the surgery is refused
    stale = call("verify", "--log", old, "-C", root)
    assert stale.exit_code == 4 and "as before the surgery" in stale.stdout
