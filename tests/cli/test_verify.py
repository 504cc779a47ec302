"""verify and doctor of a disk that lost its files: the first findings, and how many there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import chunked
from ckptsurgeon.report.run import FINDINGS


@pytest.mark.long
def test_of_many_findings_the_first_are_shown(tmp_path: Path) -> None:
    chunked.make(tmp_path, 4, 20)
    for command, lines in (("verify", 1), ("doctor", 2)):
        words = [sys.executable, "-m", "ckptsurgeon", command, "-C", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True)
        document = json.loads(subprocess.run([*words, "--json"], capture_output=True).stdout)
        every = document["findings"]
        assert len(every) == 144
        assert f", {len(every)} findings\n" in done.stdout
        assert done.stdout.count("no pickle") == FINDINGS
        assert f"  and {len(every) - FINDINGS} more: --json has all\n" in done.stdout
        assert len(done.stdout.splitlines()) < FINDINGS * lines + 5
