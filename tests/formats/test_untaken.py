"""What is asked for is what the next step uses, or it is refused: whatever the param groups are
like, no format says "done" of a value that none of them takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ckptsurgeon import Recipe, Run, operations, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import AdjustsGroups
from ckptsurgeon.operations.section import Changes, Section
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.recipe.file import from_data
from tests.formats.matrix import FORMATS

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]

MULTIPLIERS = ("wd_mult", "pre_wd_mult")
ASKED: Mapping[str, float] = {
    "weight_decay": 0.37, "beta1": 0.81, "beta2": 0.93, "eps": 3e-7, "lr": 3e-5, "momentum": 0.3,
    "clip_grad": 0.2, "loss_scale": 256,
}  # fmt: skip

NOTHING_TO_SET = "OLMo-core, OLMoDDP"
"""Its groups take all of this from the config of each start."""


@dataclass(frozen=True)
class Bend(Section):
    """Groups that no trainer of ours saved: of no weight decay (`none`: nor has the scheduler one),
    or with a multiplier of 0 for it,
    or with several of which the first is 0."""

    key: ClassVar[str] = "bend"
    way: str = ""

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        if self.way == "none":
            places = checkpoint.locate("weight_decay")
            return [
                Change(run.relative(at.file), self.way, at.value, 0.0, at.path) for at in places
            ], []
        keys = ("weight_decay",) if self.way == "decay" else MULTIPLIERS
        places = [place for key in keys for place in checkpoint.settings(key)]
        step = 0.25 if self.way == "multipliers" else 0.0
        return [
            Change(run.relative(at.file), self.way, at.value, i * step, at.path)
            for i, at in enumerate(places)
        ], []


@pytest.mark.parametrize("way", ["", "none", "decay", "multiplier", "multipliers"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_it_is_used_or_refused(
    run_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    way: str,
) -> None:
    line = operations.Operation(__name__, ("Bend",))
    monkeypatch.setattr(operations, "OPERATIONS", (*operations.OPERATIONS, line))
    root = Path(shutil.copytree(run_of(name), tmp_path / "run", symlinks=True))
    if way:
        try:
            bent = surgery.plan(Run.open(root), Recipe(Bend(way)))
        except SurgeryError as error:  # Megatron-LM finds its groups by their multipliers
            assert way == "multiplier" and "by which the trainer tells them apart" in error.what
            return
        surgery.apply(Run.open(root), bent)
    answers = {key: used_or_refused(root, key, value) for key, value in ASKED.items()}
    assert any(answers.values()) or name == NOTHING_TO_SET
    if way == "none":
        run = Run.open(root)
        own = AdjustsGroups.optional(run.checkpoint(run.latest()))
        assert answers["weight_decay"] is (own is not None and own.multiplied())


def used_or_refused(root: Path, key: str, value: float) -> bool:
    """Whether it is used; a refusal says what to do."""
    try:
        plan = surgery.plan(Run.open(root), from_data({"set": {key: value}}))
    except SurgeryError as error:
        assert error.next
        return False
    assert plan.promise is not None and plan.before is not None
    shares = {number for place in multipliers(root) for number in (place, 1.0)} or {1.0}
    wanted = [value * share for share in shares if share]
    after, before = [*uses(plan.promise, key)], [*uses(plan.before, key)]
    if key == "lr":  # a warm-up may begin here, or a decay end: of the peak no promise says a word
        state = Run.open(root).checkpoint(Run.open(root).latest()).after(plan.changes, root).state()
        after += [state.peak_lr or 0.0, (state.schedule or {}).get("max_lr", 0.0)]
    assert any(number == pytest.approx(want) for number in after for want in wanted), (
        key, value, before, after,
    )  # fmt: skip
    return True


def multipliers(root: Path) -> Iterator[float]:
    run = Run.open(root)
    checkpoint = run.checkpoint(run.latest())
    for key in MULTIPLIERS:
        yield from (float(place.value) for place in checkpoint.settings(key))


def uses(promise: Promise, key: str) -> Iterator[float]:
    """Every number that some param group of the next step has for a key."""
    if key in ("beta1", "beta2"):
        pairs = [pair for pair, _ in promise.groups or ((promise.betas, None),)]
        yield from (float(pair[int(key[-1]) - 1]) for pair in pairs if pair)
        return
    whole: Any = dict(promise.settings or ()).get(key) or getattr(promise, key, None)
    if key == "eps" and promise.groups:
        whole = [eps for _, eps in promise.groups]
    yield from (float(n) for n in (whole if isinstance(whole, (list, tuple)) else [whole]) if n)


class Biases:
    """Hugging Face's Trainer on biases alone: its group with a weight decay has no parameter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.model.weight.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [], "weight_decay": 0.1},
                {"params": [self.model.bias], "weight_decay": 0.0},
            ],
            lr=1e-3,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).pow(2).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def save(self, root: Path) -> None:
        self.update()
        folder = root / "checkpoint-1"
        folder.mkdir(parents=True)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.schedule.state_dict(), folder / "scheduler.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))


def test_a_group_without_parameters_takes_no_weight_decay(tmp_path: Path) -> None:
    Biases().save(tmp_path)
    with pytest.raises(SurgeryError, match="every param group has weight decay 0") as refused:
        surgery.plan(Run.open(tmp_path), from_data({"set": {"weight_decay": 0.3}}))
    assert "in the trainer's code" in str(refused.value.next)
    plan: Plan = surgery.plan(Run.open(tmp_path), from_data({"set": {"eps": 1e-6}}))
    assert plan.promise is not None and plan.promise.eps == 1e-6
