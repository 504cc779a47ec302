"""Runs of LeRobot: an optimizer in a safetensors file, and its param groups in JSON beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckptsurgeon import Plan, Run, look, plan, plan_undo, surgery
from ckptsurgeon.errors import Impossible, SurgeryError, UsageError
from ckptsurgeon.formats.described.draft import draft
from ckptsurgeon.recipe.file import from_data
from tests.support.lerobot_files import END, EVERY, Loop, adamw, run
from tests.support.snapshot import snapshot

STATE = "training_state/optimizer_state.safetensors"
GROUPS = "training_state/optimizer_param_groups.json"
WEIGHTS = "pretrained_model/model.safetensors"


def operate(root: Path, **recipe: Any) -> Plan:
    opened = Run.open(root)
    made = plan(opened, from_data(recipe))
    surgery.apply(opened, made)
    return made


def undo(root: Path) -> None:
    surgery.apply(Run.open(root), plan_undo(Run.open(root)))


def header(file: Path) -> bytes:
    data = file.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    to=st.sampled_from(range(EVERY, END + 1, EVERY)),
    factor=st.sampled_from([0.5, 0.1, 2.0]),
    more=st.fixed_dictionaries(
        {}, optional={"beta2": st.just(0.98), "eps": st.just(1e-6), "weight_decay": st.just(0.0)}
    ),
    reset=st.booleans(),
    scheduled=st.booleans(),
)
def test_the_loop_uses_what_was_promised_and_the_undo_is_exact(
    tmp_path: Path, to: int, factor: float, more: dict[str, float], reset: bool, scheduled: bool
) -> None:
    root = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    used = Loop(root, lr=scheduled).train(END + EVERY)
    before = snapshot(root)
    assert Run.open(root).format.name == "lerobot"
    recipe = {"rollback": {"to": to}, "set": {"lr": f"{factor}x", **more}}
    made = operate(root, **recipe, **({"reset": ["moments"]} if reset else {}))
    assert (root / "checkpoints" / "last").readlink() == Path(f"{to:06}")
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == [
        *(f"{step:06}" for step in range(EVERY, to + 1, EVERY)), "last"
    ]  # fmt: skip
    assert look.verify(Run.open(root)).findings == ()
    after = snapshot(root)
    again = Loop(root, lr=scheduled).resume()
    promise = made.promise
    assert promise is not None and again.step == to and promise.asked
    (group, _) = again.optimizer.param_groups
    assert promise.lr == group["lr"]
    assert promise.betas == tuple(group["betas"]) and promise.eps == group["eps"]
    assert promise.weight_decay == tuple(g["weight_decay"] for g in again.optimizer.param_groups)
    counted = {float(state["step"]) for state in again.optimizer.state.values()}
    assert counted == {0.0 if reset else to} == {promise.adam_step}
    if reset:
        for state in again.optimizer.state.values():
            assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    rates = again.train(to + EVERY)
    assert rates == [pytest.approx([r * factor for r in each]) for each in used[to : to + EVERY]]
    shutil.rmtree(root / "checkpoints" / f"{to + EVERY:06}")
    (root / "checkpoints" / "last").unlink()
    (root / "checkpoints" / "last").symlink_to(f"{to:06}")
    assert snapshot(root) == after
    undo(root)
    assert snapshot(root) == before


def test_only_the_bytes_of_tensors_change(tmp_path: Path) -> None:
    folder = run(tmp_path) / "checkpoints" / "000006"
    before = {file: header(folder / file) for file in (STATE, WEIGHTS)}
    weights = load_file(folder / WEIGHTS)
    operate(tmp_path, reset=["moments"])
    operate(tmp_path, scale={"params": "0.weight", "by": 0.5})
    assert {file: header(folder / file) for file in before} == before
    scaled = load_file(folder / WEIGHTS)
    assert all(
        torch.equal(scaled[name], tensor * (0.5 if name == "0.weight" else 1.0))
        for name, tensor in weights.items()
    )
    opened = Run.open(tmp_path)
    assert plan(opened, from_data({"reset": ["moments"]})).edits == ()
    undo(tmp_path)
    undo(tmp_path)
    assert all(torch.equal(weights[n], t) for n, t in load_file(folder / WEIGHTS).items())


def test_moments_are_grafted_and_weights_averaged(tmp_path: Path) -> None:
    steps = run(tmp_path) / "checkpoints"
    donor, first = load_file(steps / "000002" / STATE), load_file(steps / "000004" / WEIGHTS)
    last = load_file(steps / "000006" / WEIGHTS)
    operate(tmp_path, graft={"step": 2})
    now = load_file(steps / "000006" / STATE)
    assert now.keys() == donor.keys()
    assert all(torch.equal(now[name], tensor) for name, tensor in donor.items())
    operate(tmp_path, average={"steps": ["4", "6"]})
    for name, tensor in load_file(steps / "000006" / WEIGHTS).items():
        assert torch.equal(tensor, ((first[name].double() + last[name]) / 2).float())


def test_an_optimizer_without_a_state_has_settings(tmp_path: Path) -> None:
    """SGD without momentum: the file of its state has no tensor."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.01)

    Loop(tmp_path, sgd).train()
    assert load_file(tmp_path / "checkpoints" / "000006" / STATE) == {}
    made = operate(tmp_path, set={"lr": "0.5x", "weight_decay": 0.1})
    again = Loop(tmp_path, sgd).resume()
    (group,) = again.optimizer.param_groups
    assert made.promise is not None and made.promise.lr == group["lr"]
    assert group["weight_decay"] == 0.1


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_folder_in_place_of_the_link_is_edited_as_its_step_is(tmp_path: Path, make: Any) -> None:
    """As a copy of the run has it that followed the link: a restart loads that."""
    Loop(tmp_path, make).train()
    last = tmp_path / "checkpoints" / "last"
    last.unlink()
    shutil.copytree(last.parent / "000006", last)
    operate(tmp_path, set={"lr": "0.5x"})
    assert (last / GROUPS).read_bytes() == (last.parent / "000006" / GROUPS).read_bytes()
    operate(tmp_path, rollback={"to": 4})
    assert (last / STATE).read_bytes() == (last.parent / "000004" / STATE).read_bytes()
    assert Loop(tmp_path, make).resume().step == 4


