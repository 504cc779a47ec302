"""`set` knows what the param groups of an optimizer hold, and each group is promised its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data, to_data
from tests.support.optimizer_law import Small, save, trained, update
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


def saved(root: Path, cls: Any, **arguments: Any) -> Path:
    return save(root, *trained(Small, lambda model: cls(model.parameters(), **arguments)))


def groups(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torch.load(file, weights_only=False)["param_groups"]
    return found


@pytest.mark.parametrize(
    ("cls", "arguments", "wanted"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5, "dampening": 0.1}),
        ("RMSprop", {"lr": 0.1}, {"alpha": 0.9, "momentum": 0.2}),
        ("Adadelta", {"lr": 0.1}, {"rho": 0.8}),
        ("NAdam", {"lr": 0.1}, {"momentum_decay": 1e-3}),
        ("Adafactor", {"lr": 0.1}, {"beta2_decay": -0.5, "d": 2.0}),
    ],
)
def test_what_the_groups_hold_is_set(
    tmp_path: Path, cls: str, arguments: dict[str, Any], wanted: dict[str, float]
) -> None:
    file = saved(tmp_path, getattr(torch.optim, cls), **arguments)
    before = snapshot(tmp_path)
    plan = operate(tmp_path, {"set": dict(wanted)})
    assert plan.promise is not None and plan.promise.optimizer is not None
    assert dict(plan.promise.settings or ()).items() >= {k: (v,) for k, v in wanted.items()}.items()
    assert {key: groups(file)[0][key] for key in wanted} == wanted
    take_back(tmp_path, before)


def test_one_of_several_numbers_is_set_by_its_place(tmp_path: Path) -> None:
    """Adafactor has two eps, the first of them None; AdEMAMix, Adan and others have three betas."""
    file = saved(tmp_path / "two", torch.optim.Adafactor, lr=0.1, eps=(1e-30, 1e-3))
    assert look.verify(Run.open(tmp_path / "two"), level=4).findings == ()
    plan = operate(tmp_path / "two", {"set": {"eps2": 1e-2}})
    assert plan.promise is not None and plan.promise.eps == (1e-30, 1e-2)
    assert groups(file)[0]["eps"] == (1e-30, 1e-2)
    with pytest.raises(SurgeryError, match="two numbers for eps"):
        surgery.plan(Run.open(tmp_path / "two"), from_data({"set": {"eps": 1e-8}}))
    model, optimizer = trained(Small, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999, 0.9999)
    file = save(tmp_path / "three", model, optimizer)
    plan = operate(tmp_path / "three", {"set": {"beta3": 0.99, "beta1": 0.8}})
    assert plan.promise is not None and plan.promise.betas == (0.8, 0.999, 0.99)
    assert groups(file)[0]["betas"] == (0.8, 0.999, 0.99)


def test_a_healthy_optimizer_is_never_called_damaged(tmp_path: Path) -> None:
    """Adafactor computes its own lr where it is None: nothing sets it, and all else goes on."""
    model, optimizer = trained(Small, lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1))
    for step in (7, 8):
        optimizer.param_groups[0]["lr"] = None
        save(tmp_path, model, optimizer, step)
        optimizer.param_groups[0]["lr"] = 0.1
        update(model, optimizer, step)
    run = Run.open(tmp_path)
    assert look.verify(run, level=4).findings == ()
    promise = run.checkpoint(8).state().promise
    assert promise.lr is None and promise.eps == (None, 1e-3)
    with pytest.raises(SurgeryError, match="lr is None"):
        surgery.plan(run, from_data({"set": {"lr": 1e-3}}))
    operate(tmp_path, {"rollback": {"to": 7}})
    assert Run.open(tmp_path).steps() == [7]


def test_each_group_is_promised_its_own(tmp_path: Path) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.AdamW(
            [{"params": [first], "eps": 1e-6}, {"params": rest, "betas": (0.7, 0.7)}],
            lr=0.1,
            betas=(0.9, 0.95),
        )

    save(tmp_path, *trained(Small, make))
    found = Run.open(tmp_path).checkpoint(7).state().promise
    assert found.betas == (0.9, 0.95)
    assert found.groups == (((0.9, 0.95), 1e-6), ((0.7, 0.7), 1e-8))
    plan = operate(tmp_path, {"set": {"beta1": 0.8}})
    assert plan.promise is not None
    assert plan.promise.groups == (((0.8, 0.95), 1e-6), ((0.8, 0.7), 1e-8))
    operate(tmp_path, {"set": {"beta2": 0.9, "eps": 1e-7}})
    assert Run.open(tmp_path).checkpoint(7).state().promise.groups is None


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, torch.optim.SGD, lr=0.1, momentum=0.9)
    run = Run.open(tmp_path)
    with pytest.raises(SurgeryError, match="the param groups of SGD hold no alpha") as refused:
        surgery.plan(run, from_data({"set": {"alpha": 0.9}}))
    assert "dampening, momentum" in str(refused.value.next)
    with pytest.raises(SurgeryError, match="the param groups of SGD hold no beta") as refused:
        surgery.plan(run, from_data({"set": {"beta": 0.9}}))
    assert refused.value.next[0] == "did you mean `set.beta1` or `set.beta2`?"
    with pytest.raises(SurgeryError, match="nesterov is False here"):
        surgery.plan(run, from_data({"set": {"nesterov": 1}}))
    with pytest.raises(UsageError, match=r"unknown key `set\.momentun`") as unknown:
        from_data({"set": {"momentun": 0.9}})
    assert "set.momentum" in str(unknown.value.next)
    with pytest.raises(UsageError, match=r"`set\.momentum` is 1\.5"):
        from_data({"set": {"momentum": 1.5}})


def test_a_share_of_the_present_value_is_kept_as_a_number(tmp_path: Path) -> None:
    file = saved(tmp_path, torch.optim.SGD, lr=0.1, momentum=0.8)
    recipe = from_data({"set": {"momentum": "0.5x"}})
    assert to_data(recipe) == {"set": {"momentum": "0.5x"}}
    plan = surgery.plan(Run.open(tmp_path), recipe)
    assert plan.recipe["set"] == {"momentum": 0.4}
    surgery.apply(Run.open(tmp_path), plan)
    assert groups(file)[0]["momentum"] == 0.4


def test_a_key_that_no_optimizer_has_is_refused_with_its_number(tmp_path: Path) -> None:
    """What was passed over in silence before: a state of its own beside Adam's."""
    model, optimizer = trained(Small, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1))
    for state in optimizer.state.values():
        state["curvature"] = torch.ones(3)
    save(tmp_path / "state", model, optimizer)
    with pytest.raises(
        SurgeryError, match=r"optimizer\.pt: no known optimizer keeps curvature \(of 5\)"
    ):
        surgery.plan(Run.open(tmp_path / "state"), from_data({"reset": ["moments"]}))
    model, optimizer = trained(Small, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1))
    optimizer.param_groups[0]["tempo"] = 3.0
    optimizer.param_groups[0]["title"] = "a text is a label"
    save(tmp_path / "group", model, optimizer)
    with pytest.raises(SurgeryError, match=r"keeps tempo \(in param groups\)"):
        surgery.plan(Run.open(tmp_path / "group"), from_data({"reset": ["moments"]}))
    update(model, optimizer, 1)
