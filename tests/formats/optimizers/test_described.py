"""An optimizer that a page describes is reset by it; what is described wrongly is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ckptsurgeon import Run, plan
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.optimizers import pages
from ckptsurgeon.formats.optimizers.table import ENTRIES, Known
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import REPO
from tests.support.optimizer_law import Small, save, trained, update
from tests.support.snapshot import snapshot

OWN = """
import torch

class Signed(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, decay=0.9, caution=False, floor=2):
        super().__init__(params, dict(lr=lr, decay=decay, caution=caution, floor=floor, seen=5))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean_of_signs"] = torch.BEGIN(p)
                state["mean_of_signs"].mul_(group["decay"]).add_(p.grad.sign())
                p.add_(state["mean_of_signs"], alpha=-group["lr"] / group["seen"])
"""
"""An optimizer that no table knows: its state begins with zeros or ones, its counter at 5."""


@pytest.fixture(params=["ones_like", pytest.param("zeros_like", marks=pytest.mark.slow)])
def own(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class `own_signed.Signed`, which can be imported here and by a child."""
    (tmp_path / "own_signed.py").write_text(OWN.replace("BEGIN", request.param))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sys.modules.pop("own_signed", None)
    import own_signed  # type: ignore[import-not-found]

    yield own_signed.Signed, request.param
    sys.modules.pop("own_signed", None)


@pytest.mark.long
def test_a_class_is_looked_for_in_no_module_of_the_trainer(tmp_path: Path) -> None:
    """The script lies among them, and one is called `optimizer`, too."""
    (tmp_path / "optimizer.py").write_text("raise SystemExit('the module of the user')")
    words = [sys.executable, REPO / "train/describe_optimizer.py", "save", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [*words, "optimizer.Own", "{}"], capture_output=True, text=True, env=environment
    )
    assert ran.stderr.strip() == "the module of the user"


@pytest.mark.long
def test_a_check_writes_a_page_by_which_the_optimizer_is_reset(own: Any, tmp_path: Path) -> None:
    cls, begins = own
    done = CliRunner().invoke(
        app, ["check-optimizer", "own_signed.Signed", "-o", str(tmp_path / "page.yaml")]
    )
    assert done.exit_code == 0, done.output
    (entry,) = pages.read(tmp_path / "page.yaml")
    start = "zero" if begins == "zeros_like" else "anew"
    assert dict(entry.state) == {"mean_of_signs": start}
    assert dict(entry.counters) == {"seen": 5.0}
    assert entry.group == {"decay", "caution", "floor"}

    net, optimizer = trained(Small, lambda model: cls(model.parameters()))
    root = tmp_path / "run"
    file = save(root, net, optimizer)
    before = snapshot(root)
    words = ["reset", "moments", "-y", "-C", str(root)]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1 and "mean_of_signs" in refused.stderr
    assert "check-optimizer" in refused.stderr and snapshot(root) == before
    (root / "ckptsurgeon.yaml").write_text("optimizer: ../page.yaml\n")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output

    fresh = Small()
    fresh.load_state_dict(net.state_dict())
    new = cls(fresh.parameters())
    optimizer.load_state_dict(torch.load(file, weights_only=False))
    update(net, optimizer, 50)
    update(fresh, new, 50)
    for mine, its in zip(net.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_an_option_names_the_page(own: Any, tmp_path: Path) -> None:
    cls, _ = own
    page = tmp_path / "page.yaml"
    entry = "{state: {mean_of_signs: anew}, settings: [decay, caution, floor], counters: {seen: 5}}"
    page.write_text(f"optimizers: {{Signed: {entry}}}")
    net, optimizer = trained(Small, lambda model: cls(model.parameters()))
    save(tmp_path / "run", net, optimizer)
    words = ["reset", "moments", "-n", "-C", str(tmp_path / "run"), "--optimizer", str(page)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and f"--optimizer {page}" in shown.stdout, shown.output
    made = plan(Run.open(tmp_path / "run", optimizer=page), from_data({"reset": ["moments"]}))
    assert made.promise is not None and made.promise.optimizer == "Signed"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("optimizers: {}", "describes no optimizer"),
        ("optimizer: {}", "unknown key `optimizer`"),
        ("optimizers: {A: {state: {m: one}}}", "`optimizers.A.state.m` is 'one'"),
        ("optimizers: {A: {states: {m: zero}}}", "unknown key `optimizers.A.states`"),
        ("optimizers: {A: {settings: eps}}", "`optimizers.A.settings` is 'eps'"),
        ("optimizers: {A: {beside: {own: zero}}}", "`optimizers.A.beside.own` is 'zero'"),
        ("optimizers: [A]", "`optimizers` must be a mapping"),
    ],
)
def test_a_page_that_says_something_else_is_refused(tmp_path: Path, text: str, what: str) -> None:
    page = tmp_path / "page.yaml"
    page.write_text(text)
    with pytest.raises(UsageError) as caught:
        pages.read(page)
    assert what in caught.value.what and caught.value.next
    with pytest.raises(UsageError, match="No such file"):
        pages.read(tmp_path / "none.yaml")


# --- what is kept otherwise ----------------------------------------------------------------------

