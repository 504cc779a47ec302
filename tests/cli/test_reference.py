"""docs/cli.md is what `--help` says; `GOLDEN=write` writes it anew."""

from __future__ import annotations

import os

from ckptsurgeon.cli.commands import commands
from tests.cli.conftest import Surgeon
from tests.support.launch import REPO

HEAD = """\
# The command line

What `--help` prints, of all commands. This page is written by
`GOLDEN=write pytest tests/cli/test_reference.py`, and the same test keeps it fresh.
"""


def test_the_reference_is_what_help_says(surgeon: Surgeon) -> None:
    parts = [HEAD, f"```\n{surgeon('--help').stdout.rstrip()}\n```\n"]
    for name in commands():
        parts.append(f"## {name}\n\n```\n{surgeon(name, '--help').stdout.rstrip()}\n```\n")
    page, text = REPO / "docs" / "cli.md", "\n".join(parts)
    if os.environ.get("GOLDEN") == "write":
        page.write_text(text, "utf-8")
    assert page.read_text("utf-8") == text