@pytest.mark.parametrize("link", [True, False])
def test_a_copy_below_the_run_is_of_the_step_that_it_equals(tmp_path: Path, link: bool) -> None:
    """Of a page without `number`: what a restart loads lies beside the steps, in a folder."""
    folder, page = tmp_path / "run" / "saved", tmp_path / "own.yaml"
    folder.mkdir(parents=True)
    page.write_text(
        'name: own\nfiles: {"saved/step_{step}.pt": {optimizers: [[]]}}\nlast: [saved/last.pt]\n'
    )
    for step in (2, 4):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=step)
        torch.save(optimizer.state_dict(), folder / f"step_{step}.pt")
    last = folder / "last.pt"
    if link:
        last.symlink_to("step_4.pt")
    else:
        shutil.copy(folder / "step_4.pt", last)
    before = snapshot(tmp_path)
    opened = Run.open(tmp_path / "run", str(page))
    assert opened.format.pointed(last) == opened.latest() == 4
    surgery.apply(opened, plan(opened, from_data({"rollback": {"to": 2}})))
    assert last.is_symlink() is link and last.read_bytes() == (folder / "step_2.pt").read_bytes()
    opened = Run.open(tmp_path / "run", str(page))
    assert opened.format.pointed(last) == 2
    surgery.apply(opened, plan_undo(opened))
    assert snapshot(tmp_path) == before


