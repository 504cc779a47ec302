"""FSDP1, and whole files of FSDP2, by Accelerate and the Trainer: two ranks resume from edits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.export import export
from tests.support.launch import by_step
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
KINDS = {
    "accelerate-1": "accelerate", "accelerate-full": "accelerate", "trainer-1": "transformers",
    "trainer-full": "transformers",
}  # fmt: skip
"""A file of FSDP1 is not among them: on a CPU torch frees what it would put into it."""
BY_KIND = pytest.mark.parametrize("kind", KINDS)
Made = Callable[[str], tuple[Path, dict[int, Any]]]


def train(kind: str, root: Path, stop: int) -> dict[int, Any]:
    """Two ranks to step `stop`, from where the library resumes: what each update used."""
    environment = {"ACCELERATE_USE_CPU": "true"}
    return by_step("tests.support.fsdp2", kind, root, stop, ranks=2, environment=environment)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of each kind a run of six steps, and what its updates used."""

    @cache
    def make(kind: str) -> tuple[Path, dict[int, Any]]:
        root = tmp_path_factory.mktemp(kind) / "run"
        return root, train(kind, root, 6)

    return make


@pytest.fixture
def run(original: Made, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(original(kind)[0], tmp_path / "run"))


@BY_KIND
def test_a_resume_uses_all_that_was_set(run: Callable[[str], Path], kind: str) -> None:
    root = run(kind)
    before = snapshot(root)
    opened = Run.open(root)
    assert (opened.format.name, opened.steps(), opened.latest()) == (KINDS[kind], [2, 4, 6], 6)
    assert look.verify(opened, level=4).findings == ()
    values = {"lr": 5e-4, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(root, {"rollback": {"to": 4}, "set": values})
    assert plan.promise is not None and plan.promise.step == 5
    seen = train(kind, Path(shutil.copytree(root, root.parent / "resumed")), 6)
    assert sorted(seen) == [5, 6]
    assert seen[5]["lr"] == [plan.promise.lr] * 2
    for step in (5, 6):
        assert seen[step]["betas"] == [[0.9, 0.97]] * 2 and seen[step]["eps"] == [1e-6] * 2
        assert seen[step]["weight_decay"] == [0.3, 0.0]
    if kind.endswith("full"):
        assert seen[5]["adam_step"] == 4 and seen[5]["moments"] > 0
    else:  # a defect of Accelerate's, edited or not
        assert seen[5]["adam_step"] == 0 and seen[5]["moments"] == 0
        assert any("and before 1.13 under FSDP2" in note for note in plan.warnings)
    take_back(root, before)


def test_a_rollback_alone_is_followed_by_the_same_updates(
    run: Callable[[str], Path], original: Made
) -> None:
    root, first = run("accelerate-full"), original("accelerate-full")[1]
    operate(root, {"rollback": {"to": 4}})
    assert train("accelerate-full", root, 6) == {step: first[step] for step in (5, 6)}


@BY_KIND
def test_moments_that_are_reset_are_zero_at_the_next_update(
    run: Callable[[str], Path], kind: str
) -> None:
    root = run(kind)
    before = snapshot(root)
    plan = operate(root, {"reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    used = train(kind, Path(shutil.copytree(root, root.parent / "resumed")), 7)[7]
    assert (used["adam_step"], used["moments"]) == (0, 0)
    take_back(root, before)


def test_moments_are_known_by_the_names_of_their_parameters(run: Callable[[str], Path]) -> None:
    root = run("accelerate-full")
    before = snapshot(root)
    operate(root, {"reset": ["moments"], "moments": {"params": "weight$"}})
    used = train("accelerate-full", Path(shutil.copytree(root, root.parent / "resumed")), 7)[7]
    weights, biases = used["tensors"]["exp_avg"][:2], used["tensors"]["exp_avg"][2:]
    assert not any(map(any, weights)) and all(map(any, biases))
    take_back(root, before)


def test_whole_files_of_two_models_are_averaged_apart(
    tmp_path: Path,
) -> None:
    """Each in a file of its own, by the same names: the second one stayed as it was."""
    root = tmp_path / "run"
    train("two-models-full", root, 4)
    before, folder = snapshot(root), root / "step_4"
    files = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin")
    old = [[torch.load(root / f"step_{n}" / name) for n in (2, 4)] for name in files]
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data({"average": {"last": 2}})))
    for name, (first, last) in zip(files, old, strict=True):
        for key, tensor in torch.load(folder / name).items():
            assert torch.equal(tensor, ((first[key].double() + last[key].double()) / 2).float())
    wanted = [torch.load(folder / name) for name in files]
    seen = train("two-models-full", Path(shutil.copytree(root, tmp_path / "resumed")), 5)[5]
    for used, model in zip(seen, wanted, strict=True):
        found = sorted(x for tensor in used["tensors"]["weights"] for x in tensor)
        assert found == sorted(x for t in model.values() for x in t.flatten().tolist())
    with pytest.raises(SurgeryError, match="2 models, and one export holds one"):
        export(Run.open(root), 4, tmp_path / "weights")
    take_back(root, before)


def test_local_files_are_what_the_library_does_not_load(tmp_path: Path) -> None:
    """`LOCAL_STATE_DICT`: said by name, and no damage; a rollback moves the step, and of an edit
    nobody says that the next step uses it."""
    root = tmp_path / "run"
    train("accelerate-local", root, 4)
    found = look.verify(Run.open(root), level=3).findings
    assert len(found) == 2 and all("LOCAL_STATE_DICT saved it" in text for text in found)
    with pytest.raises(AssertionError, match="Unsupported global"):
        train("accelerate-local", Path(shutil.copytree(root, tmp_path / "resumed")), 6)
    before = snapshot(root)
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": 2}})))
    assert Run.open(root).steps() == [2]
    take_back(root, before)
    run = Run.open(root)
    plan = surgery.plan(run, from_data({"set": {"lr": 5e-4}}))
    receipt = surgery.apply(run, plan)
    assert receipt.promise is not None and not receipt.promise.asked
    assert any("a resume from this step ends with an error" in note for note in plan.warnings)
    take_back(root, before)
