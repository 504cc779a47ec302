"""An undo says "byte for byte" of what it compared, and refuses by name what somebody changed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, report, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.style import Style
from tests.support.snapshot import differs, exact_snapshot, snapshot
from tests.support.tiny_run import make_run

RECIPE = {"rollback": {"to": 4}, "set": {"beta2": 0.9}}


def edited(tmp_path: Path) -> Path:
    """A rollback of two steps with an edit of a shard and of a small file beside it."""
    root = make_run(tmp_path / "run", (4, 8, 12))
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data(RECIPE)))
    return root


def files(root: Path) -> list[Path]:
    """What the undo of it restores: all that is in the attic, and the shard that grew."""
    attic = root / ".ckptsurgeon/attic/0001"
    kept = sorted(path for path in attic.rglob("*") if path.is_file())
    return [*kept, root / "checkpoint-4/optimizer.pt"]


def said(run: Run, *, as_they_are: bool = False) -> str:
    done = surgery.apply(run, surgery.plan_undo(run, as_they_are=as_they_are))
    return report.done(done, Style(width=300))


def test_a_file_that_somebody_changed_is_refused_by_name(tmp_path: Path) -> None:
    """One byte of any of them, a file more, and a file less."""
    root = edited(tmp_path)
    run = Run.open(root)
    restored = files(root)
    assert len(restored) == 7
    for path in restored:
        data, status = path.read_bytes(), path.stat()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        before = exact_snapshot(root)
        with pytest.raises(SurgeryError, match=path.name) as refused:
            surgery.plan_undo(run)
        assert "--as-they-are" in refused.value.next[1]
        assert exact_snapshot(root) == before
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    more = restored[0].with_name("more")
    more.write_text("")
    with pytest.raises(SurgeryError, match="more"):
        surgery.plan_undo(run)
    more.unlink()
    away = restored[0].rename(tmp_path / "away")
    with pytest.raises(SurgeryError, match=restored[0].name):
        surgery.plan_undo(run)
    away.rename(restored[0])
    assert "byte for byte" in said(run)


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def with_another_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def as_before(path: Path) -> None:
    """Somebody looked at it."""


HANDS = (as_before, touched, with_another_byte, longer)


@given(hands=st.lists(st.sampled_from(HANDS), min_size=6, max_size=6))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_only_what_differs_is_called_changed(hands: list[Callable[[Path], None]]) -> None:
    """A law: what is said of the files that come back is what is known of each. One that has
    another time alone is not called changed; nor is all then byte for byte as it was."""
    with tempfile.TemporaryDirectory() as folder:
        root = edited(Path(folder))
        record = json.loads((root / ".ckptsurgeon/receipts/0001/kept.json").read_text())
        hashed = {root / name for name, (_, _, sha256) in record.items() if sha256}
        changed, unknown = set(), set()
        for path, hand in zip(files(root), hands, strict=False):
            hand(path)
            if hand is longer or (hand is with_another_byte and path in hashed):
                changed.add(path)
            elif hand is not as_before and path not in hashed:
                unknown.add(path)
        run = Run.open(root)
        if changed or unknown:
            with pytest.raises(SurgeryError) as refused:
                surgery.plan_undo(run)
            assert ("changed since" in refused.value.what) == bool(changed)
            assert any(path.name in refused.value.what for path in changed or unknown)
        found = surgery.plan_undo(run, as_they_are=True)
        assert found.restored == ("changed" if changed else "not compared" if unknown else "same")
        named = "".join(found.warnings)
        assert ("changed since" in named, "without their times" in named) == (
            bool(changed), bool(unknown),
        )  # fmt: skip


def test_a_copy_without_times_is_not_called_changed(tmp_path: Path) -> None:
    """`cp -r`: the bytes are the same, and nothing that was kept says so."""
    root, copy = edited(tmp_path), tmp_path / "copy"
    shutil.copytree(root, copy, copy_function=shutil.copyfile)
    run = Run.open(copy)
    with pytest.raises(SurgeryError, match="as in a copy of a run") as refused:
        surgery.plan_undo(run)
    assert "cp -a" in refused.value.next[0]
    told = said(run, as_they_are=True)
    assert "checkpoints and logs are restored, and not compared" in told and "changed" not in told
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert differs(snapshot(copy), snapshot(root), times=False) is None


def test_changed_files_are_taken_as_they_are_when_that_is_asked(tmp_path: Path) -> None:
    root = edited(tmp_path)
    run = Run.open(root)
    state = root / ".ckptsurgeon/attic/0001/checkpoint-8/trainer_state.json"
    state.write_text("{}")
    told = said(run, as_they_are=True)
    assert "byte for byte" not in told and "but for files taken or left as they are" in told
    assert (root / "checkpoint-8/trainer_state.json").read_text() == "{}"


def test_a_receipt_without_hashes_is_undone_and_called_not_compared(tmp_path: Path) -> None:
    """Those that were made before anything was kept to compare with."""
    root = make_run(tmp_path / "run", (4, 8))
    before = snapshot(root)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data(RECIPE)))
    folder = root / ".ckptsurgeon/receipts/0001"
    (folder / "kept.json").unlink()
    receipt = json.loads((folder / "receipt.json").read_text())
    for edit in receipt["inverse"]:
        edit.pop("new_mtime_ns", None)
    del receipt["restored"]
    (folder / "receipt.json").write_text(json.dumps(receipt))
    told = said(Run.open(root))
    assert "byte for byte" not in told and "not compared" in told
    assert snapshot(root) == before


def test_an_undo_of_an_undo_is_compared_too(tmp_path: Path) -> None:
    root = edited(tmp_path)
    after = snapshot(root)
    run = Run.open(root)
    for _ in range(3):
        assert "byte for byte" in said(run)
        redone = surgery.apply(run, surgery.plan_redo(run))
        assert "byte for byte" in report.done(redone, Style(width=300))
        assert snapshot(root) == after
