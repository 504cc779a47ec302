"""Lightning with FSDP2: its own Trainer saves folders on two ranks, and resumes from edits."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork
from tests.support.launch import by_step
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
PEAK = 1e-3
STEP = "epoch=0-step={}.ckpt"


def train(root: Path, stop: int, resume: str = "", *options: str) -> dict[int, Any]:
    """Two ranks to step `stop`: what each update used."""
    words = (root, stop, resume, *options)
    environment = {"TORCHELASTIC_RUN_ID": "1"}
    return by_step("tests.support.lightning_fsdp2", *words, ranks=2, environment=environment)


def cosine(peak: float, step: int) -> float:
    """torch's own rate after `step` updates."""
    twin = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(twin, T_max=40, eta_min=1e-5)
    for _ in range(step):
        twin.step()
        schedule.step()
    return float(schedule.get_last_lr()[0])


def saved(folder: Path) -> dict[str, Any]:
    """By name, the values that torch reads in a folder."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {
        name: torch.ones(item.size) if hasattr(item, "size") else None
        for name, item in metadata.items()
    }
    dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    return wanted


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lightning") / "run"
    train(root, 6)
    return root


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "run") / "checkpoints"


def test_a_resume_uses_all_that_was_set(folder: Path, tmp_path: Path) -> None:
    before = snapshot(folder)
    run = Run.open(folder)
    assert (run.format.name, run.steps(), run.latest()) == ("lightning-sharded", [2, 4, 6], 6)
    assert look.verify(run, level=4).findings == ()
    values = {"lr": 5e-4, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(folder, {"rollback": {"to": 4}, "set": values, "reset": ["moments"]})
    promise = plan.promise
    assert promise is not None and promise.step == 5
    assert Run.open(folder).pointers() == {"last.ckpt": 4}
    seen = train(shutil.copytree(folder.parent, tmp_path / "resumed"), 6, "last")
    assert sorted(seen) == [5, 6]
    assert seen[5]["lr"] == pytest.approx([promise.lr] * 2, rel=1e-12)
    assert seen[6]["lr"] == pytest.approx([cosine(5e-4, 5)] * 2, rel=1e-9)
    for step in (5, 6):
        assert seen[step]["betas"] == [[0.9, 0.97]] * 2 and seen[step]["eps"] == [1e-6] * 2
        assert seen[step]["weight_decay"] == [0.3, 0.0]
        assert seen[step]["adam_step"] == step - 5
    assert (seen[5]["moments"] == 0, seen[6]["moments"] > 0) == (True, True)
    take_back(folder, before)


def test_an_undo_takes_away_the_copies_that_a_saver_made_since(folder: Path) -> None:
    """In a run that was copied the saver leaves `last.ckpt/`, and makes `last-v1.ckpt/`. In one
    that is copied once more it leaves both."""
    before = snapshot(folder)
    operate(folder, {"set": {"beta2": 0.9}})
    train(folder.parent, 8, "last")
    assert (folder / "last-v1.ckpt").is_dir() and Run.open(folder).latest() == 8
    shutil.copytree(folder / "last-v1.ckpt", folder / "last-v2.ckpt")
    run = Run.open(folder)
    surgery.apply(run, surgery.plan_undo(run))
    assert Run.open(folder).latest() == 6
    assert snapshot(folder) == before


def test_an_undo_leads_a_copy_that_was_saved_over_back_to_the_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(root, 4)
    folder = root / "checkpoints"
    operate(folder, {"set": {"beta2": 0.9}})
    train(root, 6, "last")
    run = Run.open(folder)
    with pytest.raises(SurgeryError, match=r"last\.ckpt/\S+: saved again"):
        surgery.plan_undo(run)
    surgery.apply(run, surgery.plan_undo(run, as_they_are=True))
    run = Run.open(folder)
    assert (run.latest(), run.steps()) == (4, [2, 4]) and look.verify(run, level=4).findings == ()
    used = train(root, 5, "last")
    assert list(used) == [5] and used[5]["betas"] == [[0.9, 0.999]] * 2


def test_two_optimizers_in_one_folder(tmp_path: Path) -> None:
    """`optimizer_0.…` and `optimizer_1.…` are names in one folder, and both have a group 0."""
    train(tmp_path / "run", 8, "", "--pair")
    folder = tmp_path / "run" / "checkpoints"
    before = snapshot(folder)
    values = {"beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(folder, {"rollback": {"to": 4}, "set": values})
    assert "2 optimizers: the lr is that of the first one" in plan.warnings
    seen = train(shutil.copytree(folder.parent, tmp_path / "kept"), 6, "last", "--pair")
    for used, peak in zip(seen[5], (PEAK, 2 * PEAK), strict=True):
        assert used["lr"] == pytest.approx([peak * 0.9**2])
        assert (used["betas"], used["eps"], used["weight_decay"]) == ([[0.9, 0.97]], [1e-6], [0.3])
        assert used["adam_step"] == 2 and used["moments"] > 0
    take_back(folder, before)
    with pytest.raises(SurgeryError, match="2 optimizers, and a recipe has one lr"):
        surgery.plan(Run.open(folder), from_data({"set": {"lr": 1e-4}}))
    one = {"reset": ["moments"], "moments": {"params": "^second"}}
    operate(folder, {"rollback": {"to": 4}, **one})
    seen = train(shutil.copytree(folder.parent, tmp_path / "one"), 6, "last", "--pair")
    assert [used["moments"] > 0 for used in seen[5]] == [True, False]
    take_back(folder, before)


def test_a_group_without_parameters_says_nothing_of_the_next_step(folder: Path) -> None:
    known = Run.open(folder).checkpoint(6).state().promise
    step = folder / STEP.format(6)
    values = saved(step)
    numbers = {name: value for name, value in values.items() if ".param_groups.1." in name}
    odd = {"lr": 0.7, "betas": (0.5, 0.6), "eps": 0.5, "weight_decay": 0.5, "params": []}
    for name, value in numbers.items():
        key = name.rpartition(".param_groups.1.")[2]
        if not key.startswith("params."):
            values[f"optimizer_0.param_groups.2.{key}"] = odd.get(key, value)
    values["optimizer_0.param_groups.2.params"] = []
    shutil.rmtree(step / "__1_0.distcp", ignore_errors=True)
    dcp.save(values, checkpoint_id=step, no_dist=True)
    found = Run.open(folder).checkpoint(6).state().promise
    assert (found.weight_decay, found.groups) == (known.weight_decay, known.groups)
    assert found == known


def test_a_resume_of_an_untouched_step_goes_on(folder: Path) -> None:
    operate(folder, {"rollback": {"to": 4}})
    seen = train(folder.parent, 6, "last")
    assert [seen[step]["lr"][0] for step in (5, 6)] == pytest.approx(
        [cosine(PEAK, 4), cosine(PEAK, 5)], rel=1e-9
    )
    assert seen[5]["adam_step"] == 4 and seen[5]["moments"] > 0
    assert Run.open(folder).steps() == [2, 4, 6]


def test_the_step_and_its_copy_are_edited_alike(folder: Path) -> None:
    before = snapshot(folder)
    operate(folder, {"set": {"lr": 5e-4, "eps": 1e-6}, "reset": ["moments"]})
    for name in (STEP.format(6), "last.ckpt"):
        values = saved(folder / name)
        assert [values[f"optimizer_0.param_groups.{i}.eps"] for i in (0, 1)] == [1e-6] * 2
        assert not values["optimizer_0.state.first.weight.exp_avg"].any()
        meta = torch.load(folder / name / "meta.pt", weights_only=False)
        assert meta["lr_schedulers"][0]["base_lrs"] == [5e-4] * 2
    assert look.verify(Run.open(folder), level=4).findings == ()
    operate(folder, {"rollback": {"to": 4}, "set": {"eps": 1e-5}})
    assert saved(folder / "last.ckpt")["optimizer_0.param_groups.1.eps"] == 1e-5
    assert Run.open(folder).latest() == 4
    for _ in range(2):
        run = Run.open(folder)
        surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(folder) == before


def test_the_saver_forgets_what_is_not_in_the_run(folder: Path) -> None:
    """In `meta.pt` of the step and of its copy."""
    meta = folder / STEP.format(4) / "meta.pt"
    state = torch.load(meta, weights_only=False)
    (saver,) = state["callbacks"].values()
    scores = {STEP.format(4): torch.tensor(0.5), STEP.format(3): torch.tensor(0.25)}
    saver["dirpath"] = str(folder)
    saver["best_k_models"] = {str(folder / name): score for name, score in scores.items()}
    saver["best_model_path"] = str(folder / STEP.format(3))
    saver["best_model_score"] = scores[STEP.format(3)]
    torch.save(state, meta)
    before = snapshot(folder)
    operate(folder, {"rollback": {"to": 4}})
    for name in (STEP.format(4), "last.ckpt"):
        (held,) = torch.load(folder / name / "meta.pt", weights_only=False)["callbacks"].values()
        assert held["best_k_models"] == {str(folder / STEP.format(4)): 0.5}
        assert held["best_model_path"] == str(folder / STEP.format(4))
        assert held["best_model_score"] == 0.5
    take_back(folder, before)


def test_a_copy_that_stands_alone_is_the_step(folder: Path) -> None:
    for step in (2, 4, 6):
        shutil.rmtree(folder / STEP.format(step))
    before = snapshot(folder)
    run = Run.open(folder)
    assert (run.steps(), run.latest()) == ([6], 6)
    operate(folder, {"set": {"weight_decay": 0.2}})
    assert saved(folder / "last.ckpt")["optimizer_0.param_groups.0.weight_decay"] == 0.2
    take_back(folder, before)


def test_a_link_to_a_folder_leads_a_resume_to_the_step(folder: Path, tmp_path: Path) -> None:
    """As `save_last="link"` makes it."""
    shutil.rmtree(folder / "last.ckpt")
    (folder / "last.ckpt").symlink_to(STEP.format(6))
    assert Run.open(folder).latest() == 6
    before = snapshot(folder)
    operate(folder, {"set": {"eps": 1e-6}})
    take_back(folder, before)
    operate(folder, {"rollback": {"to": 4}, "set": {"eps": 1e-6}})
    assert (folder / "last.ckpt").readlink() == Path(STEP.format(4))
    resumed = shutil.copytree(folder.parent, tmp_path / "resumed", symlinks=True)
    seen = train(resumed, 6, "last")
    assert sorted(seen) == [5, 6] and seen[5]["eps"] == [1e-6] * 2
    take_back(folder, before)


def test_a_fork_has_the_folder_that_a_restart_loads(folder: Path, tmp_path: Path) -> None:
    fork(Run.open(folder), 4, tmp_path / "branch", from_data({}), "copy")
    run = Run.open(tmp_path / "branch")
    assert (run.steps(), run.latest()) == ([4], 4)


def test_what_is_not_whole_is_refused(folder: Path) -> None:
    (folder / STEP.format(6) / "__1_0.distcp").unlink()
    with pytest.raises(SurgeryError, match=r"step 6 is incomplete: missing: .*__1_0\.distcp"):
        Run.open(folder).latest()
        Run.open(folder).checkpoint(6)


def test_the_weights_are_exported_whole(folder: Path) -> None:
    shapes = {weight.name: weight.shape for weight in Run.open(folder).checkpoint(6).weights()}
    assert shapes == {
        "first.weight": (16, 8), "first.bias": (16,), "second.weight": (4, 16), "second.bias": (4,),
    }  # fmt: skip


# --- new numbers ---------------------------------------------------------------------------------

KINDS = ("weights", "exp_avg", "exp_avg_sq")
PARAMETERS = ("first.weight", "first.bias", "second.weight", "second.bias")
Tensors = dict[str, list[torch.Tensor]]


def gathered(step: Path) -> Tensors:
    """All of a step's tensors, joined by torch's own reader, in the order of the param groups."""
    values = saved(step)
    (inside,) = {name.partition(".")[0] for name in values if name.endswith(".second.bias")
                 and not name.startswith("optimizer")}  # fmt: skip
    names = [f"optimizer_0.state.{{}}.{kind}" for kind in KINDS[1:]]
    return {
        kind: [values[name.format(parameter)] for parameter in PARAMETERS]
        for kind, name in zip(KINDS, [f"{inside}.{{}}", *names], strict=True)
    }


def computed(name: str, first: Tensors, last: Tensors) -> Tensors:
    """What torch makes of the whole tensors."""
    if name == "average":
        return {
            kind: [((a.double() + b.double()) / 2).float()
                   for a, b in zip(first[kind], last[kind], strict=True)]
            for kind in KINDS
        }  # fmt: skip
    if name == "graft":
        return {**first, "weights": last["weights"]}
    factors = {"weights": 0.9, "exp_avg": 0.9, "exp_avg_sq": 0.9**2}
    return {
        kind: [t * by if n.startswith("first") else t
               for n, t in zip(PARAMETERS, last[kind], strict=True)]
        for kind, by in factors.items()
    }  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("average", {"average": {"steps": ["2", "6"], "moments": "average"}}),
        ("scale", {"scale": {"params": "^first", "by": 0.9, "moments": "scale"}}),
        ("graft", {"graft": {"step": 2}}),
    ],
)
def test_two_ranks_load_new_numbers(
    folder: Path, tmp_path: Path, name: str, recipe: dict[str, Any]
) -> None:
    """Of the step and of its copy, which the library loads: torch's, bit for bit."""
    before = snapshot(folder)
    first, last = gathered(folder / STEP.format(2)), gathered(folder / STEP.format(6))
    surgery.apply(Run.open(folder), surgery.plan(Run.open(folder), from_data(recipe)))
    assert look.verify(Run.open(folder), level=4).findings == ()
    wanted = computed(name, first, last)
    for each in (STEP.format(6), "last.ckpt"):
        found = gathered(folder / each)
        for kind in KINDS:
            assert all(torch.equal(a, b) for a, b in zip(found[kind], wanted[kind], strict=True))
    seen = train(shutil.copytree(folder.parent, tmp_path / "resumed"), 7, "last")
    for kind in KINDS:
        for flat, tensor in zip(seen[7]["tensors"][kind], wanted[kind], strict=True):
            assert torch.equal(torch.tensor(flat).reshape(tensor.shape), tensor)
    take_back(folder, before)


def test_a_cooldown_is_what_the_library_does(folder: Path, tmp_path: Path) -> None:
    """CosineAnnealingLR, which holds one: the rates of a resume are the closed form."""
    before = snapshot(folder)
    rate = look.inspect(Run.open(folder)).promise.lr
    assert rate is not None
    recipe = {"cooldown": {"steps": 4, "shape": "cosine", "to": 1e-6}}
    plan = surgery.plan(Run.open(folder), from_data(recipe))
    surgery.apply(Run.open(folder), plan)
    assert look.verify(Run.open(folder), level=4).findings == ()
    seen = train(shutil.copytree(folder.parent, tmp_path / "resumed"), 10, "last")
    for done in range(4):
        wanted = 1e-6 + (rate - 1e-6) * (1 + math.cos(math.pi * done / 4)) / 2
        assert seen[7 + done]["lr"] == pytest.approx([wanted] * 2, rel=1e-12)
    take_back(folder, before)
    with pytest.raises(SurgeryError, match="CosineAnnealingLR can't decay linear"):
        surgery.plan(Run.open(folder), from_data({"cooldown": {"steps": 4}}))
