"""Every optimizer of torch: after `reset moments` its next updates are those of a new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptsurgeon.cli import app
from tests.support.optimizer_classes import TORCH, torch_optimizer
from tests.support.optimizer_law import Small, outcome, save, trained

LEFT_OUT = {"ASGD", "Adagrad-accumulator", "LBFGS", "Rprop", "SGD-dampening"}
"""Those that begin with more than zeros: with the lr, with a constant, or with the gradient."""
pytestmark = pytest.mark.filterwarnings("ignore:A .* optimizer was:UserWarning")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", TORCH)
def test_the_next_updates_are_those_of_a_new_optimizer(tmp_path: Path, case: str) -> None:
    found = outcome(tmp_path, Small, lambda model: torch_optimizer(case, model))
    how = "left out" if case in LEFT_OUT else "keeps no state" if case == "SGD" else "in place"
    assert found.how == how
    assert case.partition("-")[0] in found.name.split(" or ")


def test_no_class_of_torch_is_forgotten() -> None:
    classes = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    assert classes - {case.partition("-")[0] for case in TORCH} == {"Optimizer", "SparseAdam"}


def test_of_a_factored_optimizer_the_first_moment_alone_is_refused_with_what_it_keeps(
    tmp_path: Path,
) -> None:
    save(tmp_path, *trained(Small, lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2)))
    words = ["reset", "moments", "-n", "-C", str(tmp_path)]
    refused = CliRunner().invoke(app, [*words, "--only", "exp_avg"])
    assert refused.exit_code == 1
    assert "Adafactor keeps col_var, row_var, variance, and no exp_avg" in refused.stderr
    hint = refused.stderr.partition("next: ")[2].splitlines()[0]
    assert "reset moments" in hint and "--only" not in hint
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "col_var" in done.stdout
    other = CliRunner().invoke(app, [*words, "--only", "exp_avg_sq"])
    assert other.exit_code == 2 and "--only exp_avg" in other.stderr
    assert other.stderr.rstrip().endswith("if the optimizer keeps one")


@pytest.mark.parametrize("case", ["Adam", "Adafactor", *sorted(LEFT_OUT)])
def test_a_plan_has_no_line_for_each_parameter(tmp_path: Path, case: str) -> None:
    lines = []
    for layers in (2, 12):
        torch.manual_seed(0)

        def many(layers: int = layers) -> torch.nn.Module:
            return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))

        root = tmp_path / str(layers)
        save(root, *trained(many, lambda model: torch_optimizer(case, model)))
        planned = CliRunner().invoke(app, ["reset", "moments", "-n", "-C", str(root)])
        assert planned.exit_code == 0, planned.output
        lines.append(len(planned.stdout.splitlines()))
    assert lines[0] == lines[1]
