"""prune names what it removes, asks, and makes undo refuse; unlock shows who held the lock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsurgeon import disk
from ckptsurgeon.report.style import size
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.faults.inject import Fault
from tests.support.snapshot import snapshot


def test_prune_removes_the_attic_and_undo_says_so(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    surgeon("set", "beta1=0.8", "--no-tb-note", "--yes", "-C", root)
    attic = root / ".ckptsurgeon" / "attic" / "0001"
    assert (attic / "global_step8").is_dir()
    before = snapshot(root)

    told = json.loads(surgeon("prune", "--dry-run", "--json", "-C", root).stdout)
    assert [item["id"] for item in told["attics"]] == ["0001"]
    assert told["attics"][0]["bytes"] > 0
    assert attic.is_dir()

    result = surgeon("prune", "--keep", 0, "--yes", "-C", root)
    assert result.exit_code == 0
    assert "0001" in result.stdout
    assert not attic.exists()
    assert snapshot(root) == before

    assert surgeon("undo", "--yes", "-C", root).exit_code == 0  # 0002 kept nothing in the attic
    result = surgeon("undo", "--yes", "-C", root)
    assert result.exit_code == 1
    assert "the attic of receipt 0001 was pruned" in result.stderr
    told = json.loads(surgeon("prune", "--dry-run", "--json", "-C", root).stdout)
    assert [item["id"] for item in told["attics"]] == ["0003"]  # what a redo needs
    assert surgeon("prune", "--keep", 0, "--yes", "-C", root).exit_code == 0
    assert "the attic of receipt 0003 was pruned" in surgeon("redo", "-C", root).stderr
    assert surgeon("prune", "-C", root).stdout.startswith("nothing to prune")


def test_what_was_pruned_is_named_at_once(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("set", "beta1=0.8", "--no-tb-note", "--yes", "-C", root)
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    surgeon("prune", "--keep", 0, "--yes", "-C", root)
    for id in ([], ["0002"], ["0001"]):
        told = surgeon("undo", *id, "--yes", "-C", root)
        assert told.exit_code == 1 and "the attic of receipt 0002 was pruned" in told.stderr
    assert "and neither can 0001 before it" in told.stderr


def test_prune_says_how_much_it_is(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    for step in (6, 4):
        surgeon("rollback", "--to", step, "--yes", "-C", root)
    each = json.loads(surgeon("prune", "-n", "--json", "-C", root).stdout)["attics"]
    total = size(sum(item["bytes"] for item in each))
    assert f"\n  total  - {total}\n" in surgeon("prune", "-n", "-C", root).stdout
    done = surgeon("prune", "--keep", 0, "--yes", "-C", root).stdout
    assert done.endswith(f"removed for good: {total} in 2 attics, of 0001, 0002\n")


def test_prune_keeps_the_newest(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("rollback", "--to", 6, "--yes", "-C", root)
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    assert surgeon("prune", "--keep", 1, "--yes", "-C", root).exit_code == 0
    assert sorted(p.name for p in (root / ".ckptsurgeon" / "attic").iterdir()) == ["0002"]


def test_prune_does_not_take_yes_for_a_run_that_was_not_named(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained()
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    monkeypatch.chdir(root)
    result = surgeon("prune", "--keep", 0, "--yes")
    assert result.exit_code == 1
    assert f"next: ckptsurgeon prune --keep 0 --yes --run {root}\n" in result.stderr
    assert (root / ".ckptsurgeon" / "attic" / "0001").is_dir()


def test_prune_that_was_cut_off_goes_on(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    (root / ".ckptsurgeon" / "receipts" / "0001" / "pruned").touch()
    assert surgeon("undo", "--yes", "-C", root).exit_code == 1
    assert surgeon("prune", "--keep", 0, "--yes", "-C", root).exit_code == 0
    assert not (root / ".ckptsurgeon" / "attic" / "0001").exists()


def test_links_in_the_attic_are_pruned_and_what_they_lead_to_is_not(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    other = tmp_path / "other"
    (root / "global_step8").rename(other)
    (root / "global_step8").symlink_to(other)
    (root / "global_step6" / "link").symlink_to(other)
    before = snapshot(other)
    assert surgeon("rollback", "--to", 4, "--yes", "-C", root).exit_code == 0
    assert surgeon("prune", "--keep", 0, "--yes", "-C", root).exit_code == 0
    assert not (root / ".ckptsurgeon" / "attic" / "0001").exists()
    assert snapshot(other) == before


def test_prune_that_is_cut_off_says_what_is_gone(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained()
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    monkeypatch.setattr(disk.calls, "hook", Fault("EIO", 12))
    result = surgeon("prune", "--keep", 0, "--yes", "-C", root)
    assert result.exit_code == 1
    assert "of these attics a part may be gone" in result.stderr
    monkeypatch.setattr(disk.calls, "hook", None)
    assert surgeon("prune", "--keep", 0, "--yes", "-C", root).exit_code == 0
    assert not (root / ".ckptsurgeon" / "attic" / "0001").exists()


def test_unlock_says_whose_lock_it_was(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    assert surgeon("unlock", "-C", root).stdout == "nothing to unlock\n"
    surgeon("set", "beta1=0.8", "--yes", "-C", root)
    record = {
        "token": "0" * 16, "host": "node-17", "boot": "b", "namespace": 1, "pid": 7, "start": 1,
        "uid": 0, "title": "rollback to 6210", "time": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    (root / ".ckptsurgeon" / "lock").write_text(json.dumps(record))
    result = surgeon("set", "beta1=0.7", "--yes", "-C", root)
    assert result.exit_code == 1
    assert "node-17" in result.stderr
    result = surgeon("unlock", "--yes", "-C", root)
    assert result.exit_code == 0
    assert "rollback to 6210" in result.stdout
    assert surgeon("set", "beta1=0.7", "--yes", "-C", root).exit_code == 0


def test_keep_is_never_below_0(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    assert surgeon("prune", "--keep", "-1", "--yes", "-C", root).exit_code == 2
    assert (root / ".ckptsurgeon" / "attic" / "0001").is_dir()


@pytest.mark.parametrize("words", [["--yes"], []])
def test_prune_asks_how_many_to_keep(surgeon: Surgeon, trained: Trained, words: list[str]) -> None:
    root = trained()
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    before = snapshot(root)
    told = surgeon("prune", *words, "-C", root)
    assert (told.exit_code, told.stdout) == (2, "")
    error, untouched, *next_ones = told.stderr.splitlines()
    assert error.startswith("error: 1 surgery would lose what it keeps: --keep N says how many")
    assert untouched == "untouched: the run is exactly as it was"
    assert next_ones[0] == f"next: ckptsurgeon -C {root} prune --dry-run    what each of them keeps"
    as_json = json.loads(surgeon("prune", *words, "--json", "-C", root).stderr)
    assert as_json["exit_code"] == 2
    assert as_json["next"][1] == f"ckptsurgeon -C {root} prune --keep 1 --json"
    assert as_json["comment"][1] == "the newest stays undoable"
    assert (root / ".ckptsurgeon" / "attic" / "0001").is_dir()
    assert snapshot(root) == before
    told = surgeon("prune", "--dry-run", "-C", root)
    assert (told.exit_code, "0001" in told.stdout) == (0, True)


def test_prune_names_what_stays_and_why(surgeon: Surgeon, trained: Trained) -> None:
    """Where no receipt can be read, nobody knows what the attic is good for."""
    root = trained()
    surgeon("rollback", "--to", 6, "--yes", "-C", root)
    surgeon("rollback", "--to", 4, "--yes", "-C", root)
    (root / ".ckptsurgeon/receipts/0002/receipt.json").write_text("{")
    told = surgeon("prune", "--dry-run", "-C", root).stdout
    assert "stays: .ckptsurgeon/receipts/0002/receipt.json is damaged: " in told
    done = json.loads(surgeon("prune", "--keep", 0, "--yes", "--json", "-C", root).stdout)
    assert [(item["id"], bool(item["stays"])) for item in done["attics"]] == [
        ("0001", False),
        ("0002", True),
    ]
    assert [item.name for item in (root / ".ckptsurgeon/attic").iterdir()] == ["0002"]
    again = surgeon("prune", "--keep", 0, "--yes", "-C", root)
    assert (again.exit_code, again.stdout.splitlines()[0]) == (
        0,
        "nothing to prune: no surgery keeps files that may go",
    )
