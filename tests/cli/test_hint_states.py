"""Each refusal leads somewhere, whatever has become of the run: its hints are followed to their end
(see `tests.support.hint_walk`), in each state that a run is left in by people, disks and trainers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.hint_walk import COMMANDS, walk

MORE = (
    "advise",
    "average --last 2",
    "clip-moments --above 1",
    "cooldown 10%",
    "diff latest FIRST",
    "doctor --vitals",
    "export FIRST -o EXPORT",
    "log 0001",
    "precision bf16",
    "ready",
    "redo",
    "repair-latest --to FIRST",
    "report -o PICTURE",
    "rollback --to 1",
    "rollback --to latest",
    "scale wte --by 0.5",
    "set loss_scale=1",
    "show latest",
    "truncate-logs --after 1",
    "undo 0001",
    "verify latest --against FIRST",
    "verify latest --after 2",
)


def nothing(root: Path) -> None:
    """Step 6 of 8, with a surgery in force."""


def without_steps(root: Path) -> None:
    for step in steps(root):
        shutil.rmtree(step)


def pointing_nowhere(root: Path) -> None:
    (root / "latest").write_text("global_step99")


def without_pointer(root: Path) -> None:
    (root / "latest").unlink()


def with_empty_pointer(root: Path) -> None:
    (root / "latest").write_text("")


def pointing_apart(root: Path) -> None:
    (root / "latest").write_text("global_step2")


def torn(root: Path) -> None:
    halve(shard(steps(root)[-1]))


def all_torn(root: Path) -> None:
    for step in steps(root):
        halve(shard(step))


def lacking_a_shard(root: Path) -> None:
    shard(steps(root)[-1]).unlink()


def without_logs(root: Path) -> None:
    shutil.rmtree(root / "tensorboard")


def logs_alone(root: Path) -> None:
    without_steps(root)
    for pointer in root.glob("latest*"):
        pointer.unlink()


def with_torn_logs(root: Path) -> None:
    for path in (root / "tensorboard").glob("events*"):
        halve(path)


def with_one_step(root: Path) -> None:
    for step in steps(root)[:-1]:
        shutil.rmtree(step)


def without_the_edited_step(root: Path) -> None:
    shutil.copytree(root / "global_step6", root / "global_step8")
    (root / "latest").write_text("global_step8")
    shutil.rmtree(root / "global_step6")


def undone(root: Path) -> None:
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))


def with_a_torn_receipt(root: Path) -> None:
    halve(root / ".ckptsurgeon/receipts/0001/receipt.json")


def without_receipts(root: Path) -> None:
    shutil.rmtree(root / ".ckptsurgeon/receipts")


def without_an_attic(root: Path) -> None:
    shutil.rmtree(root / ".ckptsurgeon/attic")


def pruned(root: Path) -> None:
    shutil.rmtree(root / ".ckptsurgeon/attic")
    (root / ".ckptsurgeon/receipts/0001/pruned").touch()


def steps(root: Path) -> list[Path]:
    return sorted(root.glob("global_step*"))


def shard(step: Path) -> Path:
    return min(step.glob("*optim_states.pt"))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


STATES = (
    nothing, without_steps, pointing_nowhere, without_pointer, with_empty_pointer, pointing_apart,
    torn, all_torn, lacking_a_shard, without_logs, logs_alone, with_torn_logs, with_one_step,
    without_the_edited_step, undone, with_a_torn_receipt, without_receipts, without_an_attic,
    pruned,
)  # fmt: skip
NO_RECEIPT = ("log 0001",)
WRONG: Mapping[Callable[[Path], None], Sequence[str]] = {
    logs_alone: ("reset moments --only exp_avg_sq",),
    **dict.fromkeys((undone, with_a_torn_receipt, without_receipts), NO_RECEIPT),
}
"""Commands that are refused before the run is opened, with a hint for one that has what it takes.
"""


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__.replace("_", " "))
@pytest.mark.long
def test_every_hint_helps_whatever_became_of_the_run(
    trained: Trained,
    state: Callable[[Path], None],
    share: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In `make test-long` a fourth of the commands in each state, of each four states all."""
    root = trained()
    run = Run.open(root)
    recipe = from_data({"rollback": {"to": 6}, "set": {"beta2": 0.9}})
    surgery.apply(run, plan(run, recipe))
    state(root)
    monkeypatch.chdir(root)
    saved = [step.name.removeprefix("global_step") for step in steps(root)]
    places = {"BRANCH": "branch", "EXPORT": "export", "PICTURE": "run.svg"}
    words = {key: str(tmp_path / name) for key, name in places.items()}
    words |= {"FIRST": (saved or ["2"])[0], "NEXT": "9"}
    filled = {"STEP": (saved or ["NONE-IS-SAVED"])[0]}
    bad = []
    for command in (*COMMANDS, *MORE)[STATES.index(state) % share :: share]:
        if command in WRONG.get(state, ()):
            continue
        bad += walk([words.get(word, word) for word in command.split()], fill=filled)
    assert not bad, "\n".join(bad)
