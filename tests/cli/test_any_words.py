"""Whatever words are typed, --json prints one document with a schema, also where nothing is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon.cli.build import build
from ckptsurgeon.cli.commands import commands, examples
from tests.cli.conftest import Surgeon
from tests.support.tiny_run import make_run

COMMANDS = sorted(commands().keys() - {"check-optimizer"})  # which starts torch
"""It is tested by itself."""
ENDS = {"-h", "--help", "--print-recipe", "-C", "--run"}
"""Options that print something else, or name another run."""
WORDS = (
    "0", "1", "2", "4", "-1", "-0", "0001", "x", "", "nan", "inf", "0.5x", "1-2", "1e999", "4:",
    "9" * 20, "1" * 400, "9" * 5000, "latest", "checkpoint-2", "lr=1e-3", "betas=0.9,0.95",
    "reset=x", "seed=" + "9" * 5000, "lr=1e999", "moments", "loss-scale", "/nonexistent", "../..",
    "[", "{", "set: {lr: 1}", "--", "\n", "é",
)  # fmt: skip
PLACES = ("empty", "run", "bare")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder without a run, a run, and what is left where only logs were edited."""
    root = tmp_path_factory.mktemp("places")
    (root / "empty").mkdir()
    make_run(root / "run", (2, 4))
    (root / "bare" / ".ckptsurgeon" / "receipts").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield root


@st.composite
def typed(draw: st.DrawFn) -> list[str]:
    """A command with words of its examples, of which some are others, and further ones."""
    row = commands()[draw(st.sampled_from(COMMANDS))]
    options = [name for item in build(row).params for name in item.opts if name.startswith("-")]
    word = st.sampled_from([*WORDS, *options])
    words = shlex.split(draw(st.sampled_from(examples(row.function()))))[1:]
    kept = [draw(word) if draw(st.integers(0, 4)) == 0 else each for each in words]
    more = draw(st.lists(word, max_size=3))
    return [row.name, *(each for each in [*kept, *more] if each not in {*ENDS, row.name, "--json"})]


def check(surgeon: Surgeon, words: list[str], where: Path) -> None:
    name, *rest = words
    done = surgeon(name, "--json", "-n", "-C", where, *rest)
    assert done.exception is None or isinstance(done.exception, SystemExit), words
    document = json.loads(done.stdout or done.stderr)
    assert document["schema"] == 1 and "run" in document
    assert bool(done.stdout) == ("error" not in document)
    assert document.get("exit_code", done.exit_code) == done.exit_code
    if "error" in document:
        assert done.exit_code != 0 and document["error"] and document["untouched"]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.long
def test_the_examples_of_every_command_print_one_document(
    surgeon: Surgeon, places: Path, name: str, place: str
) -> None:
    """Where there is no run, too, and nothing to do."""
    for example in examples(commands()[name].function()):
        words = [word for word in shlex.split(example)[1:] if word not in (name, "--json")]
        check(surgeon, [name, *words], places / place)
    check(surgeon, [name], places / place)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=typed(), place=st.sampled_from(PLACES))
@pytest.mark.long
def test_any_words_lead_to_one_document(
    surgeon: Surgeon, places: Path, words: list[str], place: str
) -> None:
    check(surgeon, words, places / place)
