"""A receipt that can't be read: told as what it is, and the run is shown all the same."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptsurgeon import whole_file
from ckptsurgeon.cli import app
from ckptsurgeon.transaction.receipts import damaged, read, receipt_file
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run


def call(root: Path, *words: str) -> tuple[int, str, str]:
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, [*words, "-C", str(root)])
    return result.exit_code, result.stdout, result.stderr


def done(root: Path, *words: str) -> None:
    code, _, said = call(root, *words, "--yes")
    assert code == 0, said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two surgeries, of which the second is damaged."""
    root = make_run(tmp_path / "run", steps=(4, 8))
    done(root, "set", "beta1=0.8")
    done(root, "set", "eps=1e-6")
    return root


def break_receipt(root: Path, id: str, size: float) -> Path:
    """Only that share of its bytes is left."""
    path = root / receipt_file(id)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * size)])
    return path


@pytest.mark.parametrize(("size", "what"), [(0, "is empty (0 bytes)"), (0.5, "byte ")])
def test_it_is_told_as_what_it_is(root: Path, size: float, what: str) -> None:
    path = break_receipt(root, "0002", size)
    before = snapshot(root)
    code, out, _ = call(root, "status")
    assert code == 0
    assert "lr" in out and "0001  set beta1=0.8" in out
    text = " ".join(out[out.index("0002") :].split())  # a narrow terminal wraps it
    assert text.startswith("0002 .ckptsurgeon/receipts/0002/receipt.json is damaged: ")
    assert what in text.partition("0001")[0]
    code, out, _ = call(root, "log")
    assert code == 0 and "0001   set beta1=0.8" in out
    assert out.startswith("0002   .ckptsurgeon/receipts/0002/receipt.json is damaged: ")
    assert "(can't be undone)" in " ".join(out.partition("0001")[0].split())
    assert list(json.loads(call(root, "log", "--json")[1])["damaged"]) == ["0002"]
    assert list(json.loads(call(root, "status", "--json")[1])["damaged_receipts"]) == ["0002"]
    code, out, _ = call(root, "verify")
    assert code == 4 and "what surgery 0002 promised is not known" in out
    code, out, _ = call(root, "doctor")
    assert code == 4 and f"next: mv {path} " in out
    for words in (("undo",), ("undo", "2"), ("undo", "0001")):
        code, _, said = call(root, *words, "--yes")
        assert code == 1 and "can't be undone: .ckptsurgeon/receipts/0002" in said, said
        assert f"restore {path}" in said
    code, _, said = call(root, "set", "beta2=0.9", "--yes")
    assert code == 1 and "receipt.json is damaged: " in said
    assert snapshot(root) == before


def test_set_aside_as_the_hint_says_the_run_goes_on(root: Path) -> None:
    path = break_receipt(root, "0002", 0.5)
    _, _, said = call(root, "set", "beta2=0.9", "--yes")
    command = next(line for line in said.splitlines() if " mv " in f" {line.strip()}")
    words = shlex.split(command.strip().partition("    ")[0])
    assert words[0] == "mv"
    path.rename(words[2])
    assert call(root, "verify")[0] == 0
    assert "0002  .ckptsurgeon/receipts/0002/receipt.json was set aside" in call(root, "status")[1]
    done(root, "set", "beta2=0.9")
    assert sorted(path.parent.parent.iterdir())[-1].name == "0003"
    done(root, "undo")
    code, _, said = call(root, "undo", "--yes")
    assert code == 1 and "surgery 0002 can't be undone" in said


def test_one_that_is_undone_already_is_in_nobodys_way(root: Path) -> None:
    done(root, "undo")
    break_receipt(root, "0002", 0)
    done(root, "undo")
    assert "0002   .ckptsurgeon/receipts/0002/receipt.json is damaged" in call(root, "log")[1]
    assert "(undone by 0003)" in call(root, "log")[1]


def test_a_disk_that_did_not_answer_once_is_asked_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / receipt_file("0002")

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(whole_file, "read", fails)
        wrong = damaged(root)
    assert wrong["0002"] == f"{receipt_file('0002')} can't be read: Input/output error"
    assert not damaged(root) and [each.id for each in read(root)] == ["0001", "0002"]
