"""No control character reaches a terminal, wherever it comes from; a trainer's own lines pass."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.report.terminal import COLORS, Checked, checked
from ckptsurgeon.transaction.receipts import receipt_file
from tests.hostile.hostile_run import call
from tests.support.tiny_run import make_run

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e"
MOVES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.text(alphabet=st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Ll", "Nd"])))
def test_any_text_moves_nothing_and_a_document_stays_one(text: str) -> None:
    stream = Terminal()
    assert Checked(stream).write(text) == len(text)
    assert not MOVES.search(stream.getvalue())
    stream = Terminal()
    Checked(stream).write(json.dumps([text], ensure_ascii=False))
    assert json.loads(stream.getvalue()) == [text]


def test_our_colours_pass_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    painted = "".join(f"\033[{code}mx" for code in COLORS)
    stream = Terminal()
    Checked(stream).write(painted + "\033[1A")
    assert stream.getvalue() == painted + "\\u001b[1A"
    plain = io.StringIO()
    Checked(plain).write(painted)
    assert "\033" not in plain.getvalue()


def test_a_stream_that_was_put_in_place_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    other = io.StringIO()
    with checked():
        sys.stdout = other
    assert sys.stdout is other


def test_whatever_a_run_holds(tmp_path: Path) -> None:
    root = make_run(tmp_path / f"run {ESCAPE}", steps=(4, 8))
    (root / f"runs{ESCAPE}").mkdir()
    events = root / f"runs{ESCAPE}" / f"events.out.tfevents.1.{ESCAPE}"
    events.touch()
    os.utime(events, (1e9, 1e9))
    (root / "ckptsurgeon.yaml").write_text(json.dumps({"name": ESCAPE}))
    code, _, said = call("set", "eps=1e-6", "--yes", "--why", ESCAPE, "-C", root)
    assert code == 0, said
    (root / f"checkpoint-9{ESCAPE}").mkdir()
    receipt = root / receipt_file("0001")
    document = json.loads(receipt.read_text())
    for key in ("title", "when", "user", "host", "version"):
        document[key] = ESCAPE
    for change in document["changes"]:
        change["field"] = ESCAPE
    receipt.write_text(json.dumps(document))
    for words in (
        ("status",), ("log",), ("doctor",), ("verify",), ("undo", "-n"), ("show",),
        ("rollback", "--to", "4", "-n"), ("diff", "4", "8"), ("set", f"{ESCAPE}=1", "-n"),
        ("status", f"--{ESCAPE}"), (ESCAPE,), ("verify", ESCAPE), ("status", "--json"),
        ("log", "--json"), ("diff", "--receipt", "0001"),
    ):  # fmt: skip
        _, out, said = call(*words, "-C", root)
        assert not MOVES.search(out + said), (words, out + said)
        if "--json" in words:
            json.loads(out)
