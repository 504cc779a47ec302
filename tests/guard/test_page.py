"""docs/watch.md says what a policy takes, and shows what is printed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsurgeon.guard.policy import CAUSES, Policy
from ckptsurgeon.operations.fields import keys, names
from tests.cli.conftest import Surgeon
from tests.guard.conftest import own_trainer
from tests.support.launch import REPO
from tests.support.transcripts import BLOCK, matches

PAGE = (REPO / "docs" / "watch.md").read_text("utf-8")


def test_the_page_has_each_key_and_each_cause() -> None:
    lines = [line for line in reversed(PAGE.splitlines()) if line[:2] == "| "]
    rows = {line.split("|")[1].strip(" `"): line for line in lines}
    for name in names(Policy):
        assert keys(Policy)[name].means in rows[name], name
        default = getattr(Policy(), name)
        if isinstance(default, (int, float)):
            assert rows[name].split("|")[2].strip() == f"{default:g}", name
    for cause, means in CAUSES.items():
        assert any(line.startswith(f"| `{cause}` | {means} |") for line in lines), cause


def test_its_transcripts_are_what_is_printed(
    surgeon: Surgeon, diverged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (diverged / "night.yaml").write_text("watch: {on: [diverged, hung], do: advise}\n")
    (diverged / "apply.yaml").write_text("watch: {on: [diverged, hung], do: apply}\n")
    own_trainer(diverged, "pass")
    monkeypatch.chdir(diverged)
    shown = {name: body.splitlines() for name, body in BLOCK.findall(PAGE)}
    assert {*shown} == {"advised", "applied"}
    for lines in shown.values():
        shutil.rmtree(diverged / ".ckptsurgeon", ignore_errors=True)
        said = surgeon(*lines[0].split()[2:]).stdout.replace(str(diverged), "/runs/a")
        assert matches(lines, [lines[0], *said.splitlines()]), said
