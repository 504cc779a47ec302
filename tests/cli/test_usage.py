"""Wrong usage: three lines, exit 2, and never a traceback."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from ckptsurgeon.cli.build import build
from ckptsurgeon.cli.commands import commands, examples
from ckptsurgeon.cli.options import LogOneLiner
from ckptsurgeon.operations import Operation
from tests.cli.conftest import Surgeon
from tests.support.launch import REPO
from tests.support.tiny_run import make_run

WRONG: dict[str, tuple[list[str], str]] = {
    "command": (["staus"], "next: ckptsurgeon status"),
    "option": (["rollback", "--tp", "3"], "--tp"),
    "missing option": (["rollback"], "--to"),
    "missing argument": (["set"], "KEY=VALUE"),
    "not a count": (["set-lr", "1e-3", "--jobs", "x"], "'--jobs' must be a whole number"),
    "count out of range": (["set-lr", "1e-3", "--jobs", "0"], "'--jobs' must be at least 1"),
    "two steps": (["rollback", "10", "--to", "8"], "both STEP and --to"),
    "negative rate": (["set-lr", "-1e-4"], "-1e-4: the learning rate can't be negative"),
    "negative number": (["skip", "-5"], "-5 is negative, and `ckptsurgeon skip` takes no negative"),
    "unknown key": (["set", "betta2=0.9", "--print-recipe"], "did you mean `beta2`?"),
    "not a pair": (["set", "beta2", "--print-recipe"], "is not KEY=VALUE"),
    "a bare key": (["set", "beta2"], "error: 'beta2' is not KEY=VALUE"),
    "betas": (["set", "betas=0.95"], "did you mean `beta1` and `beta2`?"),
    "no near key": (["set", "foo=1"], "rampup, and what your optimizer's param groups hold"),
    "no near value": (["precision", "fp8"], "next: one of: bf16, fp32"),
    "a value of few": (["swap-optimizer", "lion"], "error: the argument takes no 'lion'"),
    "two pairs of one option": (
        ["rollback", "4", "--set", "lr=1e-4", "beta2=0.9", "-n"],
        "next: ckptsurgeon rollback 4 --set lr=1e-4 --set beta2=0.9 -n",
    ),
    "a pair in two words": (["set", "beta2", "0.95"], "next: ckptsurgeon set beta2=0.95"),
    "no rate": (["set-lr"], "no learning rate"),
    "two rates": (["set-lr", "1e-4", "--scale", "0.5"], "both LR and --scale"),
    "no factor": (["set-lr", "--scale", "50%"], "error: --scale 50% is no factor"),
    "rate in words": (
        ["set-lr", "small", "--print-recipe"],
        "error: LR is 'small', and not a number",
    ),
    "unknown state": (["reset", "momments", "--print-recipe"], "`moments`"),
    "two windows": (["reset", "moments", "--rewarm", "3", "--rewarm-ramp", "3"], "exclude each"),
    "no window": (["reset", "moments", "--rewarm", "0", "--print-recipe"], "it must be at least 1"),
    "less than none": (["reset", "moments", "--rewarm-ramp", "-1"], "--rewarm-ramp is -1; it must"),
    "a key twice": (["set", "lr=1e-4", "lr=2e-4"], "error: `lr` is given twice: 1e-4 and 2e-4"),
    "a lost minus": (["set-lr", "3e5"], "next: lr is at most 100; 3e-05, if a minus was lost"),
    "a slip": (["set", "weight_decay=1e99"], "next: weight_decay is at most 100"),
    "nodes of no job": (["relaunch", "--nodes", "2"], "belong to --slurm"),
    "no command": (["relaunch", "--exec"], "--exec takes a command"),
    "no range": (["skip"], "no range"),
    "empty range": (["skip", "9-3", "--print-recipe"], "9-3"),
    "two that exclude each other": (
        ["truncate-tb-events", "--after", "3", "--keep-tb", "a", "--no-keep-tb"],
        "excl",
    ),
    "half a pair": (["rename-tb-events", "lm loss"], "OLD NEW or --map"),
    "no recipe": (["plan", "absent.yaml"], "absent.yaml"),
    "no plan": (["apply", "absent.json"], "absent.json"),
    "no map": (["rename-tb-events", "--map", "absent.yaml"], "absent.yaml"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_three_lines(surgeon: Surgeon, name: str) -> None:
    words, said = WRONG[name]
    result = surgeon(*words)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert said in result.stderr
    assert "untouched: the run is exactly as it was" in lines
    assert any(line.startswith("next: ") for line in lines)
    assert result.stdout == ""
    assert result.exit_code == 2


KEY = re.compile(r"`([a-z_]\w*(?:\.\w+)*)`|\b(set\.\w+)")
OFFERED = re.compile(r"next: (?:did you mean `(.*)`|one of: (.*))")
IN_A_RECIPE = ("by a recipe", "in a recipe")
"""What a hint says before a key that stands in a recipe alone."""


@pytest.mark.parametrize(
    "name", [row.name for row in commands().values() if isinstance(row.place, Operation)]
)
@pytest.mark.thinned(3)
@pytest.mark.long
def test_an_error_of_a_one_line_command_names_what_it_takes(
    surgeon: Surgeon, tmp_path: Path, name: str
) -> None:
    """Wrong words in each place of its examples, and in each of its own options: no key of a recipe
    is named, and each word that is offered in place of a wrong one is taken."""
    row, root = commands()[name], make_run(tmp_path / "run", (2, 4))
    typed = [shlex.split(each)[2:] for each in examples(row.function())]
    places = [(words[:at], "", words[at + 1 :]) for words in typed for at in range(len(words))]
    shared = {item.name for item in dataclasses.fields(LogOneLiner)}
    for parameter in build(row).params:
        if parameter.name not in shared and parameter.opts[0].startswith("-"):
            places += [(words, f"{parameter.opts[0]}=", []) for words in [[], *typed]]
    for (before, option, after), wrong in product(places, ("nosuch", "-3", "moment", "loss_scal")):
        words = [*before, option + wrong, *after]
        said = surgeon(name, *words, "-n", "-C", root).stderr
        error = said.partition("\n")[0]
        offered = OFFERED.search(said) if wrong in error else None
        if not any(text in said for text in IN_A_RECIPE):
            named = {"".join(each) for each in KEY.findall(OFFERED.sub("", said))}
            typed_keys = {word.partition("=")[0] for word in words}
            assert named <= {name, "show", *typed_keys}, (words, said)
        for right in "".join(offered.groups("")).split(", ") if offered else ():
            again = surgeon(name, *before, option + right, *after, "-n", "-C", root)
            assert error != again.stderr.replace(right, wrong).partition("\n")[0], (words, right)


def test_a_python_that_lacks_what_it_needs_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "ckptsurgeon", "status"],
        env={"PYTHONPATH": str(REPO)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 3
    assert lines[0] == f"error: {sys.executable} has no package typer"
    assert lines[2].startswith(f"next: {sys.executable} -m pip install {REPO}")


def test_a_python_that_is_too_old_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptsurgeon import __main__

    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert "needs Python 3.10 or newer, and" in capsys.readouterr().err


def test_wrong_usage_with_json_is_one_object(surgeon: Surgeon) -> None:
    result = surgeon("rollback", "--json")
    told = json.loads(result.stderr)
    assert set(told) == {
        "schema", "run", "error", "untouched", "next", "comment", "exit_code",
    }  # fmt: skip
    assert (told["next"], told["comment"]) == (["ckptsurgeon status --json"], ["list the steps"])
    assert (told["exit_code"], result.exit_code, result.stdout) == (2, 2, "")


def test_a_folder_without_a_run_is_wrong_usage(surgeon: Surgeon, tmp_path: Path) -> None:
    result = surgeon("status", "-C", tmp_path)
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert "next: ckptsurgeon -C RUN status    RUN is the folder that holds" in result.stderr


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "not json", '{"kind": "Plan"}', '{"kind": "Aside", "file": "a"}']
)
def test_a_file_that_is_no_plan_is_refused(surgeon: Surgeon, tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    (tmp_path / "latest").write_text("global_step3")
    result = surgeon("apply", file, "-C", tmp_path, "--yes")
    assert result.exit_code == 2
    assert "is not a plan" in result.stderr


def test_a_finished_plan_takes_no_overrides(surgeon: Surgeon, tmp_path: Path) -> None:
    result = surgeon("apply", tmp_path / "plan.json", "set.lr=3e-5")
    assert result.exit_code == 2
    assert "finished plan" in result.stderr


@pytest.mark.parametrize(
    ("typed", "said", "following"),
    [
        ("statsu", "no such command 'statsu'", "ckptsurgeon status"),
        ("-C a rolback --to 5", "no such command 'rolback'", "ckptsurgeon -C a rollback --to 5"),
        ("rollback --too=5", "no such option: --too", "ckptsurgeon rollback --to=5"),
        ("status --foo", "no such option: --foo", "ckptsurgeon status --help"),
        ("completion", "no such command 'completion'", "ckptsurgeon --help"),
        ("status 50", "`ckptsurgeon status` takes no argument 50", "ckptsurgeon status --help"),
        ("-C a rollback --to 8 set-lr 0.5x", "two commands in one line: rollback and set-lr",
         "ckptsurgeon -C a rollback --to 8"),
        ("log 0001", "takes no argument 0001", "ckptsurgeon diff --receipt 0001    "),
        ("log a", "takes no argument a", "ckptsurgeon log --help"),
        ("verify --level 5", "'--level' must be at most 4",
         "ckptsurgeon verify --help"),
        ("verify --level", "option '--level' requires an argument", "ckptsurgeon verify --help"),
        ("average 2 x", "STEP is 'x', and no number", "ckptsurgeon average --last 2    "),
        ("average 350", "STEP needs two different steps", "ckptsurgeon average --last 2    "),
        ("skip", "no range was given", "ckptsurgeon skip --help    a range is FIRST-LAST"),
        ("rename-tb-events -n", "no tag to rename was given", "ckptsurgeon rename-tb-events "),
        ("scale x --by y", "--by is 'y'", "write a number"),
        ("rollback 5 --to 6", "both STEP and --to were given", "ckptsurgeon rollback --to 6"),
        ("diff 5", "two steps or runs", "ckptsurgeon diff 5 latest"),
        ("relaunch --nodes 2", "belong to --slurm", "ckptsurgeon relaunch --nodes 2 --slurm"),
        ("doctor --against 5", "belongs to --vitals", "ckptsurgeon doctor --against 5 --vitals"),
        ("precision fp16", "can't become fp16", "ckptsurgeon precision bf16    "),
        ("set lr: 3e-5", "'lr:' is not KEY=VALUE", "ckptsurgeon set lr=3e-5"),
        ("set lr=3e-5,beta2=0.9 eps=1e-8", "is several KEY=VALUE",
         "ckptsurgeon set lr=3e-5 beta2=0.9 eps=1e-8"),
        ("rollback 4 --set lr=3e-5,beta2=0.9 -n", "is several KEY=VALUE",
         "ckptsurgeon rollback 4 --set lr=3e-5 --set beta2=0.9 -n"),
        ("set eps=1e-8 betas=0.9,0.95 -n", "unknown key `betas`: its two numbers are",
         "ckptsurgeon set eps=1e-8 beta1=0.9 beta2=0.95 -n"),
        ("set betas=(0.9, 0.95) eps=1e-8", "(betas=(0.9, 0.95))",
         "ckptsurgeon set beta1=0.9 beta2=0.95 eps=1e-8"),
        ("-C a set betas 0.9 .95", "unknown key", "ckptsurgeon -C a set beta1=0.9 beta2=.95"),
        ("set betas=[0.9,0.95] --params bias", "unknown key",
         "ckptsurgeon set beta1=0.9 beta2=0.95 --params bias"),
        ("rollback --to 4 --set betas=0.9,0.95 -n", "unknown key",
         "ckptsurgeon rollback --to 4 --set beta1=0.9 --set beta2=0.95 -n"),
        ("rollback --to 4 --set=betas=0.9,0.95", "unknown key",
         "ckptsurgeon rollback --to 4 --set beta1=0.9 --set beta2=0.95"),
        ("reset adam -n", "`reset` takes no 'adam'", "ckptsurgeon reset moments -n"),
        ("rollback 4 --reset scaler", "--reset takes no 'scaler'",
         "ckptsurgeon rollback 4 --reset loss-scale"),
        ("set-lr half", "LR is 'half', and not a number", "did you mean `0.5x`?"),
        ("set-lr x0.5", "LR is 'x0.5', and not a number", "did you mean `0.5x`?"),
        ("set eps=50%", "is '50%', and not a number", "did you mean `0.5x`?"),
        ("set =3", "'=3' is not KEY=VALUE", "for example: lr=3e-5"),
        ("set LR=3e-5", "unknown key `LR`", "did you mean `lr`?"),
        ("set lr 3e-5 --to 140", "takes no --to", "ckptsurgeon rollback --to 140 --set lr=3e-5"),
        ("-C a set --to=140 lr=3e-5 eps=1e-8 -y", "takes no --to",
         "ckptsurgeon -C a rollback --to 140 --set lr=3e-5 --set eps=1e-8"),
        ("set-lr 3e-5 --to 140", "takes no --to", "ckptsurgeon rollback --to 140 --set lr=3e-5"),
        ("reset moments --to", "takes no --to", "ckptsurgeon rollback --to STEP --reset moments"),
        ("skip 150..200", "skip range '150..200' is not A-B", "for example: 150-200"),
        ("skip 1-2,5", "skip range '1-2,5' is several", "each range by itself: 1-2 5"),
        ("set batch_size=512 --params bias", "batch_size is one of the whole run",
         "ckptsurgeon set batch_size=512    without --params"),
        ("cooldown soon", "LENGTH is 'soon'", "ckptsurgeon cooldown 400    or 10%"),
        ("cooldown 0", "LENGTH is 0", "write a whole number, at least 1"),
        ("cooldown 200%", "LENGTH is 200%", "write a number, above 0 and below 100"),
        ("cooldown 4 --to -1", "--to is -1.0", "write a number, at least 0"),
    ],
)  # fmt: skip
def test_a_slip_of_the_fingers_is_answered_by_what_was_meant(
    surgeon: Surgeon, typed: str, said: str, following: str
) -> None:
    result = surgeon(*typed.split())
    assert result.exit_code == 2
    error, untouched, after = result.stderr.splitlines()[:3]
    assert said in error and "?" not in error and untouched.startswith("untouched: ")
    assert after.startswith(f"next: {following}")


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("rollback 4 lr=3e-4 -n", "rollback 4 --set lr=3e-4 -n"),
        ("rollback --to 4 lr=3e-4 beta2=0.9", "rollback --to 4 --set lr=3e-4 --set beta2=0.9"),
        ("rollback 4 --why a=b lr=3e-4", "rollback 4 --why a=b --set lr=3e-4"),
        ("rollback 4 --set lr=3e-4 -y beta2=0.9", "rollback 4 --set lr=3e-4 -y --set beta2=0.9"),
        ("fork ../branch seed=7", "fork ../branch --set seed=7"),
    ],
)
def test_a_value_without_its_set_is_given_one(surgeon: Surgeon, typed: str, wanted: str) -> None:
    refused = surgeon(*typed.split())
    assert refused.exit_code == 2 and "each KEY=VALUE takes a --set of its own" in refused.stderr
    assert f"next: ckptsurgeon {wanted}\n" in refused.stderr
