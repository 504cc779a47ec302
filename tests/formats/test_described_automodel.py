"""NeMo Automodel: steps that pointers name as text or as links, and weights in both of their forms.

Torch's own functions write what the cited sources write, and load what was edited; what the library
itself makes of it, `test_automodel.py` asks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    set_optimizer_state_dict,
)

from ckptsurgeon import Run, look, report, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.diff.surgery import of_receipt
from ckptsurgeon.plans.edits import Aside, Relink
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.export import export
from ckptsurgeon.surgery.fork import fork
from tests.formats.conftest import Make
from tests.support.described_runs import (
    FLAT,
    automodel,
    automodel_state,
    composer_sharded,
    stepped,
)
from tests.support.new_numbers import State, clipped, grafted, same
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.distributed")
GRAFT: dict[str, Any] = {"graft": {"step": 4}}
CLIP: dict[str, Any] = {"clip_moments": {"above": 2}}


def test_an_automodel_run(made: Make) -> None:
    root = made(automodel)
    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("automodel", [2, 4, 6], 6)
    plan = operate(root, {"set": {"beta2": 0.97, "eps": 1e-6}, "reset": ["moments"]})
    assert plan.promise is not None and plan.promise.betas == (0.9, 0.97)
    state = automodel_state(6)
    dcp.load(state, checkpoint_id=root / "epoch_0_step_6" / "optim", no_dist=True)
    model, adam, _ = stepped(6)
    set_optimizer_state_dict(model, adam, state["optim"], options=FLAT)
    assert adam.param_groups[0]["eps"] == 1e-6 and adam.param_groups[0]["betas"] == (0.9, 0.97)
    assert all(not s["exp_avg"].any() for s in adam.state.values())
    take_back(root, before)
    for values, words in (
        ({"lr": 5e-4}, "no scheduler of torch saves such keys"),
        ({"weight_decay": 0.3}, "from start_wd and end_wd"),
    ):
        with pytest.raises(SurgeryError, match=words):
            surgery.plan(Run.open(root), from_data({"set": values}))


@pytest.mark.parametrize(
    "maker, link, folder",
    [
        (composer_sharded, "latest-rank0.pt", "ep0-ba{}"),
        (automodel, "LATEST", "epoch_0_step_{}"),
    ],
)
def test_a_link_to_a_folder_leads_to_the_step(
    made: Make, tmp_path: Path, maker: Callable[[Path], Path], link: str, folder: str
) -> None:
    root = made(maker)
    before = snapshot(root)
    plan = operate(root, {"rollback": {"to": 4}, "set": {"eps": 1e-6}})
    assert (root / link).readlink() == Path(folder.format(4))
    assert (Run.open(root).steps(), Run.open(root).latest()) == ([2, 4], 4)
    told = report.plan(plan, "run", report.Style())
    assert f"{folder.format(6)} → {folder.format(4)}" in told and f"the link {link}" in told
    (change,) = (c for c in report.plan_json(plan, "x")["changes"] if c["kind"] == "relink")
    assert (change["file"], change["new"]) == (link, folder.format(4))
    assert (
        Relink(link, "latest", folder.format(6), folder.format(4))
        in of_receipt(Run.open(root), plan.id).changes
    )
    fork(Run.open(root), 4, tmp_path / "branch", from_data({}), "copy")
    branch = tmp_path / "branch"
    assert ((branch / link).readlink(), Run.open(branch).latest()) == (Path(folder.format(4)), 4)
    take_back(root, before)


def test_a_link_goes_back_where_the_trainer_went_on(made: Make) -> None:
    """Undo of an edit of step 6, after the trainer saved step 8 and set its link to it."""
    root = made(composer_sharded)
    before = snapshot(root)
    operate(root, {"set": {"eps": 1e-6}})
    shutil.copytree(root / "ep0-ba6", root / "ep0-ba8")
    (root / "latest-rank0.pt").unlink()
    (root / "latest-rank0.pt").symlink_to("ep0-ba8")
    take_back(root, before)


def test_a_link_that_leads_nowhere_is_set(made: Make) -> None:
    root = made(automodel)
    (root / "LATEST").unlink()
    (root / "LATEST").symlink_to("epoch_0_step_8")
    before = snapshot(root)
    operate(root, {"rollback": {"to": 4}})
    assert (root / "LATEST").readlink() == Path("epoch_0_step_4")
    take_back(root, before)


def test_a_link_that_leaves_the_run_is_refused_by_name(made: Make, tmp_path: Path) -> None:
    root = made(composer_sharded)
    shutil.copytree(root / "ep0-ba6", tmp_path / "elsewhere")
    (root / "latest-rank0.pt").unlink()
    (root / "latest-rank0.pt").symlink_to(tmp_path / "elsewhere")
    before = snapshot(root)
    with pytest.raises(
        SurgeryError, match=r"latest-rank0\.pt is a link to .*, outside the run"
    ) as no:
        surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}, "set": {"eps": 1e-6}}))
    assert snapshot(root) == before
    command = no.value.next[0]
    subprocess.run(command.split("    ")[0], shell=True, check=True, cwd=root)
    assert Run.open(root).latest() == 4


def test_a_text_in_place_of_a_link(made: Make) -> None:
    """As Automodel writes it where a link can't be made."""
    root = made(automodel)
    (root / "LATEST").unlink()
    (root / "LATEST.txt").write_text("epoch_0_step_6")
    before = snapshot(root)
    assert Run.open(root).latest() == 6
    operate(root, {"rollback": {"to": 4}})
    assert (root / "LATEST.txt").read_text() == "epoch_0_step_4"
    assert (Run.open(root).steps(), Run.open(root).latest()) == ([2, 4], 4)
    take_back(root, before)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.long
