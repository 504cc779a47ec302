"""`set --params` changes the param groups whose parameters match, and no other."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from tests.support.dcp_trainers import torchtitan
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


class Trainer:
    """A trainer of two param groups with names and a LambdaLR, as Hugging Face saves it."""

    def __init__(self, names: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        first, *rest = self.model.named_parameters()
        groups: Any = [
            {"params": [first], "weight_decay": 0.0, "lr": 1e-3},
            {"params": rest, "weight_decay": 0.1, "lr": 1e-2},
        ]
        if not names:
            groups = [{**g, "params": [p for _, p in g["params"]]} for g in groups]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(8)).pow(2).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def save(self, root: Path, step: int) -> None:
        folder = root / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.schedule.state_dict(), folder / "scheduler.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))

    def load(self, root: Path, step: int) -> None:
        folder = root / f"checkpoint-{step}"
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
        self.schedule.load_state_dict(torch.load(folder / "scheduler.pt"))


def test_a_group_gets_a_rate_and_a_decay_of_its_own(tmp_path: Path) -> None:
    trainer = Trainer()
    for _ in range(3):
        trainer.update()
    trainer.save(tmp_path, 3)
    before = snapshot(tmp_path)
    wanted = {"params": "^0", "lr": 4e-3, "weight_decay": 0.02, "beta2": 0.99}
    plan = operate(tmp_path, {"set_params": wanted})
    assert plan.promise is not None and plan.promise.lr == pytest.approx(1e-3)
    assert plan.promise.weight_decay == (0.02, 0.1)
    twin = Trainer()
    twin.load(tmp_path, 3)
    rates = []
    for _ in range(3):
        rates.append([group["lr"] for group in twin.optimizer.param_groups])
        twin.update()
    assert rates == [pytest.approx([4e-3 / n, 1e-2 / n]) for n in (4, 5, 6)]
    assert [group["betas"] for group in twin.optimizer.param_groups] == [(0.9, 0.99), (0.9, 0.95)]
    take_back(tmp_path, before)


def test_a_group_is_changed_as_a_whole(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.update()
    trainer.save(tmp_path, 1)

    def plan(**wanted: Any) -> Any:
        return surgery.plan(Run.open(tmp_path), from_data({"set_params": wanted}))

    with pytest.raises(SurgeryError, match=r"1 of the 2 parameters of a param group match"):
        plan(params=r"1\.bias", weight_decay=0.0)
    with pytest.raises(UsageError, match="no parameter matches 'attention'"):
        plan(params="attention", weight_decay=0.0)
    with pytest.raises(SurgeryError, match="no param group holds momentum"):
        plan(params="^1", momentum=0.5)
    with pytest.raises(UsageError, match="both `set` and `set_params` set beta2"):
        from_data({"set": {"beta1": 0.8}, "set_params": {"params": "^1", "beta2": 0.9}})
    with pytest.raises(UsageError, match="sets nothing"):
        from_data({"set_params": {"params": "^1"}})


def test_without_names_it_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(names=False)
    trainer.update()
    trainer.save(tmp_path, 1)
    recipe = from_data({"set_params": {"params": "^1", "weight_decay": 0.2}})
    with pytest.raises(SurgeryError, match="does not say which parameters its param groups hold"):
        surgery.plan(Run.open(tmp_path), recipe)


def test_each_parameter_of_torchtitan_has_settings_of_its_own(tmp_path: Path) -> None:
    root = torchtitan(tmp_path)
    step = Run.open(root).latest()
    before = snapshot(root)
    operate(root, {"set_params": {"params": "bias$", "weight_decay": 0.05}})
    assert step is not None
    places = Run.open(root).checkpoint(step).locate("weight_decay")
    values = {str(place.path[0]).split("param_groups.")[1]: place.value for place in places}
    assert values == {
        "0.weight.weight_decay": 0.1, "0.bias.weight_decay": 0.05,
        "1.weight.weight_decay": 0.1, "1.bias.weight_decay": 0.05,
    }  # fmt: skip
    take_back(root, before)


def test_the_groups_of_zero_are_known_by_the_shapes_beside_them(tmp_path: Path) -> None:
    from tests.support import deepspeed_engine

    with deepspeed_engine.process_group():
        deepspeed_engine.make(tmp_path, deepspeed_engine.Options(stage=1, scheduler="LambdaLR"), 4)
    checkpoint = Run.open(tmp_path).checkpoint(4)
    groups = {names: place.value for names, place in checkpoint.of_parameters("weight_decay")}
    assert len(groups) == 2
    (decays,) = (names for names, value in groups.items() if value)
    pattern = "^(" + "|".join(decays).replace(".", r"\.") + ")$"
    operate(tmp_path, {"set_params": {"params": pattern, "weight_decay": 0.3, "lr": 5e-4}})
    after = Run.open(tmp_path).checkpoint(4)
    changed = {names: place.value for names, place in after.of_parameters("weight_decay")}
    assert changed == {**copy.copy(groups), decays: 0.3}


def test_a_group_with_a_beta_of_its_own_keeps_it_and_is_named(tmp_path: Path) -> None:
    """As nanochat's groups of Muon hold `beta2` beside AdamW's `betas`."""
    trainer = Trainer()
    trainer.update()
    own = trainer.optimizer.param_groups[0]
    del own["betas"]
    own["beta2"] = 0.9
    trainer.save(tmp_path, 1)
    plan = operate(tmp_path, {"set": {"beta2": 0.75}})
    stays = "beta2 of 1 param group stays 0.9: it is a number of its own there, none of betas"
    assert [note for note in plan.warnings if note.startswith("beta2")] == [stays]
    groups = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt")["param_groups"]
    assert (groups[0]["beta2"], groups[1]["betas"]) == (0.9, (0.9, 0.75))
