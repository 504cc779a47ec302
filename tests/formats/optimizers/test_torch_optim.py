"""Every optimizer of torch: after `reset moments` its next updates are those of a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.formats.optimizers.law import Small, outcome

CASES: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adagrad-accumulator": {"initial_accumulator_value": 0.1},
    "Adam": {},
    "Adam-amsgrad": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "LBFGS": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "RMSprop-momentum": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {},
    "SGD-momentum": {"momentum": 0.9, "nesterov": True},
    "SGD-dampening": {"momentum": 0.9, "dampening": 0.1},
}
LEFT_OUT = {"ASGD", "Adagrad-accumulator", "LBFGS", "Rprop", "SGD-dampening"}
"""Those that begin with more than zeros: with the lr, with a constant, or with the gradient."""
pytestmark = pytest.mark.filterwarnings("ignore:A .* optimizer was:UserWarning")


def make(case: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    cls: Any = getattr(torch.optim, case.partition("-")[0])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    params = matrices if case == "Muon" else list(model.parameters())
    optimizer: torch.optim.Optimizer = cls(params, lr=1e-2, **CASES[case])
    return optimizer


@pytest.mark.parametrize("case", CASES)
def test_the_next_updates_are_those_of_a_new_optimizer(tmp_path: Path, case: str) -> None:
    found = outcome(tmp_path, Small, lambda model: make(case, model))
    how = "left out" if case in LEFT_OUT else "keeps no state" if case == "SGD" else "in place"
    assert found.how == how
    assert case.partition("-")[0] in found.name.split(" or ")


def test_no_class_of_torch_is_forgotten() -> None:
    classes = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    assert classes - {case.partition("-")[0] for case in CASES} == {"Optimizer", "SparseAdam"}
