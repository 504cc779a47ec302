"""The law of a hint: typed as it is printed, it gives the arguments that were meant, for the run of
the command that it answers and with its options."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon.hints import DRY, TYPED, Hint, Typed, again, command, quoted, shell, text
from tests.cli.conftest import Surgeon, hints
from tests.conftest import Trained
from tests.support.tiny_run import make_run

ODD = [
    "a run", "it's", '"', "$(touch P)", "`touch P`", "a;touch P", "a\nb", "\x1b[31mred", "*", "~",
    "!!", "-n", "e ckptsurgeon status; touch P;", "g ckptsurgeon log $(touch P)", "", "\\", "é ü",
    "\u202e", "a    b", "\udcff", "ckptsurgeon undo",
]  # fmt: skip
UNFIT = ("\udcff", "a    b")
"""No name of a folder here, and one in which the reason can't be told from the command."""
PRINTED = re.compile(r"(?m)(?:next: |apply    |^ {6})(ckptsurgeon .*?)(?: {4}.*)?$")
"""The commands in an answer."""
WORDS = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12),
)


def in_bash(line: str, folder: Path) -> list[list[str]]:
    """The arguments of each call of `ckptsurgeon`, where bash runs this line in `folder`."""
    script = 'ckptsurgeon() { printf "%s\\0" "$@" END; }\n' + line
    words = ["bash", "--norc", "-c", script.encode("utf-8", "surrogateescape")]
    ran = subprocess.run(words, cwd=folder, capture_output=True, check=True)
    calls = ran.stdout.decode("utf-8", "surrogateescape").split("END\0")
    return [call.split("\0")[:-1] for call in calls[:-1]]


@given(st.lists(WORDS, min_size=1, max_size=3))
@example(ODD)
@settings(max_examples=40, deadline=None)
def test_bash_reads_a_quoted_line_as_the_words_that_were_meant(words: list[str]) -> None:
    line = quoted("ckptsurgeon", *words)
    assert line.isprintable()
    assert in_bash(line, Path("/")) == [words]
    if all(word.isprintable() for word in words):
        assert shlex.split(line)[1:] == words


@given(WORDS, WORDS)
@settings(max_examples=20, deadline=None)
def test_each_kind_of_hint_is_quoted(run: str, word: str) -> None:
    assume(not DRY.fullmatch(run))
    typed = Typed(("set-lr", "5", "-C", run, "-n"), lambda hint: (["-C", run], ["--json"]))
    token = TYPED.set(typed)
    try:
        there = Path("/")
        assert in_bash(str(command("undo", word)), there) == [["-C", run, "undo", word, "--json"]]
        assert in_bash(str(again("--why", word)), there) == [[*typed.words, "--why", word]]
        if "5" not in (run, word):
            more = again(swapped=("5", word), without=["--dry-run"])
            assert in_bash(str(more), there) == [["set-lr", word, "-C", run]]
        assert in_bash(str(shell(["true", run], ["ckptsurgeon", word])), there) == [[word]]
    finally:
        TYPED.reset(token)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [name for name in ODD if name and name not in UNFIT])
@pytest.mark.long
def test_a_hint_of_a_run_with_an_odd_name_finds_that_run(
    surgeon: Surgeon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = make_run(tmp_path / "made", [4, 8]).rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for words in (["show", "6"], ["skip", "5", "-n"], ["rollback", "6"], ["set-lr", "5e-4", "-n"]):
        told = surgeon(*words, "-C", f"./{name}")
        found = PRINTED.findall(told.stdout + told.stderr)
        assert found, words
        for line in found:
            for call in in_bash(line, tmp_path):
                assert {name, f"./{name}"} & set(call), line
                assert surgeon(*call, "--dry-run").exit_code in (0, 3, 4), line
    assert not (tmp_path / "P").exists() and root.is_dir()


@pytest.mark.parametrize("options", [[], ["-n"], ["--json"], ["-n", "--json"]])
def test_what_was_typed_is_carried_over(
    surgeon: Surgeon, tmp_path: Path, options: list[str]
) -> None:
    root = make_run(tmp_path / "run", [4, 8])
    told = surgeon("rollback", "--to", "6", *options, "-C", root).stderr
    for name in ("4", "8"):
        assert name in told
    found = [words for words in hints(told.replace('", "', "\n").replace('"', "\n")) if words]
    assert found
    for words in found:
        assert str(root) in words
        edits = "rollback" in words
        assert ("-n" in words or "--dry-run" in words) == ("-n" in options and edits), words
        assert ("--json" in words) == ("--json" in options), words


def test_globals_that_were_allowed_go_to_what_reads_pickles_alone(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    """An undo and a redo bring back bytes: no option of theirs allows a global."""
    root, allowed = make_run(tmp_path / "run", [4, 8]), ["--allow-global", "some.name"]
    shown = surgeon("set-lr", "5e-4", "-n", *allowed, "-C", root).stdout
    assert "--allow-global some.name" in shown
    done = surgeon("set-lr", "5e-4", "-y", *allowed, "-C", root).stdout
    assert f"  undo     ckptsurgeon -C {root} undo 0001\n" in done
    undone = surgeon("undo", "-y", *allowed, "-C", root).stdout
    assert f"  redo     ckptsurgeon -C {root} redo\n" in undone


def test_logs_that_were_typed_are_carried_over(surgeon: Surgeon, tmp_path: Path) -> None:
    log = tmp_path / "a log.jsonl"
    log.write_text("".join(f'{{"step": {i}, "other": 1.0}}\n' for i in range(300)))
    told = surgeon("report", "-o", tmp_path / "run.svg", "--log", log)
    hint = shlex.join(["--log", str(log), "--tag", "loss=other"])
    assert told.exit_code == 2 and told.stderr.endswith(f"{hint}\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rollback --step 350 -n", "rollback 350 -n"),
        ("rollback --at=350", "rollback --to=350"),
        ("verify --step 4", "verify 4"),
        ("show --step=4", "show 4"),
        ("undo --id 0001", "undo 0001"),
        ("fork --from 4 ../branch", "fork --step 4 ../branch"),
        ("fork --from ../run ../branch", "fork --help"),
        ("rollback --from 8 --to 4", "rollback --help"),
        ("export 4", "export 4 --output DIR"),
        ("help", "--help"),
        ("help rollback", "rollback --help"),
        ("-C run revert", "-C run undo"),
        ("ls", "status"),
        ("set-lr=3e-5 -n", "set-lr 3e-5 -n"),
    ],
)
def test_what_was_typed_is_led_to_what_takes_it(surgeon: Surgeon, typed: str, meant: str) -> None:
    """Never to an option that is only spelled like it: --from was --format."""
    told = surgeon(*typed.split())
    assert told.exit_code == 2 and f"next: ckptsurgeon {meant}\n" in told.stderr


