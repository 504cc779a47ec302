"""How each class of torch and of three libraries of optimizers is made for a small model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.optimizer_law import Make, Small, Wide


@dataclass(frozen=True)
class Case:
    """A class and the model that it trains."""

    kind: Callable[[], torch.nn.Module]
    make: Make


TORCH: dict[str, dict[str, Any]] = {
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
"""Class of torch, perhaps with a name for its arguments → its arguments."""


def torch_optimizer(case: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """One of `TORCH`; Muon gets the matrices alone."""
    cls: Any = getattr(torch.optim, case.partition("-")[0])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    params = matrices if case == "Muon" else list(model.parameters())
    optimizer: torch.optim.Optimizer = cls(params, lr=1e-2, **TORCH[case])
    return optimizer


SPLIT = {"Muon", "AdaMuon", "NorMuon", "DistributedMuon", "AdaGO"}
"""They take matrices and vectors apart."""
MOMENTUM = {
    "AliG", "LARS", "LARS32bit", "LARS8bit", "PytorchLARS", "SGD", "SGD32bit", "SGD8bit", "PID",
    "SGDW",
}  # fmt: skip
"""They keep nothing, or do not run, without one."""
SECOND_ORDER = {"AdaHessian", "SophiaH"}
MATRICES = {"SpectralSphere", "LoRARite"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "BSAM": {"num_data": 10},
    "Ranger21": {"num_iterations": 100},
}
UNMADE = {
    "LOMO": "it steps within the backward pass and keeps no state",
    "AdaLOMO": "it steps within the backward pass and keeps no state",
    "MuonClip": "its step fails on a tensor of its own state",
    "DeMo": "it needs einops, which the library does not install",
    "AdEMAMix32bit": "its step fails on the shape of its own state",
    "PagedAdEMAMix32bit": "its step fails on the shape of its own state",
    "AdamFp8": "it needs a GPU",
    "AdamWFp8": "it needs a GPU",
    "CPUOffloadOptimizer": "it needs a GPU",
}
"""Classes that train nothing here, and why."""
REFUSED = {
    f"pytorch_optimizer.{name}" for name in (
    "ASGD", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "SaRA",
    "SWATS", "Ranger21", "SPAM", "StableSPAM", "Magma", "Lookahead", "ScheduleFreeWrapper", "TRAC",
    )
}  # fmt: skip
"""Those of which no edit makes a new one, or whose state dict is of their own make."""


def _pytorch_optimizer() -> dict[str, type[Any]]:
    import pytorch_optimizer as library

    names = library.get_supported_optimizers()
    found = {library.load_optimizer(name) for name in names}
    own = {cls.__name__: cls for cls in found if cls.__module__.startswith("pytorch_optimizer")}
    wrappers = ("Lookahead", "ScheduleFreeWrapper", "TRAC", "OrthoGrad")
    return own | {name: getattr(library, name) for name in wrappers}


def _bitsandbytes() -> dict[str, type[Any]]:
    import bitsandbytes

    return {
        name: cls
        for name, cls in vars(bitsandbytes.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }


def _torchao() -> dict[str, type[Any]]:
    import torchao.optim

    return {
        name: cls
        for name, cls in vars(torchao.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }


LIBRARIES = {
    "pytorch_optimizer": _pytorch_optimizer,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}


def classes() -> set[str]:
    """`library.Class` of all that can be run here."""
    return {
        f"{library}.{name}"
        for library, found in LIBRARIES.items()
        for name in found()
        if name not in UNMADE
    }


def make(cls: type[Any], model: torch.nn.Module) -> Any:
    """An optimizer of the class for the parameters of the model."""
    params: Any = list(model.parameters())
    matrices = [p for p in params if p.ndim == 2]
    accepts = inspect.signature(cls).parameters
    arguments: dict[str, Any] = dict(ARGUMENTS.get(cls.__name__, {}))
    if cls.__name__ == "AdamMini":
        return cls(model)
    if cls.__name__ == "ScheduleFreeWrapper":
        wrapper = cls(torch.optim.AdamW(params, lr=1e-2))
        wrapper.train()
        return wrapper
    if cls.__name__ in ("Lookahead", "TRAC", "OrthoGrad", "Magma"):
        return cls(torch.optim.AdamW(params, lr=1e-2))
    if cls.__name__ in SPLIT:
        vectors = [p for p in params if p.ndim != 2]
        params = [
            {"params": matrices, "use_muon": True},
            {"params": vectors, "use_muon": False},
        ]
    if cls.__name__ in MATRICES:
        params = matrices[:1]
    if "lr" in accepts and (accepts["lr"].default in (inspect.Parameter.empty, None)):
        arguments["lr"] = 1e-2
    if cls.__name__ in MOMENTUM:
        arguments["momentum"] = 0.9
    if "weight_decay" in accepts:
        arguments["weight_decay"] = 1e-2
    optimizer = cls(params, **arguments)
    optimizer.second_order = cls.__name__ in SECOND_ORDER
    return optimizer


def _case(library: str, cls: type[Any]) -> Case:
    kind = Small if library == "pytorch_optimizer" else Wide
    return Case(kind, lambda model: make(cls, model))


def _cases() -> dict[str, Case]:
    out = {}
    for library, found in LIBRARIES.items():
        try:
            held = found()
        except ImportError:  # without the extra `formats`
            continue
        out |= {
            f"{library}.{name}": _case(library, cls)
            for name, cls in sorted(held.items())
            if name not in UNMADE
        }
    return out


CASES = _cases()


@contextlib.contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A group of one rank, which some optimizers ask for."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
