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
    [
        ("anew: [lr]\n", "`anew` is not a mapping"),
        ("anew: {lr: x}\n", "this loader has its own"),
        ("anew: {lr: {of: [kind], instead: x}}\n", "is neither a text nor has `of` and `instead`"),
        ("anew: {lr: {instead: x}}\n", "is neither a text nor has `of` and `instead`"),
    ],
)
def test_a_page_that_can_not_be_meant_is_refused(tmp_path: Path, more: str, says: str) -> None:
    page = tmp_path / "own.yaml"
    loaded = 'name: own\nfiles:\n  "step_{step}": {loader: deepspeed}\n'
    page.write_text((loaded if "own" in says else PAGE) + more)
    with pytest.raises(UsageError, match=says):
        Run.open(tmp_path, str(page))


def test_a_draft_finds_the_scheduler_in_json(roots: dict[bool, Path], tmp_path: Path) -> None:
    text = draft_page(draft(roots[True]))
    page = tmp_path / "page.yaml"
    page.write_text(text)
    files: dict[str, Any] = plain_yaml.read(page)["files"]
    assert files["step_{step}/state.json"]["schedulers"] == [["sched"]]
    assert "state.json" not in draft_page(draft(roots[False]))


SOME = "anew:\n  {key}:\n    of: {{kind: muon}}\n    instead: start with {{value}}\n"


@settings(max_examples=20, deadline=None)
@given(
    groups=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=3),
    named=st.booleans(),
    key=st.sampled_from(["weight_decay", "eps", "beta2"]),
)
def test_what_is_anew_in_some_groups_is_refused_for_these_alone(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[tuple[bool, bool]],
    named: bool,
    key: str,
) -> None:
    """Each group is Muon's or not, and decays or not; their parameters have names, or none."""
    root = tmp_path_factory.mktemp("some") / "run"
    made = [torch.nn.Parameter(torch.ones(2)) for _ in groups]
    adam = torch.optim.AdamW(
        [
            {"params": [(f"p{i}", each)] if named else [each], "weight_decay": 0.1 if decays else 0}
            for i, (each, (_, decays)) in enumerate(zip(made, groups, strict=True))
        ]
    )
    for group, (muon, _) in zip(adam.param_groups, groups, strict=True):
        group["kind"] = "muon" if muon else "adamw"
    torch.stack([each.sum() for each in made]).sum().backward()
    adam.step()
    (root / "step_1").mkdir(parents=True)
    torch.save(adam.state_dict(), root / "step_1" / "optim.pt")
    page = root.parent / "own.yaml"
    page.write_text(PAGE + SOME.format(key=key))
    run = Run.open(root, str(page))
    meant = [i for i, (_, decays) in enumerate(groups) if decays or key != "weight_decay"]
    muon = [i for i in meant if groups[i][0]]
    places = run.checkpoint(1).locate(KEYS[key])
    assert [place.wins for place in places] == [not each for each, _ in groups]
    refused = _refusal(run, {"set": {key: 0.125}})
    if muon:
        listed = ", ".join(map(str, muon))
        one = "group" if len(muon) == 1 else "groups"
        said = f"does not decide {key} of param {one} {listed} (kind muon)"
        assert refused is not None and said in refused.what
        assert refused.next[0] == "start with 0.125"
    else:
        assert refused is None or not meant
    for i, (muon_, _) in enumerate(groups if named else ()):
        alone = _refusal(run, {"set_params": {"params": f"^p{i}$", key: 0.125}})
        assert (alone is not None) == muon_, alone
        assert alone is None or f"{key} of param group {i} (kind muon)" in alone.what


def _refusal(run: Run, recipe: dict[str, Any]) -> SurgeryError | None:
    try:
        surgery.plan(run, from_data(recipe))
    except SurgeryError as error:
        return error
    return None
