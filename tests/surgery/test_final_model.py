"""The model that a trainer saves beside its steps at the end: a rollback past it says so."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

WEIGHTS = ("model.safetensors", "model-00001-of-00002.safetensors", "adapter_model.bin")
OTHERS = ("config.json", "training_args.bin", "tokenizer.model", "optimizer.pt")
STEPS = (2, 4, 6)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    beside=st.dictionaries(st.sampled_from(WEIGHTS + OTHERS), st.sampled_from([1, 3, 5, 7])),
    saved=st.sets(st.sampled_from(WEIGHTS + OTHERS[:3])),
    to=st.sampled_from(STEPS),
)
def test_a_rollback_names_weights_beside_the_steps_that_are_newer(
    beside: dict[str, int], saved: set[str], to: int
) -> None:
    """By the time of the file, where a step has one of its name; and touches none of them."""
    with tempfile.TemporaryDirectory() as folder:
        root = make_run(Path(folder).resolve() / "run", STEPS)
        for step in STEPS:
            for name in saved:
                (root / f"checkpoint-{step}" / name).write_bytes(b"w")
            for path in (root / f"checkpoint-{step}").iterdir():
                os.utime(path, (1e9 + step,) * 2)
        for name, at in beside.items():
            (root / name).write_bytes(b"final")
            os.utime(root / name, (1e9 + at,) * 2)
        before = snapshot(root)
        made = plan(Run.open(root), from_data({"rollback": {"to": to}}))
        said = [note for note in made.warnings if " beside the steps " in note]
        newer = {name for name, at in beside.items() if at > to and name in saved & {*WEIGHTS}}
        assert len(said) == (bool(newer) and to != STEPS[-1])
        assert not said or all(name in said[0] for name in newer)
        surgery.apply(Run.open(root), made)
        assert all((root / name).read_bytes() == b"final" for name in beside)
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert snapshot(root) == before