def test_the_loop_counts_on_from_the_iteration_that_was_set(tmp_path: Path) -> None:
    run(tmp_path)
    made = operate(tmp_path, set={"iteration": 100})
    assert made.promise is not None and made.promise.step == 101
    assert Loop(tmp_path).resume().step == 100
    assert Run.open(tmp_path).steps() == [2, 4, 100]
    undo(tmp_path)
    assert Loop(tmp_path).resume().step == 6


def test_a_count_that_no_optimizer_has_is_named_with_its_place(tmp_path: Path) -> None:
    file = run(tmp_path) / "checkpoints" / "000006" / STATE
    tensors = load_file(file)
    tensors["state/1/step"] = torch.tensor(float("nan"))
    save_file(tensors, file)
    with pytest.raises(Impossible, match=r"state\.1\.step is nan"):
        plan(Run.open(tmp_path), from_data({"reset": ["moments"]}))


def test_what_no_bytes_of_the_file_are_is_refused(tmp_path: Path) -> None:
    """Nothing is taken out of such a file: a state that only its optimizer makes stays."""

    def rprop(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Rprop(parameters, lr=1e-3)

    Loop(tmp_path, rprop).train()
    before = snapshot(tmp_path)
    with pytest.raises(SurgeryError) as refused:
        plan(Run.open(tmp_path), from_data({"reset": ["moments"]}))
    assert refused.value.next and snapshot(tmp_path) == before


def test_the_parameters_of_an_optimizer_may_be_named(tmp_path: Path) -> None:
    """As torch saves the names where an optimizer was made of them: a part is reset by a name."""
    root = tmp_path / "run"

    def named(parameters: Any) -> torch.optim.Optimizer:
        return adamw([(f"part.{i}", each) for i, each in enumerate(parameters)])

    Loop(root, named).train()
    operate(root, reset=["moments"], moments={"params": r"part\.1"})
    state = load_file(root / "checkpoints" / "000006" / STATE)
    zeros = {name for name, tensor in state.items() if not tensor.any()}
    assert zeros == {"state/1/exp_avg", "state/1/exp_avg_sq"}
    groups = json.loads((root / "checkpoints" / "000006" / GROUPS).read_text())
    assert groups[1]["param_names"] == ["part.1", "part.2", "part.3"]


def test_states_that_are_named_are_edited_with_their_weights(tmp_path: Path) -> None:
    """As FSDP gathers them: by the names of the parameters, in the groups too."""
    folder = run(tmp_path) / "checkpoints" / "000006"
    names = [*load_file(folder / WEIGHTS)]
    loop = Loop(tmp_path)
    named = [name for name, _ in loop.model.named_parameters()]
    state = {}
    for name, tensor in load_file(folder / STATE).items():
        _, number, key = name.split("/")
        state[f"state/{named[int(number)]}/{key}"] = tensor
    save_file(state, folder / STATE)
    groups = json.loads((folder / GROUPS).read_text())
    for group in groups:
        group["params"] = [named[number] for number in group["params"]]
    (folder / GROUPS).write_text(json.dumps(groups))
    assert sorted(names) == sorted(named)
    weights = load_file(folder / WEIGHTS)
    operate(tmp_path, scale={"params": r"^0\.weight$", "by": 0.5, "moments": "scale"})
    scaled = {"exp_avg": 0.5, "exp_avg_sq": 0.25, "step": 1.0}
    for name, tensor in load_file(folder / STATE).items():
        _, parameter, key = name.split("/")
        factor = scaled[key] if parameter == "0.weight" else 1.0
        assert torch.equal(tensor, state[name] * factor)
    assert torch.equal(load_file(folder / WEIGHTS)["0.weight"], weights["0.weight"] * 0.5)


def test_a_draft_names_the_groups_that_it_found_without_states(tmp_path: Path) -> None:
    (run(tmp_path) / "checkpoints").rename(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"param_groups\.json holds the param groups") as refused:
        draft(tmp_path)
    assert "groups" in str(refused.value.next)