def test_a_folder_typed_as_an_argument_is_the_run(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained()
    monkeypatch.chdir(root.parent)
    for words in (["status", root.name], ["status", "-C", f"{root.name}s"]):
        *_, hint = hints(surgeon(*words).stderr)
        assert surgeon(*hint).stdout.startswith(f"{root.name}   ")


def test_where_no_step_is_whole_status_and_repair_do_not_send_to_each_other(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    for folder in root.glob("global_step*"):
        shutil.rmtree(folder)
    for words in (["status"], ["repair-latest", "-n"], ["verify"], ["set-lr", "1e-4", "-n"]):
        told = surgeon(*words, "-C", root)
        assert "restore a step from a copy into" in told.stdout + told.stderr, words
        assert not hints(told.stdout + told.stderr), words


def test_a_plan_is_not_read_as_a_recipe(
    surgeon: Surgeon, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, saved = trained(), tmp_path / "a plan.json"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("set: {lr: 5e-4}")
    assert surgeon("plan", recipe, "-o", saved, "-C", root).exit_code == 0
    (hint,) = hints(surgeon("plan", saved, "-C", root).stderr)
    assert surgeon(*hint).exit_code == 0


def test_a_cut_branch_that_is_there_gets_a_free_name(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root, recipe = trained(), tmp_path / "recipe.yaml"
    recipe.write_text("rollback: {to: 4}\ntensorboard: {keep_as: tb-kept}")
    (root / "tensorboard" / "tb-kept").mkdir()
    for words in (["apply", recipe], ["plan", recipe], ["rollback", "4", "--keep-tb", "tb-kept"]):
        (hint,) = hints(surgeon(*words, "-C", root, "-n").stderr)
        assert surgeon(*hint).exit_code == 0, hint


def test_the_same_act_reads_as_a_sentence_where_nothing_was_typed() -> None:
    assert text(again("--yes", why="do it")) == "the same command with --yes    do it"
    assert text(again(swapped=(5, 4))) == "the same command with 4 for 5"
    assert text(again(without=["--relaunch"])) == "the same command without --relaunch"
    assert text(again()) == "the same command again"


def test_what_comes_after_two_dashes_stays_last() -> None:
    typed = Typed(("relaunch", "--json", "--", "train_iters=10"), lambda hint: ((), ["--json"]))
    assert answered(typed, again("--yes", why="do it")) == (
        "ckptsurgeon relaunch --json --yes -- train_iters=10    do it"
    )
    assert answered(typed, again(without=["--json"])) == "ckptsurgeon relaunch -- train_iters=10"
    whole = command("relaunch", "--exec", "--", "COMMAND")
    assert answered(typed, whole) == "ckptsurgeon relaunch --exec --json -- COMMAND"


def answered(typed: Typed, hint: Hint) -> str:
    """The hint as the line that answers what was typed."""
    token = TYPED.set(typed)
    try:
        return text(hint)
    finally:
        TYPED.reset(token)


def test_in_a_recipe_the_step_is_named(surgeon: Surgeon, trained: Trained, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rollback: {to: 5}")
    told = surgeon("apply", recipe, "--yes", "-C", trained())
    assert "next: the same command with 4 for 5    step 4 is saved\n" in told.stderr
