"""Every optimizer of torch, as the tests make it."""

from __future__ import annotations

from typing import Any

import torch

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


def make(case: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    cls: Any = getattr(torch.optim, case.partition("-")[0])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    params = matrices if case == "Muon" else list(model.parameters())
    optimizer: torch.optim.Optimizer = cls(params, lr=1e-2, **CASES[case])
    return optimizer