def test_a_step_that_automodel_marks_as_unfinished_is_no_target(made: Make, text: bool) -> None:
    """By a link and by the text in its place: its pickers pass over such a step, whatever leads
    there (`test_clean_ups.py` asks them)."""
    root = made(automodel)
    if text:
        (root / "LATEST").unlink()
        (root / "LATEST.txt").write_text("epoch_0_step_6")
    mark = root / "epoch_0_step_6" / ".incomplete"
    mark.touch()
    before = snapshot(root)
    run = Run.open(root)
    assert [*run.conditions.of_each(run.steps()).values()] == ["complete", "complete", "incomplete"]
    for recipe in ({"set": {"eps": 1e-6}}, {"rollback": {"to": 6}}, {"repair_latest": {"to": 6}}):
        with pytest.raises(SurgeryError, match=r"step_6/\.incomplete marks it") as refused:
            surgery.plan(Run.open(root), from_data(recipe))
        assert refused.value.next[0].startswith("ckptsurgeon rollback --to 4 ")
    (finding,) = look.verify(Run.open(root)).findings
    assert "epoch_0_step_6/.incomplete marks it as unfinished" in finding
    assert snapshot(root) == before
    plan = operate(root, {"rollback": {"to": 4}, "set": {"eps": 1e-6}})
    assert [each.file for each in plan.changes if isinstance(each, Aside)] == ["epoch_0_step_6"]
    assert (Run.open(root).steps(), Run.open(root).latest()) == ([2, 4], 4)
    take_back(root, before)
    operate(root, {"repair_latest": {}})
    assert Run.open(root).latest() == 4 and mark.exists()


FORMS = pytest.mark.parametrize("form", ["torch_save", "safetensors"])


def weights_of(root: Path, step: int) -> dict[str, torch.Tensor]:
    """What a load takes: of both forms in one folder safetensors."""
    folder = root / f"epoch_0_step_{step}" / "model"
    weights = {**stepped(0)[0].state_dict()}
    safe = any(folder.glob("*.safetensors"))
    reader = HuggingFaceStorageReader(str(folder)) if safe else dcp.FileSystemReader(folder)
    dcp.load(weights, storage_reader=reader, no_dist=True)
    return weights


