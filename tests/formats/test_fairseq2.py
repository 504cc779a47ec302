"""fairseq2: its own Trainer saves and resumes what was edited, with each of its schedulers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import run_module, said_by_step
from tests.support.newest_megatron import beside
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(
        not beside("fairseq2").is_dir(), reason="make test-formats installs fairseq2"
    ),
]
PROGRAM = "tests.support.fairseq2_trainer"
SCHEDULES = ["cosine", "cycles", "polynomial", "myle", "noam", "tri-stage"]
VALUES = {"lr": 3e-4, "beta2": 0.98, "eps": 1e-6, "weight_decay": 0.3}
Make = Callable[..., Path]


def train(folder: Path, updates: int, *words: object, ranks: int = 1) -> dict[int, Any]:
    """What each update used, from the step that its manager finds on."""
    return said_by_step(
        run_module(
            PROGRAM, folder, updates, *words, ranks=ranks,
            environment={"PYTHONWARNINGS": "ignore"}, warm=PROGRAM,
        ).stdout
    )  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    made: dict[tuple[str, int], tuple[Path, Any]] = {}

    def make(schedule: str, ranks: int = 1) -> tuple[Path, Any]:
        if (schedule, ranks) not in made:
            root = tmp_path_factory.mktemp("fairseq2") / "out"
            used = train(root, 8, "--schedule", schedule, ranks=ranks)
            made[schedule, ranks] = root, used
        return made[schedule, ranks]

    return make


@pytest.fixture
def copied(original: Callable[..., tuple[Path, Any]], tmp_path: Path) -> Make:
    return lambda *words: Path(shutil.copytree(original(*words)[0], tmp_path / "out"))


@pytest.mark.parametrize(("schedule", "ranks"), [*((name, 1) for name in SCHEDULES), ("cosine", 2)])
def test_the_promise_is_what_the_next_updates_use(
    original: Callable[..., tuple[Path, Any]],
    copied: Make,
    tmp_path: Path,
    schedule: str,
    ranks: int,
) -> None:
    out, words = copied(schedule, ranks), ["--schedule", schedule]
    run = out / "checkpoints"
    before, opened = snapshot(run), Run.open(run)
    assert (opened.format.name, opened.steps(), opened.latest()) == ("fairseq2", [2, 4, 6, 8], 8)
    assert look.verify(opened, level=4).findings == ()
    plan = operate(run, {"rollback": {"to": 4}, "set": VALUES})
    assert look.verify(Run.open(run), level=4).findings == ()
    used = train(Path(shutil.copytree(out, tmp_path / "twin")), 8, *words, ranks=ranks)
    assert plan.promise is not None and [*used] == [5, 6, 7, 8]
    first = used[5]
    assert first["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)] * 2
    assert (tuple(first["betas"]), first["eps"]) == (plan.promise.betas, plan.promise.eps)
    assert tuple(first["weight_decay"]) == plan.promise.weight_decay == (0.3, 0.0)
    assert first["adam_step"] == plan.promise.adam_step == 4 and first["moment"] > 0
    anew = train(tmp_path / "anew", 8, *words, "--lr", VALUES["lr"])
    rates = [anew[step]["lr"] for step in used]
    assert [said["lr"] for said in used.values()] == [pytest.approx(each) for each in rates]
    take_back(run, before)
    operate(run, {"rollback": {"to": 4}})
    again = train(out, 8, *words, ranks=ranks)
    kept = original(schedule, ranks)[1]
    assert again == {step: kept[step] for step in again}


@pytest.mark.parametrize("schedule", ["cosine", "polynomial"])
@pytest.mark.parametrize(
    "values", [{"min_lr": 1e-4}, {"decay": 12}, {"warmup": 6}, {"lr": 2e-3, "warmup": 2}]
)
def test_another_shape_is_the_one_of_a_run_that_began_with_it(
    copied: Make, tmp_path: Path, schedule: str, values: dict[str, Any]
) -> None:
    out, words = copied(schedule), ["--schedule", schedule]
    operate(out / "checkpoints", {"rollback": {"to": 4}, "set": values})
    used = train(out, 8, *words)
    asked = [word for key, value in values.items() for word in (f"--{key}", value)]
    anew = train(tmp_path / "anew", 8, *words, *asked)
    rates = [anew[step]["lr"] for step in used]
    assert [said["lr"] for said in used.values()] == [pytest.approx(each) for each in rates]


@pytest.mark.parametrize(("schedule", "shape"), [("cosine", "cosine"), ("polynomial", "linear")])
def test_a_cooldown_ends_where_it_says(copied: Make, schedule: str, shape: str) -> None:
    out = copied(schedule)
    run, words = out / "checkpoints", ["--schedule", schedule]
    peak = look.inspect(Run.open(run)).promise.lr
    assert peak is not None
    operate(run, {"cooldown": {"steps": 4, "to": 1e-5, "shape": shape}})
    used = train(out, 12, *words)
    assert used[9]["lr"] == [pytest.approx(peak)] * 2
    assert used[11]["lr"] == [pytest.approx((peak + 1e-5) / 2)] * 2
    operate(run, {"cooldown": {"steps": 2, "shape": shape}})
    with pytest.raises(SurgeryError, match="can't decay 1-sqrt") as refused:
        surgery.plan(Run.open(run), from_data({"cooldown": {"steps": 2, "shape": "1-sqrt"}}))
    assert "LambdaLR" in refused.value.next[0]


def test_what_no_schedule_can_be_is_refused(copied: Make) -> None:
    run = Run.open(copied("cosine") / "checkpoints")
    with pytest.raises(UsageError, match="decay 6 is not beyond step 8"):
        surgery.plan(run, from_data({"set": {"decay": 6}}))
    with pytest.raises(UsageError, match="below min_lr"):
        surgery.plan(run, from_data({"set": {"min_lr": 1.0}}))


def test_a_reset_is_what_it_loads(copied: Make) -> None:
    out = copied("cosine", 2)
    plan = operate(out / "checkpoints", {"rollback": {"to": 6}, "reset": ["moments"]})
    used = train(out, 8, ranks=2)[7]
    assert plan.promise is not None and plan.promise.adam_step == used["adam_step"] == 0
    assert used["moment"] == 0


def test_what_it_logs_is_compared_and_cut(copied: Make) -> None:
    out = copied("cosine")
    run, log, events = out / "checkpoints", out / "logs" / "rank_0.log", out / "tb" / "train"
    lines, before = out / "metrics" / "train.jsonl", (snapshot(out), snapshot(run))
    operate(run, {"rollback": {"to": 4}})
    take_back(run, before[1])
    assert snapshot(out) == before[0]
    operate(run, {"rollback": {"to": 4}, "set": {"lr": 3e-4}})
    assert [*events.glob("cut-*")]
    (cut,) = lines.parent.glob("cut-*/train.jsonl")
    for file, steps in ((lines, [1, 2, 3, 4]), (cut, [5, 6, 7, 8])):
        assert [json.loads(line)["Step"] for line in file.read_text().splitlines()] == steps
    old = log.read_text()
    log.write_text("")
    train(out, 8)
    for words in (("--log", log), ("--tb", events)):
        told = CliRunner().invoke(app, ["verify", *map(str, words), "-C", str(run)])
        assert told.exit_code == 0, told.output
        assert "agrees: step 5, lr of update 5: 0.0002975" in told.stdout, told.output
    log.write_text(old)
    told = CliRunner().invoke(app, ["verify", "--log", str(log), "-C", str(run)])
    assert told.exit_code == 4 and "lr of update 5: promised 0.0002975" in told.stdout
