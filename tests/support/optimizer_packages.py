"""The optimizers of ten more libraries, and how each class is made for a small model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from tests.support.newest_megatron import beside

FOLDER = beside("optimizers")

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
NOT_RUN = {
    "heavyball.PSGDBase": "a base class",
    "heavyball.SAMWrapper": "it wraps another one, which needs methods of heavyball's own",
    "heavyball.SOAPBase": "a base class",
    "heavyball.SplitOpt": "it wraps others, and its groups name them",
    "torch_optimizer.Lookahead": "its state_dict fails under this torch",
    "galore_torch.GaLoreAdamW8bit": "it needs a GPU",
    "apollo_torch.GaLoreAdamW8bit": "it needs a GPU",
    "apollo_torch.QAPOLLOAdamW": "its step fails on a key of its own groups",
}
"""Classes of which no page is made, and why."""


def classes() -> Iterator[tuple[str, type[Any]]]:
    """`module.Class` and the class of all that are there. Those that `make test-formats` installed
    come last on the path."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
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
