"""LitGPT's own `pretrain` and `finetune_full` train, are edited by their pages, and resume. Run by
`make test-formats`."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.advise import judge
from ckptsurgeon.look.logged import own
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.export import export
from tests.support.launch import by_step
from tests.support.newest_megatron import beside
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.formats
KINDS = {"pretrain": "litgpt", "finetune": "litgpt-finetune"}
UPDATES, TO = 8, 4
TABLE = "logs/csv/version_0/metrics.csv"


def trained(kind: str, root: Path, *words: object) -> dict[int, Any]:
    """What each update of this start used, by its number from 1."""
    return by_step("tests.support.litgpt_trainer", kind, root, UPDATES, *words)


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[int, Any]]]:
    """By the kind a run, and what its updates used."""
    if not (beside("trainers") / "litgpt").is_dir():
        pytest.skip("make test-formats installs LitGPT")
    roots = {kind: tmp_path_factory.mktemp("began") / kind for kind in KINDS}
    return {kind: (root, trained(kind, root)) for kind, root in roots.items()}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(began: dict[str, tuple[Path, Any]], kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(began[kind][0], tmp_path / kind))


def resumed(kind: str, root: Path, *words: object) -> dict[int, Any]:
    """The same after a resume, in a copy: it trains on there."""
    copy = shutil.copytree(root, root.with_name("copy"))
    said = trained(kind, copy, "--resume", *words)
    shutil.rmtree(copy)
    return said


def test_it_is_known_and_resumes_what_was_promised(root: Path, kind: str) -> None:
    """The steps in the attic are none to `--resume`, which looks at any depth for the highest."""
    run = Run.open(root)
    assert (run.format.name, run.steps()) == (KINDS[kind], [2, 4, 6, 8])
    before = snapshot(root)
    wanted = {"beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(root, {"rollback": {"to": TO}, "set": wanted})
    assert plan.promise is not None and plan.promise.step == TO + 1
    said = resumed(kind, root)
    assert [*said] == [*range(1, UPDATES - TO + 1)]
    used = said[1]
    assert (used["betas"][1], used["eps"], used["weight_decay"]) == (0.9, 1e-6, 0.3)
    assert used["adam_step"] == plan.promise.adam_step == TO and used["norm"] > 0
    take_back(root, before)
    operate(root, {"rollback": {"to": TO}, "reset": ["moments"]})
    used = resumed(kind, root)[1]
    assert (used["adam_step"], used["norm"]) == (0, 0)
    take_back(root, before)


def test_a_rate_is_the_schedulers_or_the_configs(
    began: dict[str, tuple[Path, Any]], root: Path, kind: str
) -> None:
    """`pretrain` makes each rate of its config; `finetune_full` goes on by the scheduler."""
    words: tuple[object, ...] = ()
    operate(root, {"rollback": {"to": TO}})
    recipe = {"set": {"lr": 5e-3}}  # half of the peak
    if kind == "pretrain":
        with pytest.raises(SurgeryError, match="does not decide lr") as refused:
            surgery.plan(Run.open(root), from_data(recipe))
        assert "optimizer.init_args.lr to 0.005" in str(refused.value.next[0])
        words = ("--lr", 5e-3)
    else:
        promise = operate(root, recipe).promise
    used = [each["lr"] for each in resumed(kind, root, *words).values()]
    _, first = began[kind]
    assert used == pytest.approx([first[n]["lr"] / 2 for n in range(TO + 1, UPDATES + 1)], rel=1e-9)
    assert kind == "pretrain" or (promise is not None and promise.lr == used[0])


def test_its_table_is_cut_at_the_micro_batch_of_the_step(root: Path, kind: str) -> None:
    """`pretrain` counts them from 0 and `finetune_full` from 1; each row has `iter` too."""
    before = snapshot(root)
    assert judge(own(Run.open(root), {})).newest == 16 - (kind == "pretrain")
    plan = operate(root, {"rollback": {"to": TO}})
    assert plan.promise is not None and "logs" not in plan.promise.not_known
    with (root / TABLE).open(newline="") as file:
        left = [int(row["iter"]) for row in csv.DictReader(file) if row["iter"]]
    assert left == [n for n in range(1, 2 * TO + 1) if kind == "finetune" or n % 2 == 0]
    take_back(root, before)


def test_export_is_what_the_step_holds(root: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    run = Run.open(root)
    export(run, TO, tmp_path / "weights")
    exported = {
        k: v
        for file in (tmp_path / "weights").glob("*.safetensors")
        for k, v in load_file(file).items()
    }
    saved = torch.load(next(root.glob(f"step-*{TO}/lit_model.pth")), weights_only=False)["model"]
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert look.verify(run, level=4).findings == ()
