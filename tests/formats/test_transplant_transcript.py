"""docs/transplant.md shows what the command prints between two libraries. Run by
`make test-formats`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cli.conftest import invoke
from tests.support.launch import REPO, run_module
from tests.support.transcripts import BLOCK, matches

pytestmark = pytest.mark.formats


def test_another_library_prints_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as folder:  # whose path is short enough for a line
        monkeypatch.chdir(folder)
        old, other, new = (Path(folder) / name for name in ("old", "other", "new"))
        for words in (("hugging_face", old, 4), ("titan", other, 1, "--fresh", new)):
            quiet = {"PYTHONWARNINGS": "ignore"}
            run_module("tests.support.llamas", *words, environment=quiet)
        page = (REPO / "docs" / "transplant.md").read_text("utf-8")
        first, *shown = dict(BLOCK.findall(page))["library"].splitlines()
        done = invoke(*first.removeprefix("$ ckptsurgeon ").split(), "--yes")
        assert done.exit_code == 0, done.output
        assert matches(shown, done.stdout.splitlines()), done.stdout
