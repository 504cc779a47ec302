"""A dry run ends with the command that carries it out, as it was typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

LABEL = "  apply    "


def last(text: str) -> str:
    line = text.rstrip("\n").rpartition("\n")[2]
    assert line.startswith(LABEL), text
    return line.removeprefix(LABEL)


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("set-lr 5e-4 -n", "set-lr 5e-4"),
        ("-C . set lr=5e-4 --dry-run", "-C . set lr=5e-4"),
        ("rollback 4 -yn --why 'a spike'", "rollback 4 -y --why 'a spike'"),
        ("rollback -nC . --to 4", "rollback -C . --to 4"),
        ("reset moments -nn", "reset moments"),
        ("cooldown 10% -n", "cooldown 10%"),
        ("fork ../branch --copy -n", "fork ../branch --copy"),
        ("export 8 -o ../weights -n", "export 8 -o ../weights"),
        ("plan recipe.yaml", "apply recipe.yaml"),
        ("plan recipe.yaml set.lr=2e-4 --exit-code --why 'it is high' -n",
         "apply recipe.yaml set.lr=2e-4 '--why=it is high'"),
        ("plan recipe.yaml -o 'a plan.json'", "apply 'a plan.json'"),
        ("apply recipe.yaml set.lr=2e-4 -n", "apply recipe.yaml set.lr=2e-4"),
    ],
)  # fmt: skip
@pytest.mark.long
def test_the_last_line_is_the_command_that_does_it(
    surgeon: Surgeon,
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    wanted: str,
) -> None:
    root = trained()
    monkeypatch.chdir(root)
    Path("recipe.yaml").write_text("set: {lr: 5e-4}\n")
    before = snapshot(root)
    shown = surgeon(*shlex.split(typed))
    assert shown.exit_code in (0, 3), shown.stderr
    assert {**snapshot(root), "a plan.json": None} == {**before, "a plan.json": None}
    assert last(shown.stdout) == f"ckptsurgeon {wanted}"
    done = surgeon(*shlex.split(wanted), "--yes")
    assert done.exit_code == 0 and LABEL not in done.stdout, done.stderr


def test_a_plan_and_its_dry_run_are_one_text(surgeon: Surgeon, tmp_path: Path) -> None:
    """With each word for how much of it is shown, typed before or after the recipe."""
    root, recipe = make_run(tmp_path / "run", range(2, 22, 2)), tmp_path / "recipe.yaml"
    recipe.write_text("{rollback: {to: 2}, set: {lr: 5e-4}}\n")
    shown = []
    for more in ([], ["-v"], ["--verbose"], ["-q"], ["--json"]):
        there, back = ([*more, recipe, "-C", root], [recipe, "-C", root, *more])
        told = [surgeon(*words) for words in (["plan", *there], ["apply", "-n", *back])]
        assert [each.exit_code for each in told] == [0, 0], told[0].stderr
        one, other = (each.stdout.rpartition(LABEL)[0] or each.stdout for each in told)
        assert one == other
        shown.append(one)
    assert "files  " in shown[1] and "files  " not in shown[0]
    assert all(f"checkpoint-{step}" in shown[1] for step in range(2, 22, 2))  # each file
    assert shown[1] == shown[2] and shown[3] == ""


def test_of_an_attic_and_a_surgery_to_undo(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained()
    monkeypatch.chdir(root.parent)
    assert surgeon("rollback", 4, "--yes", "-C", root.name).exit_code == 0
    kept = surgeon("prune", "--keep", 0, "-n", "-C", root.name)
    assert last(kept.stdout) == f"ckptsurgeon prune --keep 0 -C {root.name}"
    kept = surgeon("prune", "-n", "-C", root.name)
    assert last(kept.stdout).startswith(f"ckptsurgeon -C {root.name} prune --keep N    ")
    assert last(surgeon("undo", "-n", "-C", root.name).stdout) == f"ckptsurgeon undo -C {root.name}"


def test_without_a_change_or_as_json_there_is_no_such_line(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    assert LABEL not in surgeon("rollback", "--to", 8, "-n", "-C", root).stdout
    told = surgeon("set-lr", "5e-4", "-n", "--json", "-C", root).stdout
    assert json.loads(told) and LABEL not in told
    assert LABEL not in surgeon("set-lr", "5e-4", "--yes", "-C", root).stdout


def test_a_fork_says_that_sharing_depends_on_the_file_system(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    told = surgeon("fork", root.parent / "branch", "-n", "-C", root).stdout
    assert "by reflink, if the file system can (else: --hard-link or --copy)\n" in told
    told = surgeon("fork", root.parent / "branch", "--copy", "-n", "-C", root).stdout
    assert "by copy\n" in told
