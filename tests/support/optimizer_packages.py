"""The optimizers of ten more libraries, and how each class is made for a small model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

PACKAGES = {
    "timm.optim": "timm",
    "heavyball": "heavyball",
    "torch_optimizer": "torch-optimizer",
    "optimi": "torch-optimi",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "galore_torch": "galore-torch",
    "apollo_torch": "apollo-torch",
    "dadaptation": "dadaptation",
    "came_pytorch": "came-pytorch",
}
"""Module → what it is called where it is installed from."""


def classes() -> Iterator[tuple[str, type[Any]]]:
    """`module.Class` and the class of all that are there."""
    for module in PACKAGES:
        try:
            library = _module(module)
        except ImportError:
            continue
        for name, cls in sorted(vars(library).items()):
            own = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
            if own and not cls.__module__.startswith("torch.optim"):
                yield f"{module}.{name}", cls


def _module(name: str) -> ModuleType:
    """timm.optim without the rest of timm, which needs torchvision."""
    package, _, inner = name.partition(".")
    found = importlib.util.find_spec(package)
    if inner and package not in sys.modules and found is not None:
        bare = ModuleType(package)
        bare.__path__ = list(found.submodule_search_locations or ())
        sys.modules[package] = bare
        models = ModuleType(f"{package}.models")
        models.__dict__["group_parameters"] = None
        sys.modules[models.__name__] = models
    return importlib.import_module(name)
