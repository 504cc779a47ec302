"""Each command that the code prints, and each of the README, can be typed as it stands."""

from __future__ import annotations

import ast
import re

from ckptsurgeon.cli.build import build
from ckptsurgeon.cli.commands import commands
from tests.cli.conftest import hints
from tests.support.launch import REPO

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def test_each_hint_in_the_code_is_a_command_that_can_be_typed() -> None:
    """Of those that are one text: the command exists, and nothing it needs is missing."""
    found = 0
    for path in (REPO / "ckptsurgeon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            for words in hints(node.value) if node.value.startswith("ckptsurgeon ") else ():
                while words[:1] == ["-C"]:
                    words = words[2:]
                if not words or (not words[0].isidentifier() and "-" not in words[0]):
                    continue
                found += 1
                assert words[0] in commands() or words == ["--help"], node.value
                assert words[0] != "rollback" or "--to" in words, node.value
    assert found > 20


def test_no_hint_and_no_line_of_the_readme_has_an_option_that_is_not_there() -> None:
    """Of those in which values are filled in, too: each option is one of the command."""
    known = {
        name: {
            word for item in build(command).params for word in (*item.opts, *item.secondary_opts)
        }
        for name, command in commands().items()
    }
    rows = re.findall(r"^\| `([a-z-]+)[^|`]*` \|(.*)\|$", (REPO / "README.md").read_text(), re.M)
    texts = [f"ckptsurgeon {name} {' '.join(OPTION.findall(row))}" for name, row in rows]
    for path in (REPO / "ckptsurgeon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                texts.append(filled(node))
    found = 0
    for text in texts:
        for words in hints(text) if text.startswith("ckptsurgeon ") else ():
            while words[:1] == ["-C"]:
                words = words[2:]
            if not words or words[0] not in known:
                continue
            wrong = [w for w in words if OPTION.fullmatch(w) and w not in known[words[0]]]
            assert wrong == [], text
            found += 1
    assert found > 100


def filled(node: ast.Constant | ast.JoinedStr) -> str:
    """A text, with a word for each value that is put into it."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [str(p.value) if isinstance(p, ast.Constant) else "VALUE" for p in parts]
    return "".join(texts).replace("ckptsurgeonVALUE", "ckptsurgeon").replace("'", "")
