"""The benchmark runs, and what it compares comes out on the right side by far: one subject in
`make test`, the others in nightly."""

from __future__ import annotations

import pytest

from bench.__main__ import SUBJECTS, measure
from bench.row import Row, page, ratio, table


def measured(subject: str) -> list[Row]:
    rows, failed = measure([subject], quick=True)
    assert not failed
    return rows


def one(rows: list[Row], what: str) -> Row:
    return next(row for row in rows if row.what == what)


@pytest.mark.slow
def test_a_shard_is_edited_and_restored_many_times_faster_than_by_loading_and_saving_it() -> None:
    rows = measured("shards")
    if not rows:
        pytest.skip("no room for a shard of an eighth of a GiB")
    for name in ("set-lr", "set-beta2", "reset", "undo set-lr", "undo set-beta2", "undo reset"):
        assert one(rows, f"0.125 GiB: {name}").measured > 5
    for name in ("set-lr", "set-beta2", "reset"):
        assert one(rows, f"0.125 GiB: {name}: disk taken").met


@pytest.mark.slow
def test_a_shard_of_small_tensors_takes_less_cpu_time_than_loading_and_saving_it() -> None:
    (row,) = measured("small_tensors")
    assert row.measured > 3


@pytest.mark.long
def test_a_tenth_of_bloom_is_planned_edited_verified_and_restored() -> None:
    rows = measured("bloom")
    names = [row.what.rsplit(": ", 1)[1] for row in rows]
    assert names == ["plan", "apply", "verify", "undo", "peak memory", "disk taken"]
    assert rows[4].met
    assert rows[5].measured < 10  # MB, of 0.2 TB


@pytest.mark.slow
def test_a_run_of_many_shards_is_edited_and_restored_in_little_memory() -> None:
    *commands, memory = measured("many_shards")
    names = [row.what.rsplit(": ", 1)[1] for row in commands]
    assert names == ["plan", "plan and apply", "undo", "rollback alone"]
    assert memory.measured < 100  # MB, of 300 shards twice


@pytest.mark.slow
def test_eighty_thousand_chunks_are_edited_and_restored() -> None:
    rows = measured("chunks")
    assert [row.what.rpartition(": ")[2] for row in rows] == [
        "status", "plan", "apply", "undo", "peak memory",
    ]  # fmt: skip
    assert rows[0].what.startswith("79,872 chunks")
    assert rows[4].measured * 14 < 150  # MB


@pytest.mark.slow
def test_vital_signs_are_read_in_little_memory() -> None:
    rows = measured("vitals")
    assert [row.unit for row in rows] == ["GB/s", "×", "MB"]
    assert rows[2].met


@pytest.mark.slow
def test_a_picture_of_many_events_takes_little_memory() -> None:
    drawn, memory, status = measured("picture")
    assert drawn.what == "picture: 0.1 million events"
    assert memory.met and status.unit == "ms CPU"


@pytest.mark.slow
def test_a_transplant_takes_little_memory_and_a_short_receipt() -> None:
    data, tensor, *many, memory, receipt, universal, dicts = measured("transplant")
    time, large, each = many
    assert data.unit == tensor.unit == time.unit == universal.unit == dicts.unit == "×"
    assert memory.met and time.met and large.measured < 200 and receipt.measured < 200  # MB, kB
    assert each.what == "transplant of 500 shards: receipt" and each.met


@pytest.mark.slow
def test_workers_of_a_cluster_are_measured_beside_the_model() -> None:
    rows = measured("cluster")
    if not rows:
        pytest.skip("no Dask here")
    overhead, *others = rows
    assert overhead.unit == "ms" and len(others) == 12
    assert all(0.2 < row.measured < 8 for row in others), table(rows)


@pytest.mark.slow
@pytest.mark.remote
def test_a_run_in_a_bucket_is_read_by_few_requests() -> None:
    """What a surgery sends is small beside a download, where the command line lets it be."""
    status, read, verify, again, *surgeries = measured("remote")
    assert status.met and read.met and again.met and verify.unit == "MB"
    assert all(row.met for row in surgeries if row.unit == "MB"), table(surgeries)
    assert all(row.measured > 50 for row in surgeries if row.what.endswith("bytes"))


def test_a_missed_target_is_said() -> None:
    rows = [ratio("slow", 5, 10), ratio("fast", 20, 10), Row("late", 3, "s", 2), Row("any", 9, "s")]
    assert [row.met for row in rows] == [False, True, False, True]
    lines = table(rows).splitlines()[1:]
    assert ["MISSED" in line for line in lines] == [True, False, True, False]


def test_the_page_names_command_machine_and_each_row() -> None:
    written = page("python -m bench", "2 cores", [ratio("slow", 5, 10), Row("any", 9, "s")])
    assert "`python -m bench`" in written and "2 cores" in written
    assert written.endswith("| slow | 5 × | ≥ 10 × | MISSED |\n| any | 9 s |  |  |\n")


def test_a_subject_that_fails_or_has_no_row_leaves_those_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> list[Row]:
        raise RuntimeError("the server is gone")

    row = Row("what", 1, "s")
    for name, subject in {
        "remote": fail,
        "cluster": lambda *_: [],
        "picture": lambda *_: [row],
    }.items():
        monkeypatch.setitem(SUBJECTS, name, subject)
    rows, failed = measure(["remote", "cluster", "picture"], quick=True)
    assert rows == [row] and failed == ["remote"]
    assert "the server is gone" in capsys.readouterr().err
    assert "\n- not measured, as it failed: remote\n\n|" in page("", "", rows, failed)