VIEWS = """
import torch

class Views(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr))
        self.inner = {}
        self.register_state_dict_post_hook(lambda own, saved: saved.update(own={"i": own.inner}))
        self.register_load_state_dict_pre_hook(Views.loaded)

    def loaded(self, saved):
        self.inner = dict(saved.get("own", {}).get("i", {}))

    @torch.no_grad()
    def step(self, closure=None):
        seen = self.inner["seen"] = self.inner.get("seen", 0) + 1
        for group in self.param_groups:
            group["begun"] = True
            for p in group["params"]:
                for i, view in enumerate((p, p.mean())):
                    state = self.state[p].setdefault(i, {"known": {0}})
                    if "mean" not in state:
                        state["mean"] = torch.ones_like(view)
                mean = self.state[p][0]["mean"].mul_(0.9).add_(p.grad)
                p.add_(mean, alpha=-group["lr"] / seen)
"""
"""What it keeps lies under the number of a view, and it counts beside states and groups."""


@pytest.mark.long
def test_what_is_nested_by_view_and_what_is_beside_the_states_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_views.py").write_text(VIEWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    import own_views  # type: ignore[import-not-found]

    page = tmp_path / "page.yaml"
    done = CliRunner().invoke(app, ["check-optimizer", "own_views.Views", "-o", str(page)])
    assert done.exit_code == 0, done.output
    (entry,) = pages.read(page)
    assert dict(entry.state) == {"known": "anew", "mean": "anew"}
    assert dict(entry.beside) == {"own": "absent"} and dict(entry.counters) == {"begun": "absent"}

    net, optimizer = trained(Small, lambda model: own_views.Views(model.parameters()))
    file = save(tmp_path / "run", net, optimizer)
    words = ["reset", "moments", "-y", "-C", str(tmp_path / "run")]
    before = snapshot(tmp_path / "run")
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1 and "own (beside the states)" in refused.stderr
    assert snapshot(tmp_path / "run") == before
    done = CliRunner().invoke(app, [*words, "--optimizer", str(page)])
    assert done.exit_code == 0, done.output
    line = "state of Views ~ values → absent 5 places in 1 shard"  # one for all parameters
    assert line in " ".join(done.output.split())
    saved = torch.load(file, weights_only=False)
    assert saved["state"] == {} and "own" not in saved and "begun" not in saved["param_groups"][0]

    optimizer.state[next(net.parameters())][1]["low bits"] = torch.ones(1)
    save(tmp_path / "other", net, optimizer)
    words = ["reset", "moments", "-y", "-C", str(tmp_path / "other"), "--optimizer", str(page)]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1 and "low bits (of 1)" in refused.stderr


# --- settings, by two steps ----------------------------------------------------------------------


class Cautious(torch.optim.AdamW):
    """AdamW as other libraries have it: with settings of their own in its groups."""

    def __init__(self, params: Any, **own: Any) -> None:
        super().__init__(params, lr=1e-2)
        for group in self.param_groups:
            group |= own


def saved(root: Path, steps: tuple[int, ...], **own: Any) -> Run:
    """A run with these steps; what begins with `moving` counts up."""
    net, optimizer = trained(Small, lambda model: Cautious(model.parameters(), **own), 1)
    for step in range(1, max(steps) + 1):
        for group in optimizer.param_groups:
            group |= {key: value + step for key, value in own.items() if key[:6] == "moving"}
        update(net, optimizer, step)
        if step in steps:
            save(root, net, optimizer, step)
    return Run.open(root)


RESET = from_data({"reset": ["moments"]})


def test_a_setting_that_no_table_knows_stays(tmp_path: Path) -> None:
    run = saved(tmp_path, (2,), caution=False, kind="sum", scope=None)
    made = plan(run, RESET)
    assert {change.field for change in made.changes} == {"exp_avg", "exp_avg_sq", "adam step"}


def test_a_number_is_a_setting_where_another_step_has_the_same(tmp_path: Path) -> None:
    alone = saved(tmp_path / "alone", (2,), clip_above=3.0)
    with pytest.raises(SurgeryError, match=r"clip_above \(in param groups\)"):
        plan(alone, RESET)
    both = saved(tmp_path / "both", (2, 4), clip_above=3.0)
    fields = {change.field for change in plan(both, RESET).changes}
    assert fields == {"exp_avg", "exp_avg_sq", "adam step"}


def test_a_number_that_moves_is_a_state_and_refused_by_name(tmp_path: Path) -> None:
    run = saved(tmp_path, (2, 4), moving_sum=3.0, caution=True)
    before = snapshot(tmp_path)
    with pytest.raises(SurgeryError, match="moving_sum"):
        plan(run, RESET)
    assert snapshot(tmp_path) == before


# --- the pages that are shipped ------------------------------------------------------------------


def test_the_shipped_pages_agree_with_the_table() -> None:
    """The table is asked first: whatever has just the keys of a page begins as the page says."""
    assert Known().page == ()
    for described in pages.shipped():
        assert described.name and described.source
        for entry in ENTRIES:
            if set(entry.state) - {"step"} == set(described.state) - {"step"} and (
                entry.group | set(entry.counters) == described.group | set(described.counters)
            ):
                starts = {k: v for k, v in entry.state.items() if k != "step"}
                mine = {k: v for k, v in described.state.items() if k != "step"}
                assert starts == mine, (described.name, described.source, entry.name)
