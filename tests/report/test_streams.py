"""What is for a terminal alone: colour, and what is said of long work while it goes on."""

from __future__ import annotations

import io
import re

import pytest

from ckptsurgeon import report
from ckptsurgeon.cli.tally import Done, Tally
from ckptsurgeon.progress import counted


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert report.Style.of(_Terminal()).color
    assert not report.Style.of(io.StringIO()).color
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert report.Style.of(io.StringIO()).color
    monkeypatch.setenv("NO_COLOR", "1")
    assert not report.Style.of(_Terminal()).color


def test_progress_in_a_log_is_one_plain_line_a_phase() -> None:
    stream = io.StringIO()
    with report.Progress(stream) as progress:
        progress("staging", 0, 2)
        progress.started -= 60
        progress("staging", 2, 2)
        progress("editing", 0, 3)
        progress.started -= 60
    assert stream.getvalue() == "  staging     60.0 s\n  editing     60.0 s\n"


@pytest.mark.parametrize("phase", ["computing", "reading"])
def test_on_a_terminal_the_line_has_the_workers_and_the_last_one_the_slowest_node(
    phase: str,
) -> None:
    stream, tally = _Terminal(), Tally(seconds=2.0)
    with report.Progress(stream) as progress:
        progress.by, progress.last = tally.who, tally.told
        progress(phase, 0, 4 * 10**9)
        progress.started -= 10
        progress(phase, 0, 4 * 10**9)
        assert "worker" not in stream.getvalue(), "none has done a job"
        for name, seconds in (("n1", 1.0), ("n2", 4.0)):
            tally.add(Done(name, f"tcp://{name}", seconds, 10**9, None))
        progress(phase, 2 * 10**9, 4 * 10**9)
    *_, line, ended, last, end = re.split(r"[\r\n]", stream.getvalue())
    far = r"2.0 GB of 4.0 GB, [\d.]+ .B/s" if phase == "computing" else "2000000000/4000000000"
    assert re.match(rf"  {phase:<11} #{{12}}\.{{12}} {far}, 2 workers on 2 nodes", line), line
    assert phase in ended and end == ""
    assert last == f"  {tally}" and last.endswith("slowest n2: 4.0 times as long for a byte")


def test_a_phase_begins_before_its_first_result() -> None:
    """Else the phase of a single job has no time, and that of few a rate that is too high."""
    stream = io.StringIO()
    with report.Progress(stream) as progress:

        def job() -> int:
            progress.started -= 60
            return 1

        assert list(counted((job() for _ in range(1)), "computing", [10], progress)) == [1]
    assert stream.getvalue() == "  computing   60.0 s\n"
    told: list[tuple[str, int, int]] = []
    results = counted([1, 2], "values", [3, 4], lambda *each: told.append(each))
    assert list(results) == [1, 2]
    assert told == [("values", 0, 7), ("values", 3, 7), ("values", 7, 7)]


def test_a_phase_that_is_over_at_once_is_not_told() -> None:
    stream = io.StringIO()
    with report.Progress(stream) as progress:
        progress("staging", 2, 2)
        progress("editing", 3, 3)
    assert stream.getvalue() == ""


def test_progress_that_nobody_reads_stops_no_surgery() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with report.Progress(Broken()) as progress:
        progress("staging", 0, 2)
        progress.started -= 60
        progress("editing", 0, 3)
        progress.started -= 60


def test_quiet_progress_is_silent() -> None:
    stream = _Terminal()
    with report.Progress(stream, quiet=True) as progress:
        progress("staging", 0, 2)
    assert stream.getvalue() == ""
