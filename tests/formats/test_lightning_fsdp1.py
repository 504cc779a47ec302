"""Lightning with FSDP1, and with whole files of FSDP2: two ranks resume from edits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look
from tests.support.launch import by_step
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
KINDS = {"one": "lightning-sharded", "two-full": "lightning"}
"""A file of FSDP1 is not among them: on a CPU torch frees what it would put into it."""
BY_KIND = pytest.mark.parametrize("kind", KINDS)
Made = Callable[[str], tuple[Path, dict[int, Any]]]


def train(kind: str, root: Path, stop: int, resume: str = "") -> dict[int, Any]:
    """Two ranks to step `stop`: what each update used."""
    words = ("tests.support.lightning_fsdp2", root, stop, resume, "--strategy", kind)
    return by_step(*words, ranks=2, environment={"TORCHELASTIC_RUN_ID": "1"})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of each kind a run of six steps, and what its updates used."""

    @cache
    def make(kind: str) -> tuple[Path, dict[int, Any]]:
        root = tmp_path_factory.mktemp(kind) / "run"
        return root, train(kind, root, 6)

    return make


@pytest.fixture
def copied(original: Made, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: shutil.copytree(original(kind)[0], tmp_path / "run") / "checkpoints"


@BY_KIND
def test_a_resume_uses_all_that_was_set(
    copied: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    folder = copied(kind)
    before = snapshot(folder)
    run = Run.open(folder)
    assert (run.format.name, run.steps(), run.latest()) == (KINDS[kind], [2, 4, 6], 6)
    assert look.verify(run, level=4).findings == ()
    values = {"lr": 5e-4, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(folder, {"rollback": {"to": 4}, "set": values})
    assert plan.promise is not None and plan.promise.step == 5
    seen = train(kind, shutil.copytree(folder.parent, tmp_path / "resumed"), 6, "last")
    assert sorted(seen) == [5, 6]
    assert seen[5]["lr"] == pytest.approx([plan.promise.lr] * 2, rel=1e-12)
    for step in (5, 6):
        assert seen[step]["betas"] == [[0.9, 0.97]] * 2 and seen[step]["eps"] == [1e-6] * 2
        assert seen[step]["weight_decay"] == [0.3, 0.0]
        assert seen[step]["adam_step"] == step - 1 and seen[step]["moments"] > 0
    take_back(folder, before)


@BY_KIND
def test_moments_that_are_reset_are_zero_at_the_next_update(
    copied: Callable[[str], Path], kind: str
) -> None:
    folder = copied(kind)
    plan = operate(folder, {"reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    used = train(kind, folder.parent, 7, "last")[7]
    assert (used["adam_step"], used["moments"]) == (0, 0)


@BY_KIND
def test_a_rollback_alone_is_followed_by_the_same_updates(
    copied: Callable[[str], Path], original: Made, kind: str
) -> None:
    folder, first = copied(kind), original(kind)[1]
    operate(folder, {"rollback": {"to": 4}})
    again = train(kind, folder.parent, 5, "last")
    assert again == {5: first[5]}
