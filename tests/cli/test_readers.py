"""Ranks that share what is read, where one of them is gone, or sees something else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from ckptsurgeon.cli import readers
from ckptsurgeon.cli.readers import Readers
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.transaction.ranks import Ranks


class Job(NamedTuple):
    """A file that is read."""

    file: str


def length(job: Job) -> int:
    if job.file == "bad":
        raise SurgeryError("it is damaged", next="nothing")
    return len(job.file)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PAUSE_S", 0.01)


def read(folder: Path, rank: int, of: int, *files: str) -> list[int]:
    with Readers(Ranks(rank, of, "1-0-0"), folder) as shared:
        return list(shared.map(length, [Job(file) for file in files]))


def at_once(*calls: Callable[[], list[int]]) -> list[BaseException | list[int]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


def test_each_rank_has_what_all_have_read(tmp_path: Path) -> None:
    files = [str(number) * number for number in range(1, 9)]
    said = at_once(*(lambda rank=rank: read(tmp_path, rank, 3, *files) for rank in range(3)))
    assert said == [list(range(1, 9))] * 3
    assert not [*tmp_path.iterdir()]


def test_the_last_one_reads_what_a_rank_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LOST_S", 0.1)
    monkeypatch.setattr(readers, "LONGER", 0)
    files = ["a", "bb", "ccc", "dddd"]
    said = at_once(lambda: read(tmp_path, 1, 3, *files), lambda: read(tmp_path, 2, 3, *files))
    assert said == [[1, 2, 3, 4]] * 2
    assert not [*tmp_path.iterdir()]


def test_what_one_can_not_read_is_raised_by_all(tmp_path: Path) -> None:
    files = ["a", "bad", "ccc"]
    said = at_once(lambda: read(tmp_path, 0, 2, *files), lambda: read(tmp_path, 1, 2, *files))
    assert [str(each) for each in said] == ["it is damaged"] * 2
    assert not [*tmp_path.iterdir()]


def test_ranks_that_see_other_files_are_refused(tmp_path: Path) -> None:
    one, other = ("a", "bb", "ccc"), ("a", "bb", "ddd")
    said = at_once(lambda: read(tmp_path, 0, 2, *one), lambda: read(tmp_path, 1, 2, *other))
    assert all(isinstance(each, SurgeryError) for each in said), said
    assert "reads other files than" in str(said[1])


def test_without_a_last_one_the_others_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SILENT_S", 0.1)
    with pytest.raises(SurgeryError, match="hears nothing of the last one any more"):
        read(tmp_path, 0, 2, "a", "bb")
