"""Recipes that make new numbers, and what torch makes of the same tensors: bit for bit the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, dict[str, torch.Tensor]]
"""Parameter → weights, exp_avg, exp_avg_sq, and `param`, its fp32 master, if it has one."""
Expected = Callable[[State, State], State]
"""What comes out, from the state of the first and of the last step."""


def cases(first: int, last: int, name: str) -> dict[str, tuple[dict[str, Any], Expected]]:
    """Recipes for the step `last`, with what they make of it; the scales are of `name` alone."""
    steps = {"steps": [str(first), str(last)], "weights": ["1", "3"]}
    scale = {"params": f"^{name}$", "by": 0.9}
    return {
        "average": ({"average": {**steps}}, lambda a, b: averaged(a, b, moments=False)),
        "average-all": ({"average": {**steps, "moments": "average"}}, averaged),
        "scale": ({"scale": {**scale}}, lambda a, b: scaled(b, name, moments=False)),
        "scale-all": ({"scale": {**scale, "moments": "scale"}}, lambda a, b: scaled(b, name)),
        "graft": ({"graft": {"step": first}}, grafted),
        "graft-some": (
            {"graft": {"step": first, "params": "weight$"}},
            lambda a, b: grafted(a, b, end="weight"),
        ),
        "clip": ({"clip_moments": {"above": 2}}, lambda a, b: clipped(b)),
    }


def averaged(first: State, last: State, moments: bool = True) -> State:
    """Masters (and moments) one to three, summed up in float64; the weights are rounded masters."""
    return rounded({
        name: {
            key: ((first[name][key].double() + 3 * tensor.double()) / 4).to(tensor.dtype)
            if moments or key not in MOMENTS
            else tensor
            for key, tensor in tensors.items()
        }
        for name, tensors in last.items()
    })  # fmt: skip


def scaled(state: State, name: str, moments: bool = True) -> State:
    """One parameter times 0.9; its moments as if its gradients had been."""
    powers = {"weights": 1, "param": 1, "exp_avg": int(moments), "exp_avg_sq": 2 * int(moments)}
    own = {key: tensor * 0.9 ** powers[key] for key, tensor in state[name].items()}
    return rounded({**state, name: own})


def rounded(state: State) -> State:
    """With weights that are the masters in their dtype."""
    return {
        name: {
            **tensors,
            "weights": tensors.get("param", tensors["weights"]).to(tensors["weights"].dtype),
        }
        for name, tensors in state.items()
    }


def grafted(first: State, last: State, end: str = "") -> State:
    """With the moments of the first step, of the parameters whose names end so."""
    return {
        name: {
            key: first[name][key] if key in MOMENTS and name.endswith(end) else tensor
            for key, tensor in tensors.items()
        }
        for name, tensors in last.items()
    }


def clipped(state: State) -> State:
    """exp_avg_sq at twice its median."""
    out: State = {}
    for name, tensors in state.items():
        squares = tensors["exp_avg_sq"]
        limit = squares[squares > 0].median() * 2
        share = (limit.double() / squares.double()).clamp(max=1).sqrt()
        moments = {
            "exp_avg": (tensors["exp_avg"].double() * share).float(),
            "exp_avg_sq": squares.clamp(max=limit),
        }
        out[name] = {**tensors, **moments}
    return out


def same(found: State, wanted: State, before: State) -> None:
    """Equal bit for bit, and something is other than it was."""
    assert found.keys() == wanted.keys()
    for name, tensors in wanted.items():
        assert found[name].keys() == tensors.keys()
        differing = [key for key in tensors if not torch.equal(found[name][key], tensors[key])]
        assert differing == [], name
    assert any(
        not torch.equal(tensor, before[name][key])
        for name, tensors in found.items()
        for key, tensor in tensors.items()
    )
