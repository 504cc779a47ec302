"""Recipes from anyone: rows 39 and 40."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.hostile.hostile_run import call, refused

SECRET = "s3cret-of-the-environment"

BAD = {
    "39 an alias bomb": "a: &a [x, x]\n"
    + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(40))
    + "why: *a\n",
    "39 50,000 levels": "why: " + "[" * 50_000,
    "39 a key twice": "set: {lr: 1e-3, lr: 2e-3}",
    "39 on is no number": "set: {lr: on}",
    "39 12:30:45 is no number": "set: {lr: 12:30:45}",
    "39 010 is no number": "set: {seed: 010}",
    "39 a tag": "why: !!python/object/apply:os.system [touch CANARY]",
    "39 a short tag": "why: !x y",
    "39 over 1 MB": "why: " + "x" * 1_000_001,
    "39 not UTF-8": "why: \udcff",
    "39 a merge key": "set:\n  <<: {lr: 1}\n  lr: 2",
    "39 NUL": "why: \0",
    "40 the environment": "why: ${oc.env:SECRET}",
    "40 the environment, nested": "why: ${oc.decode:${oc.env:SECRET}}",
    "40 another key": "name: x\nwhy: ${name}",
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_wrong_usage_and_nothing_runs(trained: Trained, tmp_path: Path, name: str) -> None:
    root, recipe = trained(), tmp_path / "recipe.yaml"
    recipe.write_bytes(BAD[name].encode("utf-8", "surrogateescape"))
    said = refused(root, "apply", recipe, code=2)
    assert str(recipe) in said
    assert SECRET not in said
    assert len(said) < 2000


def test_6e_5_is_a_float(trained: Trained, tmp_path: Path) -> None:
    root, recipe = trained(), tmp_path / "recipe.yaml"
    recipe.write_text("set: {lr: 6e-4, min_lr: 6e-5}")
    status, _, said = call("apply", recipe, "--dry-run", "-C", root)
    assert status == 0, said


def test_a_recipe_without_end_is_refused(trained: Trained) -> None:
    refused(trained(), "apply", "/dev/zero", says="/dev/zero", code=2)


def test_the_shell_and_the_environment_are_text(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 40: what looks like the shell's stays as it is, in the receipt too, and no variable's
    value is written anywhere."""
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    root, recipe = trained(), tmp_path / "recipe.yaml"
    why = "$SECRET ~ $HOME $(touch CANARY) `touch CANARY`; touch CANARY"
    recipe.write_text(
        f"why: '{why}'\nset: {{eps: 1e-6}}\nrelaunch: {{args: ['; touch CANARY', '$SECRET']}}\n"
    )
    status, out, said = call("apply", recipe, "--yes", "-C", root)
    assert status == 0, said
    kept = b"".join(p.read_bytes() for p in (root / ".ckptsurgeon").rglob("*") if p.is_file())
    kept += b"".join(p.read_bytes() for p in (root / "tensorboard").iterdir())
    assert why.encode() in kept
    assert SECRET.encode() not in kept
    assert SECRET not in out + said
    assert not (tmp_path / "CANARY").exists()
