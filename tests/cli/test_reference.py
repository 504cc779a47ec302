"""docs/cli.md and the manual page are what `--help` says; `GOLDEN=write` writes them anew."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from ckptsurgeon.cli.commands import commands
from tests.cli.conftest import Surgeon
from tests.support.launch import REPO

HEAD = """\
# The command line

What `--help` prints, of all commands. This page is written by
`GOLDEN=write pytest tests/cli/test_reference.py`, and the same test keeps it fresh.
"""
MAN = r""".TH CKPTSURGEON 1
.SH NAME
ckptsurgeon \- hyperparameter surgery on sharded checkpoints
.SH SYNOPSIS
.B ckptsurgeon
.RI [ OPTIONS ]
.I COMMAND
.RI [ ARGS ]...
"""


def kept(name: str, text: str) -> None:
    page = REPO / "docs" / name
    if os.environ.get("GOLDEN") == "write":
        page.write_text(text, "utf-8")
    assert page.read_text("utf-8") == text


def test_the_reference_is_what_help_says(surgeon: Surgeon) -> None:
    parts = [HEAD, f"```\n{surgeon('--help').stdout.rstrip()}\n```\n"]
    for name in commands():
        parts.append(f"## {name}\n\n```\n{surgeon(name, '--help').stdout.rstrip()}\n```\n")
    kept("cli.md", "\n".join(parts))


def verbatim(text: str) -> str:
    """`text` as troff prints it line by line."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    plain = re.sub(r"[^\x00-\x7f]", lambda it: rf"\[u{ord(it[0]):04X}]", plain)
    lines = plain.splitlines()
    shown = [f"\\&{line}" if line.startswith((".", "'")) else line for line in lines]
    return "\n".join([".nf", *shown, ".fi", ""])


def test_the_manual_page_is_what_help_says(surgeon: Surgeon) -> None:
    parts = [MAN, ".SH DESCRIPTION\n", verbatim(surgeon("--help").stdout.rstrip())]
    parts.append(".SH COMMANDS\n")
    for name in commands():
        escaped = name.replace("-", "\\-")
        parts.append(f".SS {escaped}\n{verbatim(surgeon(name, '--help').stdout.rstrip())}")
    kept("ckptsurgeon.1", "".join(parts))


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_troff_prints_the_manual_page_without_a_warning() -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", str(REPO / "docs" / "ckptsurgeon.1")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert all(name in done.stdout for name in commands())
