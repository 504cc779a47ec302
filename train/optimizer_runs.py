"""Optimizers of any library, built and stepped on a tiny model, and two of their runs compared.

Only `describe_optimizer` uses it, by a Python that has torch and that library, so it needs torch
alone, and nothing of the trainer.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

SECOND = 9
"""The later of the two steps that are saved."""
UPDATES = 6
"""How many updates are compared: some optimizers use a buffer later than others."""
TOLERANCE = 1e-6
"""Of the largest weight, from the second update on; the first one is the same bit for bit."""
NEVER = {"maximize", "differentiable", "capturable", "fused", "foreach", "verbose", "compile"}
"""Switches of how a step is computed, or of its direction."""
LR = 1e-2

Make = Callable[[torch.nn.Module], Any]


def model() -> torch.nn.Module:
    """Matrices, an embedding and vectors."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(10, 8), torch.nn.Linear(8, 12), torch.nn.LayerNorm(12)
    )


def load(name: str) -> Any:
    """The class `module.Class`."""
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(module), cls)


def maker(cls: Any, given: Mapping[str, Any]) -> Make:
    """What builds one for the parameters of a model, with an lr and a momentum where it has them
    and the arguments do not say. What the class does not take goes to the group of the matrices."""
    accepts = inspect.signature(cls).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in accepts.values())
    arguments = {key: value for key, value in given.items() if takes_any or key in accepts}
    of_group = {key: value for key, value in given.items() if key not in arguments}
    if "lr" in accepts and not isinstance(accepts["lr"].default, (int, float)):
        arguments.setdefault("lr", LR)
    if "momentum" in accepts and accepts["momentum"].default == 0:
        arguments.setdefault("momentum", 0.9)

    without = {key: value for key, value in arguments.items() if key != "lr"}

    def make(net: torch.nn.Module) -> Any:
        params: Any = list(net.parameters())
        if of_group:
            matrices = [each for each in params if each.ndim == 2]
            others = [each for each in params if each.ndim != 2]
            params = [{"params": matrices, **of_group}, {"params": others}]
        if "optimizer" in next(iter(accepts)):  # it works on another one
            params = torch.optim.AdamW(params, lr=LR)
        try:
            optimizer = cls(params, **arguments)
        except ValueError:  # it computes its rate itself
            optimizer = cls(params, **(without if "lr" not in given else arguments))
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        return optimizer

    return make


def variants(cls: Any, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments, and these with each switch of the class turned, as far as it steps then."""
    out = [dict(given)]
    for name, parameter in inspect.signature(cls).parameters.items():
        if isinstance(parameter.default, bool) and name not in {*NEVER, *given}:
            out.append({**given, name: not parameter.default})
    return [out[0], *(each for each in out[1:] if _steps(cls, each))]


def _steps(cls: Any, arguments: Mapping[str, Any]) -> bool:
    try:
        trained(maker(cls, arguments), SECOND)
    except Exception:  # any, of a library: this way it can't be used here
        return False
    return True


def update(net: torch.nn.Module, optimizer: Any, seed: int) -> None:
    """One step with gradients that depend on `seed` alone, and on the weights where it asks for
    second derivatives. Half of each is the same of every seed: what adapts itself then moves."""
    same, own = (torch.Generator().manual_seed(number) for number in (-1, seed))
    gradients = [
        (torch.randn(p.shape, generator=same) + torch.randn(p.shape, generator=own)) * 0.1
        for p in net.parameters()
    ]
    torch.manual_seed(1000 + seed)
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before = [p.detach().clone() for p in net.parameters()]

    def closure() -> torch.Tensor:
        return torch.tensor(0.5 + seed * 0.01)

    try:
        optimizer.step()
    except RuntimeError as error:
        if "grad" not in str(error):
            raise
        with torch.no_grad():
            for parameter, old in zip(net.parameters(), before, strict=True):
                parameter.copy_(old)
        optimizer.zero_grad()
        pairs = zip(net.parameters(), gradients, strict=True)
        terms = [(p * g).sum() + p.pow(3).sum() * 0.05 for p, g in pairs]
        loss: Any = torch.stack(terms).sum()
        loss.backward(create_graph=True)
        optimizer.step()
    except (TypeError, AttributeError) as error:
        if "closure" not in str(error) and "NoneType" not in str(error):
            raise
        optimizer.step(closure)


def trained(make: Make, updates: int) -> tuple[Any, Any]:
    """A model and its optimizer after some updates."""
    net = model()
    optimizer = make(net)
    for seed in range(updates):
        update(net, optimizer, seed)
    return net, optimizer


def following(weights: Mapping[str, Any], make: Make, state: Any) -> list[list[torch.Tensor]]:
    """The weights after each of the next updates, with a state that is loaded, or a new one."""
    net = model()
    net.load_state_dict(weights)
    optimizer = make(net)
    net.load_state_dict(weights)  # some optimizers write the weights when they begin
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    out = []
    for seed in range(100, 100 + UPDATES):
        update(net, optimizer, seed)
        out.append([p.detach().clone() for p in net.parameters()])
    return out


def begun(weights: Mapping[str, Any], make: Make) -> Any:
    """What a new optimizer on these weights saves after its first update."""
    net = model()
    net.load_state_dict(weights)
    optimizer = make(net)
    update(net, optimizer, 0)
    return optimizer.state_dict()


def differ(left: Sequence[Any], right: Sequence[Any]) -> str:
    """How two runs differ; empty where the first updates are the same, and the others nearly."""
    for number, (a, b) in enumerate(zip(left, right, strict=True), 1):
        for mine, its in zip(a, b, strict=True):
            apart = float((mine - its).abs().max() / its.abs().max())
            if apart > TOLERANCE or (number == 1 and not torch.equal(mine, its)) or apart != apart:
                return f"update {number} differs by {apart:.1e} of the largest weight"
    return ""
