"""A link beside the steps never comes to lead nowhere unsaid: the last leads to the step that
stays, any other is named."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

NAMES = ("last-checkpoint", "last", "latest", "latest_ckpt", "best", "lasting", "my-run")
INSIDE = ("", "optimizer.pt", "gone.bin")
"""What of a step a link leads to; one that is in no step leads nowhere already."""

links = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from(INSIDE), st.booleans()),
    max_size=4,
)


@settings(max_examples=30)
@given(links, st.sampled_from([2, 4]))
@example({"last-checkpoint": (6, "", False)}, 4)  # of ms-swift
@example({"best": (6, "", True), "last": (2, "", False)}, 4)
@pytest.mark.long
def test_no_link_comes_to_lead_nowhere_unsaid(
    made: dict[str, tuple[int, str, bool]], to: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = make_run(Path(folder).resolve() / "run", (2, 4, 6))
        for name, (step, inside, absolute) in made.items():
            target = root / f"checkpoint-{step}" / inside
            (root / name).symlink_to(target if absolute else os.path.relpath(target, root))
        before = snapshot(root)
        led = {name: (root / name).resolve() for name in made if (root / name).exists()}
        wanted = from_data({"rollback": {"to": to}})
        change = plan(Run.open(root), wanted)
        surgery.apply(Run.open(root), change)
        assert plan(Run.open(root), wanted).empty
        for name, old in led.items():
            named = any(warning.startswith(f"{name} is a link") for warning in change.warnings)
            new = (root / name).resolve()
            assert (root / name).exists() is not named
            if made[name][0] <= to:
                assert new == old
            elif not named:
                assert new.relative_to(root / f"checkpoint-{to}").name == made[name][1]
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert snapshot(root) == before


def test_undo_takes_back_a_link_that_the_trainer_has_set_since(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (2, 4, 6))
    (root / "last-checkpoint").symlink_to("checkpoint-6")
    before = snapshot(root)
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": 2}})))
    assert str((root / "last-checkpoint").readlink()) == "checkpoint-2"
    make_run(root, (4,))
    (root / "last-checkpoint").unlink()
    (root / "last-checkpoint").symlink_to("checkpoint-4")
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before
