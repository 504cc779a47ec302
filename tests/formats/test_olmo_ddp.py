"""OLMoDDP of OLMo-core: flat masters and moments, saved and loaded by its own optimizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.export import export
from tests.support.launch import run_module
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.olmo,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from tests.support.olmo_ddp import alone, train

    folder = tmp_path_factory.mktemp("olmo_ddp")
    with alone(folder):
        train(folder / "run", 6)
        yield folder / "run"


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def of(held: dict[str, Any], key: str) -> list[Any]:
    return [value for name, value in held.items() if name.endswith(f".{key}")]


@pytest.mark.witness("OLMo-core, OLMoDDP", "rollback", by="ai2-olmo-core")
def test_a_resume_begins_where_the_step_is(root: Path) -> None:
    from tests.support.olmo_ddp import COSINE, LR, STEPS, resume

    before = snapshot(root)
    assert look.verify(Run.open(root), level=4).findings == ()
    plan = operate(root, {"rollback": {"to": 4}})
    module, state = resume(root / "step4")
    assert plan.promise is not None
    assert (plan.promise.step, state["global_step"]) == (5, 4)
    assert plan.promise.lr == pytest.approx(COSINE.get_lr(LR, 5, STEPS))
    assert plan.promise.adam_step == 4 and plan.promise.betas is None
    assert {step.item() for step in of(module.held(), "step")} == {4}
    take_back(root, before)


def begun_anew(root: Path, only: str = "") -> None:
    """The moments of `only` are zero after the library's load, and nothing else is."""
    from tests.support.olmo_ddp import resume

    before, untouched = snapshot(root), resume(root / "step4")[0].held()
    part = {"moments": {"params": only}} if only else {}
    operate(root, {"rollback": {"to": 4}, "reset": ["moments"], **part})
    module, _ = resume(root / "step4")
    for name, value in module.held().items():
        kept = name.endswith(".main") or (only and not name.startswith("0"))
        kept = kept or (only and name.endswith(".step"))  # of parts the count goes on
        assert torch.equal(value, untouched[name] if kept else torch.zeros_like(value)), name
    module.update()
    assert {step.item() for step in of(module.held(), "step")} == ({5} if only else {1})
    take_back(root, before)


@pytest.mark.witness("OLMo-core, OLMoDDP", "rollback", "reset moments", by="ai2-olmo-core")
def test_a_resume_begins_the_moments_anew(root: Path) -> None:
    begun_anew(root)


@pytest.mark.witness("OLMo-core, OLMoDDP", "reset moments --params", by="ai2-olmo-core")
def test_a_resume_begins_the_moments_of_parameters_anew(root: Path) -> None:
    begun_anew(root, "^0")


@pytest.mark.witness("OLMo-core, OLMoDDP", "average", by="ai2-olmo-core")
def test_the_average_of_masters_is_that_of_weights(root: Path) -> None:
    from tests.support.olmo_ddp import resume

    before = snapshot(root)
    held = {step: resume(root / f"step{step}")[0].held() for step in (4, 6)}
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data({"average": {"steps": [4, 6]}})))
    module, _ = resume(root / "step6")
    for name, value in module.held().items():
        if name.endswith(".main"):
            assert torch.allclose(value, (held[4][name] + held[6][name]) / 2)
    weight = module.net[0].weight.detach().flatten()
    assert torch.equal(weight, module.held()["0.weight.main"])
    take_back(root, before)


def test_what_the_config_decides_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    for key, value in (("lr", 1e-4), ("beta2", 0.9), ("eps", 1e-6), ("weight_decay", 0.0)):
        with pytest.raises(SurgeryError, match="keeps no") as refused:
            surgery.plan(Run.open(root), from_data({"set": {key: value}}))
        assert "trainer" in str(refused.value.next)
    with pytest.raises(SurgeryError, match="flat, without their shapes"):
        export(Run.open(root), 6, tmp_path / "out")


def test_a_config_that_begins_anew_is_told(root: Path) -> None:
    from tests.support.olmo_ddp import resume

    file = root / "step6" / "config.json"
    config = json.loads(file.read_text())
    config["train_module"]["reset_optimizer_states_on_resume"] = True
    file.write_text(json.dumps(config))
    plan = surgery.plan(Run.open(root), from_data({"reset": ["moments"]}))
    assert plan.promise is not None and plan.promise.adam_step is None
    told = "reset_optimizer_states_on_resume=true: a resume begins the moments"
    assert told in "\n".join(plan.warnings)
    module, _ = resume(root / "step6", reset=True)
    assert {step.item() for step in of(module.held(), "step")} == {0}


# --- two ranks -----------------------------------------------------------------------------------


@pytest.mark.witness("OLMo-core, OLMoDDP", "rollback", "reset moments", by="ai2-olmo-core")
@pytest.mark.witness("OLMo-core, OLMoDDP", "reset moments --params", by="ai2-olmo-core")
def test_two_ranks_that_share_a_state_begin_where_the_step_is(tmp_path: Path) -> None:
    """Of one weight each rank has half of the master and moments; the others are on both."""
    run = tmp_path / "run"
    run_module("tests.support.olmo_ddp", "train", run, 6, ranks=2)
    whole, part = (Path(shutil.copytree(run, tmp_path / name)) for name in ("whole", "part"))
    before = snapshot(whole)
    promise = operate(whole, {"rollback": {"to": 4}, "reset": ["moments"]}).promise
    assert promise is not None and (promise.step, promise.adam_step) == (5, 0)
    some = {"moments": {"params": "^0"}}
    operate(part, {"rollback": {"to": 4}, "reset": ["moments"], **some})
    steps = (root / "step4" for root in (run, whole, part))
    run_module("tests.support.olmo_ddp", "resume", tmp_path / "told", *steps, ranks=2)
    for rank in range(2):
        told = torch.load(tmp_path / f"told.{rank}")
        assert [item["step"] for item in told] == [4, 4, 4]
        assert [item["then"] for item in told] == [{5}, {1}, {5}]
        as_saved, anew, some_anew = (item["held"] for item in told)
        assert as_saved["0.weight.main"].shape == (64,) and as_saved["0.weight.exp_avg"].any()
        for name, value in as_saved.items():
            kept = name.endswith(".main")
            assert torch.equal(anew[name], value if kept else torch.zeros_like(value)), name
            kept = kept or not name.startswith("0") or name.endswith(".step")
            assert torch.equal(some_anew[name], value if kept else torch.zeros_like(value)), name
    take_back(whole, before)
