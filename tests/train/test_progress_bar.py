"""A terminal gets a bar; a file gets none."""

from __future__ import annotations

import io

from train.progress_bar import CLEAR, ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_tells_share_loss_and_time_left() -> None:
    terminal = Terminal()
    ProgressBar(terminal, first=40, last=100).draw(70, loss=3.14159)
    text = terminal.getvalue()
    assert text.startswith(CLEAR)
    assert "70/100  loss 3.1416" in text and text.endswith(" left")
    bar = text.removeprefix(CLEAR)[1 : text.removeprefix(CLEAR).index("]")]
    assert abs(bar.count("#") / len(bar) - 0.7) < 0.05 and set(bar) == {"#", "."}


def test_other_text_takes_the_bar_away_first() -> None:
    terminal = Terminal()
    bar = ProgressBar(terminal, 0, 10)
    say = bar.above(lambda text: print(text, file=terminal))
    say("before")
    assert terminal.getvalue() == "before\n"
    bar.draw(5, 1.0)
    say("line")
    assert terminal.getvalue().endswith(f"{CLEAR}line\n")


def test_a_log_file_gets_nothing() -> None:
    log = io.StringIO()
    bar = ProgressBar(log, 0, 10)
    bar.draw(10, 1.0)
    bar.clear()
    assert log.getvalue() == ""
