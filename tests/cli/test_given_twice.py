"""An option of one value that is given twice is refused, by every command: which is meant?"""

from __future__ import annotations

from typing import Any

import pytest
from typer.main import get_command

from ckptsurgeon.cli import app
from ckptsurgeon.cli.commands import commands
from tests.cli.conftest import Surgeon


@pytest.mark.parametrize("name", commands())
def test_no_value_wins_over_another_one(surgeon: Surgeon, name: str) -> None:
    group: Any = get_command(app)
    command = group.get_command(group.make_context("ckptsurgeon", [name, "--help"]), name)
    once = [item for item in command.params if item.param_type_name == "option"]
    once = [item for item in once if not item.multiple]
    values = [item for item in once if not item.is_flag]
    switches = [item for item in once if item.is_flag and item.secondary_opts]
    typed = [[word for i in "12" for word in (item.opts[-1], i)] for item in values]
    typed += [[item.opts[0], item.secondary_opts[0]] for item in switches]
    assert typed, name
    for words in typed:
        refused = surgeon(name, *words)
        assert refused.exit_code == 2, (words, refused.output)
        assert "is given 2 times: which one is meant?" in refused.stderr, words
        assert refused.stderr.count("next: ") == 1


def test_a_flag_and_an_option_of_several_values_may_stand_twice(
    surgeon: Surgeon, trained: Any
) -> None:
    root = trained()
    done = surgeon("rollback", "--to", 4, "-n", "-n", "--set", "lr=1e-4", "--set", "eps=1e-7",
                   "-C", root)  # fmt: skip
    assert done.exit_code == 0, done.output
