"""Optimizers of other packages as transformers' Trainer makes them by `--optim`: an edit is right,
or it is refused and says what of their state is not known."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, apply, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.check_optimizer import FORMAT
from tests.support.newest_megatron import beside
from train import optimizer_runs as described

pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("ignore")]


def made(optim: str, package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> described.Make:
    """What makes the optimizer as the Trainer does."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(beside("optimizers")))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    pytest.importorskip(package)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        optim=optim,
        learning_rate=1e-3,
        weight_decay=0.1,
        use_cpu=True,
    )
    cls, given = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert cls.__module__.partition(".")[0] == package
    return lambda net: cls(net.parameters(), **given)


def saved(make: described.Make, folder: Path) -> tuple[Any, Path]:
    """The weights of a model after some updates, and the file with its optimizer's state."""
    net, optimizer = described.trained(make, described.SECOND)
    file = folder / "step-9" / "optimizer.pt"
    file.parent.mkdir()
    torch.save(optimizer.state_dict(), file)
    return net.state_dict(), file


def edited(folder: Path, **recipe: Any) -> None:
    run = Run.open(folder, FORMAT)
    apply(run, plan(run, from_data(recipe)))


@pytest.mark.parametrize(
    ("optim", "package"), [("stable_adamw", "optimi"), ("grokadamw", "grokadamw")]
)
def test_the_next_updates_use_the_rate_that_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str, package: str
) -> None:
    make = made(optim, package, tmp_path, monkeypatch)
    weights, file = saved(make, tmp_path)
    before = torch.load(file, weights_only=False)
    wanted = copy.deepcopy(before)
    for group in wanted["param_groups"]:
        group["lr"] = 5e-4
    edited(tmp_path, set={"lr": 5e-4})
    after = torch.load(file, weights_only=False)
    mine, right, old = (described.following(weights, make, s) for s in (after, wanted, before))
    assert not described.differ(mine, right)
    assert described.differ(mine, old)


def test_a_reset_of_stable_adamw_makes_the_next_updates_those_of_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = made("stable_adamw", "optimi", tmp_path, monkeypatch)
    weights, file = saved(make, tmp_path)
    old = torch.load(file, weights_only=False)
    edited(tmp_path, reset=["moments"])
    states = (torch.load(file, weights_only=False), None, old)
    mine, new, before = (described.following(weights, make, state) for state in states)
    assert not described.differ(mine, new)
    assert described.differ(before, new)


def test_a_reset_of_grokadamw_is_refused_by_the_keys_that_nobody_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = made("grokadamw", "grokadamw", tmp_path, monkeypatch)
    _, file = saved(make, tmp_path)
    before = file.read_bytes()
    with pytest.raises(SurgeryError) as refused:
        edited(tmp_path, reset=["moments"])
    assert "alpha_init (in param groups)" in refused.value.what
    assert "what a new one begins with is not known" in refused.value.what
    assert file.read_bytes() == before
