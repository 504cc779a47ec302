"""Megatron-LM with Megatron-FSDP: its own training loop saves fsdp_dtensor on two ranks, and goes
on from what was edited.

Run by `make test-formats`; without the newest megatron-core they are skipped."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ckptsurgeon import look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.guard.ready import decide
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support import newest_megatron
from tests.support.launch import run_module
from tests.support.megatron_fsdp import TRACKER
from tests.support.new_numbers import State, cases, same
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(
        not newest_megatron.FOLDER.is_dir(), reason="make test-formats installs the newest megatron"
    ),
]
PROGRAM = "tests.support.megatron_fsdp"
DECOUPLED = ["--decoupled-lr", "2e-3", "--decoupled-min-lr", "2e-4"]
EXPERTS = """
    --num-experts 2 --expert-model-parallel-size 2 --moe-router-topk 1 --moe-router-pre-softmax
    --moe-token-dispatcher-type allgather --moe-router-load-balancing-type none
"""
KINDS = {
    "fp32": [],
    "tensor ranks": ["--bf16", "--swiglu", "--tensor-model-parallel-size", "2"],
    "bf16": ["--bf16", "--swiglu", *DECOUPLED],
    "expert ranks": ["--bf16", "--swiglu", *EXPERTS.split()],
}
OTHERS: dict[str, dict[str, Any]] = {
    "skip": {"skip": ["7-10"], "skip_by_counters": True},
    "samples": {"set": {"consumed_samples": 160, "iteration": 20}},
    "cooldown": {"cooldown": {"steps": 2}},
    "1-sqrt": {"cooldown": {"steps": 2, "shape": "1-sqrt"}},
    "restart": {"rewarm_schedule": {"to": 3e-4, "warmup": 2, "decay": 6}},
    "one moment": {"reset": ["moments"], "moments": {"only": "exp_avg"}},
}
VALUES = {"lr": 3e-4, "min_lr": 3e-5, "beta2": 0.99, "eps": 1e-7, "weight_decay": 0.05}
NAME = "module.module.decoder.layers.0.mlp.linear_fc1.weight"


def train(root: Path, stop: int, *options: str, ranks: int = 2, status: int = 0) -> Any:
    """To iteration `stop`: what each update used, and under "printed" the lines."""
    done = run_module(
        PROGRAM, stop, root, *options, ranks=ranks, status=status,
        environment={"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    if status:
        return done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"'))
    return {**json.loads(line), "printed": done.stdout}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            root = made[kind] = tmp_path_factory.mktemp(kind) / "run"
            told = train(root, 6, *KINDS[kind])
            (root.parent / "told.json").write_text(json.dumps(told))
        return made[kind]

    return make


@pytest.fixture
def copied(original: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(original(kind), tmp_path / "run"))


def flags(plan: Plan) -> list[str]:
    """What the plan says to relaunch with."""
    said = (re.match(r"relaunch (?:also )?with (--[^:]+):", text) for text in plan.warnings)
    return [word for match in said if match for word in match[1].split()]


@pytest.mark.witness(
    "Megatron-LM fsdp_dtensor",
    "rollback",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="newest megatron-core",
)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_promise_is_what_the_next_update_uses(kind: str, copied: Callable[[str], Path]) -> None:
    root = copied(kind)
    before = snapshot(root)
    opened = Run.open(root)
    assert (opened.format.name, opened.steps(), opened.latest()) == ("megatron", [2, 4, 6], 6)
    assert "fsdp_dtensor" in look.inspect(opened).dialect
    assert look.verify(opened, level=4).findings == ()
    plan = operate(root, {"rollback": {"to": 4}, "set": VALUES, "reset": ["moments"]})
    promise = plan.promise
    assert promise is not None and promise.step == 5
    twin = Path(shutil.copytree(root, root.with_name("twin")))
    told = train(twin, 6, *KINDS[kind], *flags(plan))
    first = told["5"]
    assert min(first["lr"]) == promise.lr
    assert {tuple(betas) for betas in first["betas"]} == {promise.betas} == {(0.9, 0.99)}
    assert set(first["eps"]) == {promise.eps} == {1e-7}
    assert set(first["weight_decay"]) == set(promise.weight_decay or ()) == {0.05, 0.0}
    assert set(first["adam_step"]) == {promise.adam_step} == {0}
    assert first["moments"] == 0 and first["consumed_samples"] == promise.consumed_samples == 32
    assert set(told["6"]["adam_step"]) == {1} and max(told["6"]["lr"]) < max(first["lr"])
    if kind == "bf16":
        assert {"--decoupled-lr", "--decoupled-min-lr"} <= set(flags(plan))
        assert max(first["lr"]) == pytest.approx(2 * min(first["lr"]), rel=1e-12)
    take_back(root, before)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_alone_is_followed_by_the_same_updates(
    kind: str, copied: Callable[[str], Path], original: Callable[[str], Path]
) -> None:
    first = json.loads((original(kind).parent / "told.json").read_text())
    root = copied(kind)
    operate(root, {"rollback": {"to": 4}})
    again = train(root, 6, *KINDS[kind])
    assert sorted(again) == ["5", "6", "end", "printed"]
    assert [again[key] for key in ("5", "6", "end")] == [first[key] for key in ("5", "6", "end")]


@pytest.mark.witness(
    "Megatron-LM fsdp_dtensor", "reset moments --params", by="newest megatron-core"
)
def test_one_half_of_a_gated_layer_is_reset_by_its_name(
    copied: Callable[[str], Path], original: Callable[[str], Path]
) -> None:
    """Megatron saves `linear_fc1.weight` of SwiGLU as two, of which the state has its own names."""
    root = copied("bf16")
    before = snapshot(root)
    recipe = {"reset": ["moments"], "moments": {"params": r"layers\.0\.mlp\.linear_fc1\.weight_w"}}
    operate(root, recipe)
    now, was = gathered([root, original("bf16")], *KINDS["bf16"])
    (name,) = (name for name in now if "layers.0.mlp.linear_fc1.weight" in name)
    gate, up = now[name]["exp_avg"].chunk(2)
    assert not gate.any() and torch.equal(up, was[name]["exp_avg"].chunk(2)[1]) and up.any()
    for other in now.keys() - {name}:
        assert torch.equal(now[other]["exp_avg"], was[other]["exp_avg"])
    take_back(root, before)


def gathered(roots: list[Path], *options: str) -> list[State]:
    """What each run loads of every parameter."""
    run_module(
        PROGRAM, 0, *roots, "--gather", *options, ranks=2,
        environment={"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    return [torch.load(root.with_name(f"{root.name}.pt")) for root in roots]


@pytest.mark.witness(
    "Megatron-LM fsdp_dtensor",
    "average",
    "average --moments average",
    "scale",
    "scale --moments scale",
    "graft moments",
    "graft moments --params",
    "clip_moments",
    by="newest megatron-core",
)
def test_new_numbers_are_what_is_loaded(original: Callable[[str], Path], tmp_path: Path) -> None:
    roots = {name: tmp_path / name for name in ("first", "last", *cases(4, 6, NAME))}
    for root in roots.values():
        shutil.copytree(original("fp32"), root)
    (roots["first"] / TRACKER).write_text("4")
    before = snapshot(roots["last"])
    for name, (recipe, _) in cases(4, 6, NAME).items():
        run = Run.open(roots[name])
        surgery.apply(run, surgery.plan(run, from_data(recipe)))
        assert look.verify(Run.open(roots[name]), level=4).findings == ()
    first, last, *found = gathered([*roots.values()])
    assert len(first) == 29 and first.keys() == last.keys()
    for state, (_, expected) in zip(found, cases(4, 6, NAME).values(), strict=True):
        same(state, expected(first, last), last)
    for name in cases(4, 6, NAME):
        take_back(roots[name], before)


def test_it_goes_on_with_another_number_of_ranks(copied: Callable[[str], Path]) -> None:
    root = copied("fp32")
    plan = operate(root, {"set": VALUES})
    assert plan.promise is not None
    used = train(root, 7, *flags(plan), ranks=1)["7"]
    assert used["lr"] == [plan.promise.lr] * 2 and set(used["adam_step"]) == {6}
    assert used["moments"] > 0


@pytest.mark.witness(
    "Megatron-LM fsdp_dtensor",
    "skip --by-counters",
    "set consumed_samples",
    "set iteration",
    "cooldown",
    "set-lr --restart",
    "reset moments --only exp_avg",
    by="newest megatron-core",
)
def test_other_operations_are_what_the_next_updates_use(
    original: Callable[[str], Path], tmp_path: Path
) -> None:
    for name, recipe in OTHERS.items():
        root, twin, log = tmp_path / name, tmp_path / f"{name} twin", tmp_path / f"{name}.txt"
        shutil.copytree(original("fp32"), root)
        plan = operate(root, recipe)
        promise = plan.promise
        assert promise is not None
        shutil.copytree(root, twin)
        told = train(twin, promise.step + 1, *flags(plan))
        first = told[str(promise.step)]
        log.write_text(told["printed"])
        said = CliRunner().invoke(app, ["verify", "--log", str(log), "-C", str(root)])
        assert first["lr"] == [promise.lr] * 2, name
        assert first["consumed_samples"] == promise.consumed_samples, name
        assert set(first["adam_step"]) == {promise.adam_step}
        assert said.exit_code == 0, said.output


def test_a_step_that_is_not_persistent_is_none_for_its_loader(tmp_path: Path) -> None:
    root, kept = tmp_path / "run", ["--non-persistent-ckpt-type", "global"]
    train(root, 3, *kept, "--non-persistent-save-interval", "1", "--save-interval", "2")
    plan = surgery.plan(Run.open(root), from_data({"set": {"eps": 1e-7}}))
    assert any("ends with an error" in text for text in plan.warnings)
    assert any("ends with an error" in found.what for found in diagnose(Run.open(root)))
    assert decide(Run.open(root), 2).sound == 2
    assert "CheckpointingException" in train(root, 4, *kept, status=1)
    twin = Path(shutil.copytree(root, tmp_path / "twin"))
    assert decide(Run.open(twin), 2, repair=True).step == 2
    assert sorted(train(twin, 3, *kept)) == ["3", "end", "printed"]
    operate(root, {"rollback": {"to": 2}, "set": {"eps": 1e-7}})
    assert train(root, 4, *kept)["3"]["eps"] == [1e-7] * 2


def test_without_the_flags_of_the_plan_megatron_refuses(copied: Callable[[str], Path]) -> None:
    root = copied("fp32")
    plan = operate(root, {"set": {"lr": 3e-4}})
    assert flags(plan) == ["--lr", "0.0003"]
    assert "do not match" in train(root, 7, status=1)


def test_what_it_prints_is_compared_with_the_promise(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    root = copied("fp32")
    twin = Path(shutil.copytree(root, tmp_path / "twin"))
    (twin / TRACKER).write_text("4")
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_text(train(twin, 6)["printed"])
    plan = operate(root, {"rollback": {"to": 4}, "set": {"lr": 3e-4}})
    again = Path(shutil.copytree(root, tmp_path / "again"))
    new.write_text(train(again, 6, *flags(plan))["printed"])
    old.touch()  # a file from before the surgery is refused
    said = [
        CliRunner().invoke(app, ["verify", "--log", str(log), "-C", str(root)])
        for log in (new, old)
    ]
    assert [each.exit_code for each in said] == [0, 4], said[0].output
    assert "lr of update 6: promised" in said[1].stdout
