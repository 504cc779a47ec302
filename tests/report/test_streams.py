"""What is for a terminal alone: colour, and what is said of long work while it goes on."""

from __future__ import annotations

import io

import pytest

from ckptsurgeon import report


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
