"""Pointers, links, pipes and logs that lead elsewhere or are damaged: rows 33 to 38."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.hostile.hostile_run import OPTIM, call, events, fifo, harmless, record, refused
from tests.support.snapshot import exact_snapshot

ELSEWHERE = {
    "climbs": b"../../etc",
    "absolute": b"/etc/passwd",
    "climbs inside": b"a/../../x",
    "dot": b".",
    "empty": b"",
    "NUL": b"global_step8\0",
    "5,000 characters": b"global_step" + b"8" * 5000,
    "no text": bytes(range(128, 256)),
    "a folder behind a step": b"global_step8/../global_step6",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_latest_that_leads_elsewhere_names_no_step(trained: Trained, name: str) -> None:
    """Row 33. What a pointer says is compared with the steps that are there, never opened."""
    root = trained()
    (root / "latest").write_bytes(ELSEWHERE[name])
    harmless(root, "show", 8)
    refused(root, "set", "eps=1e-6", says="repair-latest")


@pytest.mark.parametrize("kind", ["fifo", "symlink out", "symlink in", "dangling", "directory"])
@pytest.mark.parametrize("pointer", ["latest", "latest_checkpointed_iteration.txt"])
def test_a_pointer_that_is_no_file_is_not_followed(
    trained: Trained, tmp_path: Path, kind: str, pointer: str
) -> None:
    root = trained()
    file = root / pointer
    (tmp_path / "outside").write_bytes(file.read_bytes())
    file.unlink()
    if kind == "fifo":
        fifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        targets = {"symlink out": "../outside", "symlink in": "global_step8", "dangling": "nowhere"}
        file.symlink_to(targets[kind])
    harmless(root, "status")
    if kind == "dangling" and pointer != "latest":
        harmless(root, "set", "eps=1e-6", "--dry-run")  # a run without Megatron's tracker
    else:
        refused(root, "set", "eps=1e-6", says="names no step")


def test_pointers_that_disagree_are_repaired_together(trained: Trained) -> None:
    """Row 36."""
    root = trained()
    (root / "latest").write_text("global_step6")
    refused(root, "set", "eps=1e-6", says="the pointers disagree")
    assert call("repair-latest", "-C", root, "--yes")[0] == 0
    assert (root / "latest").read_text() == "global_step8"
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "8"


@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling", "device"])
def test_a_shard_that_is_no_file_is_refused(trained: Trained, kind: str) -> None:
    root = trained()
    shard = root / "global_step8" / OPTIM
    shard.unlink()
    if kind == "fifo":
        fifo(shard)
    elif kind == "directory":
        shard.mkdir()
    else:
        shard.symlink_to("nowhere" if kind == "dangling" else "/dev/zero")
    for words in (["show", 8], ["set", "eps=1e-6"]):
        assert OPTIM in refused(root, *words)


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_a_linked_shard_is_replaced_and_what_it_leads_to_is_not_written(
    trained: Trained, tmp_path: Path, kind: str
) -> None:
    """Row 34: no byte goes through a link; undo brings the link back."""
    root = trained()
    shard, other = root / "global_step8" / OPTIM, tmp_path / "other.pt"
    if kind == "symlink":
        shard.rename(other)
        shard.symlink_to(other)
    else:
        os.link(shard, other)
    content, before = other.read_bytes(), exact_snapshot(root / "global_step8")
    status, _, said = call("set", "eps=1e-6", "-C", root, "--yes", "--no-tb-note")
    assert status == 0, said
    assert not shard.is_symlink()
    assert other.read_bytes() == content != shard.read_bytes()
    assert call("undo", "-C", root, "--yes")[0] == 0
    assert other.read_bytes() == content == shard.read_bytes()
    after = exact_snapshot(root / "global_step8")
    assert after[OPTIM][1:] == before[OPTIM][1:]  # bytes (or where it leads) and time


def test_a_checkpoint_that_is_a_link_is_not_edited(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    (root / "global_step8").rename(tmp_path / "elsewhere")
    (root / "global_step8").symlink_to(tmp_path / "elsewhere")
    before = exact_snapshot(tmp_path / "elsewhere")
    harmless(root, "show", 8)
    for words in (["set", "eps=1e-6"], ["reset", "moments"]):
        refused(root, *words, says="is a symbolic link")
    assert exact_snapshot(tmp_path / "elsewhere") == before


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"pid": 1e999, "host": "x"}', "[1]", "\udcff", '{"pid": "1"}']
)
def test_a_trainer_record_that_is_none_is_passed_over(trained: Trained, text: str) -> None:
    root = trained()
    (root / "trainer.pid").write_bytes(text.encode("utf-8", "surrogateescape"))
    harmless(root, "set", "eps=1e-6", "--dry-run")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: " + b"x" * 1_100_000, b"[" * 99_999])
def test_settings_that_are_none_are_refused(trained: Trained, content: bytes) -> None:
    root = trained()
    (root / "ckptsurgeon.yaml").write_bytes(content)
    refused(root, "show", 8, says="ckptsurgeon.yaml", code=2)


@pytest.mark.parametrize("folder", ["/", "../../.."])
def test_a_log_folder_with_the_logs_of_others_is_refused(trained: Trained, folder: str) -> None:
    root = trained()
    (root / "ckptsurgeon.yaml").write_text(f"tensorboard: [{folder}]\n")
    for words in (("rollback", "--to", 6), ("truncate-tb-events", "--after", 4)):
        refused(root, *words, says="can't be its log folder", code=2)


# --- event files ---------------------------------------------------------------------------------


def cut(root: Path, says: str) -> None:
    said = refused(root, "truncate-tb-events", "--after", 4, says=says, offset=True)
    assert "tfevents" in said
    refused(root, "rollback", "--to", 4, says=says, offset=True)


def test_a_record_of_2_to_the_60_bytes_is_refused(trained: Trained) -> None:
    """Row 37: its length has a valid checksum."""
    root = trained()
    file = events(root)
    file.write_bytes(file.read_bytes() + record(1 << 60) + bytes(range(1, 100)))
    cut(root, "a record of 1152921504606846976 bytes")


def test_a_flipped_bit_and_a_write_after_a_torn_tail_are_refused(trained: Trained) -> None:
    """Row 38: TensorBoard stops at either without a word."""
    root = trained()
    file = events(root)
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    file.write_bytes(flipped)
    cut(root, "checksum")
    file.write_bytes(whole[:-5] + whole[: len(whole) // 2])
    cut(root, "checksum")


def test_a_torn_tail_alone_is_cut(trained: Trained) -> None:
    root = trained()
    file = events(root)
    file.write_bytes(file.read_bytes()[:-5])
    harmless(root, "truncate-tb-events", "--after", 4, "--dry-run")


def test_event_files_that_are_no_files_do_not_hang(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    folder = root / "tensorboard"
    fifo(folder / "events.out.tfevents.1.fifo.1.0")
    (folder / "events.out.tfevents.2.folder.1.0").mkdir()
    (folder / "events.out.tfevents.3.dangling.1.0").symlink_to("nowhere")
    harmless(root, "status")
    harmless(root, "truncate-tb-events", "--after", 4, "--dry-run")
    shutil.rmtree(root)
