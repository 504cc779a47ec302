"""Settings that a trainer makes anew at each start: refused by name, and never promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.formats.described.draft import draft
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report import draft_page

KEYS = {
    "lr": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
}
PAGE = """name: own
files:
  "step_{step}/optim.pt": {optimizers: [[]]}
"""


def save(root: Path, scheduler: bool) -> None:
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.9**step)
    for step in (1, 2):
        model(torch.ones(3, 4)).sum().backward()
        adam.step()
        schedule.step()
        folder = root / f"step_{step}"
        folder.mkdir(parents=True)
        torch.save(adam.state_dict(), folder / "optim.pt")
        state = {"steps": step, "sched": schedule.state_dict() if scheduler else None}
        (folder / "state.json").write_text(json.dumps(state))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    made = {each: tmp_path_factory.mktemp("anew") / "run" for each in (True, False)}
    for scheduler, root in made.items():
        save(root, scheduler)
    return made


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(anew=st.sets(st.sampled_from(sorted(KEYS))), scheduler=st.booleans())
def test_what_is_anew_is_refused_and_not_promised_and_the_rest_is(
    roots: dict[bool, Path], anew: set[str], scheduler: bool
) -> None:
    root = roots[scheduler]
    page = root.parent / "own.yaml"
    text = PAGE + ('  "step_{step}/state.json": {schedulers: [[sched]]}\n' if scheduler else "")
    advice = "".join(f'\n  {key}: "start with {key.upper()}={{value}}"' for key in sorted(anew))
    page.write_text(text + (f"anew:{advice}\n" if anew else ""))
    run = Run.open(root, str(page))
    for key, field in KEYS.items():
        written = key not in anew or (key == "lr" and scheduler)
        try:
            promise = surgery.plan(run, from_data({"set": {key: 0.125}})).promise
        except SurgeryError as error:
            assert not written and f"does not decide {key}" in error.what
            assert error.next[0] == f"start with {key.upper()}=0.125"
            continue
        assert written and promise is not None
        others = {name for name, each in KEYS.items() if each == field}
        assert (getattr(promise, field) is None) == bool(others & anew)
        assert ("lr" in promise.not_known) == ("lr" in anew or not scheduler)


@pytest.mark.parametrize(
    ("more", "says"),
    [("anew: [lr]\n", "`anew` is not a mapping"), ("anew: {lr: x}\n", "this loader has its own")],
)
def test_a_page_that_can_not_be_meant_is_refused(tmp_path: Path, more: str, says: str) -> None:
    page = tmp_path / "own.yaml"
    loaded = 'name: own\nfiles:\n  "step_{step}": {loader: deepspeed}\n'
    page.write_text((PAGE if "[" in more else loaded) + more)
    with pytest.raises(UsageError, match=says):
        Run.open(tmp_path, str(page))


def test_a_draft_finds_the_scheduler_in_json(roots: dict[bool, Path], tmp_path: Path) -> None:
    text = draft_page(draft(roots[True]))
    page = tmp_path / "page.yaml"
    page.write_text(text)
    files: dict[str, Any] = plain_yaml.read(page)["files"]
    assert files["step_{step}/state.json"]["schedulers"] == [["sched"]]
    assert "state.json" not in draft_page(draft(roots[False]))