@FORMS
@pytest.mark.long
def test_weights_of_automodel_are_edited_where_they_are(made: Make, form: str) -> None:
    """Its own Checkpointer loads the same (`test_automodel.py`)."""
    root = made(partial(automodel, form=form))
    before = snapshot(root)
    assert Run.open(root).format.idle_paths(root, 6) == []
    first, last = (weights_of(root, step) for step in (4, 6))
    cases: dict[str, tuple[dict[str, Any], Callable[[str], torch.Tensor]]] = {
        "average": ({"steps": ["4", "6"]}, lambda k: ((first[k].double() + last[k]) / 2).float()),
        "scale": ({"params": "bias", "by": 0.5}, lambda k: last[k] * (0.5 if "bias" in k else 1)),
    }
    for name, (section, expected) in cases.items():
        recipe = from_data({name: section})
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), recipe))
        assert look.verify(Run.open(root), level=4).findings == ()
        found = weights_of(root, 6)
        assert all(torch.equal(found[key], expected(key)) for key in last)
        assert not torch.equal(found["0.bias"], last["0.bias"])
        take_back(root, before)


@FORMS
def test_weights_of_automodel_that_are_there_twice_are_refused(made: Make, form: str) -> None:
    """`consolidated/` is what it exports of the last step."""
    root = made(partial(automodel, form=form))
    folder = root / "epoch_0_step_6" / "model" / "consolidated"
    folder.mkdir()
    save_file(stepped(6)[0].state_dict(), folder / "model-00001-of-00001.safetensors")
    before = snapshot(root)
    with pytest.raises(SurgeryError, match=r"consolidated/model-00001.* a second copy") as refused:
        surgery.plan(Run.open(root), from_data({"average": {"last": 2}}))
    assert "out of the run if no load needs it" in refused.value.next[0]
    assert snapshot(root) == before


def test_export_and_a_half_saved_model_of_automodel(made: Make, tmp_path: Path) -> None:
    root = made(partial(automodel, form="torch_save"))
    export(Run.open(root), 6, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert torch.equal(load_file(file)["0.weight"], weights_of(root, 6)["0.weight"])
    (root / "epoch_0_step_6" / "model" / ".metadata").unlink()
    assert not Run.open(root).complete(6) and Run.open(root).complete(4)
    shutil.rmtree(root)
    root.mkdir()
    automodel(root, form="safetensors")
    with pytest.raises(SurgeryError, match="in shards of safetensors"):
        export(Run.open(root), 6, tmp_path / "out2")


def test_automodels_adapters_are_in_files_that_are_not_edited(made: Make) -> None:
    root = made(automodel)
    for folder in root.glob("epoch_*"):
        (folder / "model").mkdir(exist_ok=True)
        adapter = {"base_model.model.lora_A.weight": torch.ones(2, 4)}
        save_file(adapter, folder / "model" / "adapter_model.safetensors")
    for recipe in ({"average": {"last": 2}}, {"scale": {"params": "weight", "by": 0.9}}):
        with pytest.raises(
            SurgeryError, match=r"weights of .* are in files that ckptsurgeon does not edit"
        ):
            surgery.plan(Run.open(root), from_data(recipe))
    for recipe in (GRAFT, CLIP):
        before = snapshot(root)
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        held = [automodel_state(step)["optim"] for step in (4, 6)]
        saved = {"optim": automodel_state(6)["optim"]}
        dcp.load(saved, checkpoint_id=root / "epoch_0_step_6" / "optim", no_dist=True)
        first, last, found = (moments_of(state) for state in (*held, saved["optim"]))
        expected = clipped(last) if recipe is CLIP else grafted(first, last)
        same(found, expected, last)
        take_back(root, before)


def moments_of(state: dict[str, Any]) -> State:
    """Of a flat optimizer state, by parameter."""
    return {
        name: {key: state[f"state.{name}.{key}"] for key in ("exp_avg", "exp_avg_sq")}
        for name in ("0.weight", "0.bias")
    }
