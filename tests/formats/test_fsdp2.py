"""FSDP2's shards: Accelerate and the Trainer write them on two ranks, and resume from edits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.export import export
from tests.support.launch import by_step
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
NAMES = {"accelerate": "step_{}", "trainer": "checkpoint-{}"}
FORMATS = {"accelerate": "accelerate", "trainer": "transformers"}
BY_LIBRARY = pytest.mark.parametrize("library", NAMES)


def train(library: str, root: Path, stop: int) -> dict[int, dict[str, Any]]:
    """Two ranks to step `stop`, from where the library resumes: what each update used."""
    environment = {"ACCELERATE_USE_CPU": "true"}
    return by_step("tests.support.fsdp2", library, root, stop, ranks=2, environment=environment)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(library: str) -> Path:
        if library not in made:
            made[library] = tmp_path_factory.mktemp(library) / "run"
            train(library, made[library], 6)
        return made[library]

    return make


@pytest.fixture
def run(originals: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(library: str) -> Path:
        return Path(shutil.copytree(originals(library), tmp_path / "run"))

    return copy


@pytest.mark.witness(
    "FSDP2 (Accelerate, Trainer)",
    "rollback",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="accelerate",
)
@pytest.mark.witness(
    "FSDP2 (Accelerate, Trainer)",
    "rollback",
    "set-lr",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="transformers",
)
@BY_LIBRARY
def test_a_resume_uses_all_that_was_set(run: Callable[[str], Path], library: str) -> None:
    root = run(library)
    before = snapshot(root)
    opened = Run.open(root)
    assert (opened.format.name, opened.steps(), opened.latest()) == (
        FORMATS[library], [2, 4, 6], 6,
    )  # fmt: skip
    assert look.verify(opened, level=4).findings == ()
    untouched = Path(shutil.copytree(root, root.parent / "untouched"))
    shutil.rmtree(untouched / NAMES[library].format(6))
    old = train(library, untouched, 6)
    values = {"lr": 5e-4, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(root, {"rollback": {"to": 4}, "set": values, "reset": ["moments"]})
    assert plan.promise is not None and plan.promise.step == 5
    seen = train(library, Path(shutil.copytree(root, root.parent / "resumed")), 6)
    assert sorted(seen) == sorted(old) == [5, 6]
    assert seen[5]["lr"] == [plan.promise.lr] * 2
    for step in (5, 6):
        assert seen[step]["lr"] == pytest.approx([rate / 2 for rate in old[step]["lr"]])
        assert seen[step]["betas"] == [[0.9, 0.97]] * 2 and seen[step]["eps"] == [1e-6] * 2
        assert seen[step]["weight_decay"] == [0.3, 0.0]
    assert (seen[5]["adam_step"], seen[5]["moments"]) == (0, 0)
    assert seen[6]["adam_step"] == 1 and old[6]["adam_step"] == 5
    take_back(root, before)


@BY_LIBRARY
def test_no_file_of_a_rank_is_touched(run: Callable[[str], Path], library: str) -> None:
    root = run(library)
    before = snapshot(root)
    operate(root, {"reset": ["moments"], "moments": {"params": "^first"}, "set": {"eps": 1e-5}})
    after = snapshot(root)
    folder = f"{NAMES[library].format(6)}/optimizer_0"
    assert {name for name in before if after[name] != before[name]} == {f"{folder}/.metadata"}
    names = [f"{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")]
    metadata = dcp.FileSystemReader(root / folder).read_metadata().state_dict_metadata
    wanted = {
        (key := f"optimizer.state.{name}.exp_avg"): torch.ones(metadata[key].size) for name in names
    }
    dcp.load(wanted, checkpoint_id=root / folder, no_dist=True)
    for name in names:
        assert bool(wanted[f"optimizer.state.{name}.exp_avg"].any()) == name.startswith("second")
    take_back(root, before)


@BY_LIBRARY
def test_groups_are_known_by_their_parameters(run: Callable[[str], Path], library: str) -> None:
    root = run(library)
    before = snapshot(root)
    plan = operate(root, {"set_params": {"params": "bias$", "lr": 5e-4, "weight_decay": 0.2}})
    assert plan.promise is not None
    assert sorted(plan.promise.weight_decay or ()) == [0.1, 0.2]
    seen = train(library, Path(shutil.copytree(root, root.parent / "resumed")), 8)
    assert seen[7]["weight_decay"] == seen[8]["weight_decay"] == [0.1, 0.2]
    for step in (7, 8):
        weights, biases = seen[step]["lr"]
        assert biases == pytest.approx(weights / 2)
    take_back(root, before)


@BY_LIBRARY
def test_the_weights_of_the_model_are_exported_whole(
    run: Callable[[str], Path], library: str
) -> None:
    root = run(library)
    export(Run.open(root), 6, root.parent / "out")
    (file,) = (root.parent / "out").glob("*.safetensors")
    with safe_open(file, framework="pt") as reader:
        shapes = {name: tuple(reader.get_tensor(name).shape) for name in list(reader.keys())}
    assert shapes == {
        "first.weight": (16, 8), "first.bias": (16,), "second.weight": (4, 16), "second.bias": (4,),
    }  # fmt: skip


@pytest.mark.witness(
    "FSDP2 (Accelerate, Trainer)",
    "set iteration",
    by="transformers",
)
def test_the_trainers_step_moves_with_its_data(run: Callable[[str], Path]) -> None:
    root = run("trainer")
    operate(root, {"rollback": {"to": 4}, "set": {"iteration": 6}})
    assert sorted(train("trainer", root, 8)) == [7, 8]


@BY_LIBRARY
def test_what_is_not_whole_or_not_alone_is_refused(
    run: Callable[[str], Path], library: str
) -> None:
    root = run(library)
    latest = root / NAMES[library].format(6)
    shard = latest / "pytorch_model_fsdp_0" / "__1_0.distcp"
    data = shard.read_bytes()
    shard.unlink()
    with pytest.raises(SurgeryError, match="step 6 is incomplete"):
        Run.open(root).latest()
    shard.write_bytes(data)
    shutil.copytree(latest / "optimizer_0", latest / "optimizer_1")
    with pytest.raises(SurgeryError, match="2 optimizers, and a recipe has one lr"):
        surgery.plan(Run.open(root), from_data({"set": {"lr": 1e-4}}))
    (latest / "optimizer_1" / "__1_0.distcp").unlink()
    with pytest.raises(SurgeryError, match=r"incomplete \(no optimizer_1/__1_0\.distcp\)"):
        Run.open(root).latest()


def test_two_models_with_an_optimizer_each(run: Callable[[str], Path], tmp_path: Path) -> None:
    """Accelerate pairs `optimizer_1` with `pytorch_model_fsdp_1`; both have the same names."""
    root = run("two-models")
    before = snapshot(root)
    values = {"beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(root, {"rollback": {"to": 4}, "set": values})
    assert "2 optimizers: the lr is that of the first one" in plan.warnings
    resumed = train("two-models", shutil.copytree(root, tmp_path / "kept"), 5)
    for used, peak in zip(resumed[5], (1e-3, 2e-3), strict=True):
        assert used["lr"] == pytest.approx([peak * 0.9**8] * 2)  # a wrapped schedule: per rank
        assert used["betas"] == [[0.9, 0.97]] * 2 and used["eps"] == [1e-6] * 2
        assert used["weight_decay"] == [0.3, 0.0]
        assert used["adam_step"] == 4 and used["moments"] > 0
    take_back(root, before)
    operate(root, {"rollback": {"to": 4}, "reset": ["moments"]})
    for used in train("two-models", shutil.copytree(root, tmp_path / "reset"), 5)[5]:
        assert (used["adam_step"], used["moments"]) == (0, 0)
    take_back(root, before)
    operate(root, {"rollback": {"to": 4}, "reset": ["moments"], "moments": {"params": "_1"}})
    first, second = train("two-models", shutil.copytree(root, tmp_path / "one"), 5)[5]
    assert first["moments"] > 0 and second["moments"] == 0
    with pytest.raises(SurgeryError, match="2 models, and one export holds one"):
        export(Run.open(root), 4, tmp_path / "weights")


# --- new numbers ---------------------------------------------------------------------------------

PARAMETERS = ("first.weight", "second.weight", "first.bias", "second.bias")
KINDS = ("weights", "exp_avg", "exp_avg_sq")
Tensors = dict[str, list[torch.Tensor]]


def gathered(folder: Path) -> Tensors:
    """All of a step's tensors, joined by torch's own reader, in the order of the param groups."""
    names = {"weights": ("pytorch_model_fsdp_0", "model.{}")} | {
        kind: ("optimizer_0", f"optimizer.state.{{}}.{kind}") for kind in KINDS[1:]
    }
    out: Tensors = {}
    for kind, (inner, name) in names.items():
        metadata = dcp.FileSystemReader(folder / inner).read_metadata().state_dict_metadata
        keys = [name.format(parameter) for parameter in PARAMETERS]
        wanted = {key: torch.empty(metadata[key].size) for key in keys}
        dcp.load(wanted, checkpoint_id=folder / inner, no_dist=True)
        out[kind] = list(wanted.values())
    return out


def same(found: Tensors, wanted: Tensors) -> None:
    differ = [
        (kind, name)
        for kind in KINDS
        for name, a, b in zip(PARAMETERS, found[kind], wanted[kind], strict=True)
        if not torch.equal(a, b)
    ]
    assert differ == []


def mean(first: list[torch.Tensor], last: list[torch.Tensor]) -> list[torch.Tensor]:
    return [((a.double() + b.double()) / 2).float() for a, b in zip(first, last, strict=True)]


RECIPES: dict[str, Any] = {
    "average": {"average": {"steps": ["2", "6"]}},
    "average all": {"average": {"steps": ["2", "6"], "moments": "average"}},
    "graft": {"graft": {"step": 2}},
    "graft some": {"graft": {"step": 2, "params": "^second"}},
    "clip": {"clip_moments": {"percentile": 75}},
    "scale": {"scale": {"params": "^first", "by": 0.9}},
    "scale all": {"scale": {"params": "^first", "by": 0.9, "moments": "scale"}},
}


def computed(name: str, first: Tensors, last: Tensors) -> Tensors:
    """What torch makes of the whole tensors."""
    if name == "average":
        return {**last, "weights": mean(first["weights"], last["weights"])}
    if name == "average all":
        return {kind: mean(first[kind], last[kind]) for kind in KINDS}
    if name == "graft":
        return {**first, "weights": last["weights"]}
    chosen = [parameter.startswith(("first", "second")[name == "graft some"])
              for parameter in PARAMETERS]  # fmt: skip
    if name == "graft some":
        pick = {
            kind: [a if c else b for c, a, b in zip(chosen, first[kind], last[kind], strict=True)]
            for kind in KINDS
        }
        return {**pick, "weights": last["weights"]}
    if name == "clip":
        return clipped(last)
    powers = {"weights": 1} | ({"exp_avg": 1, "exp_avg_sq": 2} if name == "scale all" else {})
    scaled = {
        kind: [t * 0.9**power if c else t for c, t in zip(chosen, last[kind], strict=True)]
        for kind, power in powers.items()
    }
    return {**last, **scaled}


def clipped(last: Tensors) -> Tensors:
    out: Tensors = {**last, "exp_avg": [], "exp_avg_sq": []}
    for average, square in zip(last["exp_avg"], last["exp_avg_sq"], strict=True):
        above = square[square > 0]
        limit = above.sort().values[math.ceil(0.75 * above.numel()) - 1]
        share = (limit.double() / square.double()).clamp(max=1).sqrt()
        out["exp_avg_sq"].append(square.clamp(max=limit))
        out["exp_avg"].append((average.double() * share).float())
    return out


@BY_LIBRARY
def test_new_numbers_are_torchs(run: Callable[[str], Path], library: str) -> None:
    """Each operation on the gathered tensors, read back by torch's own reader."""
    root = run(library)
    before, folder = snapshot(root), root / NAMES[library].format(6)
    first, last = gathered(root / NAMES[library].format(2)), gathered(folder)
    for name, recipe in RECIPES.items():
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        assert look.verify(Run.open(root), level=4).findings == (), name
        same(gathered(folder), computed(name, first, last))
        take_back(root, before)


@pytest.mark.thinned(2)
@pytest.mark.witness(
    "FSDP2 (Accelerate, Trainer)",
    "average --moments average",
    "scale --moments scale",
    "graft moments",
    by="accelerate",
)
@pytest.mark.witness(
    "FSDP2 (Accelerate, Trainer)",
    "average --moments average",
    "scale --moments scale",
    "graft moments",
    by="transformers",
)
@BY_LIBRARY
def test_two_ranks_load_new_numbers(run: Callable[[str], Path], library: str) -> None:
    """The first update after a resume begins with them, on every rank."""
    root = run(library)
    before, folder = snapshot(root), root / NAMES[library].format(6)
    for name in ("average all", "scale all", "graft"):
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(RECIPES[name])))
        wanted = gathered(folder)
        seen = train(library, Path(shutil.copytree(root, root.parent / name)), 7)
        found = {
            kind: [torch.tensor(t).reshape(w.shape) for t, w in zip(ts, wanted[kind], strict=True)]
            for kind, ts in seen[7]["tensors"].items()
        }
        same(found, wanted)
        assert seen[7]["adam_step"] == (2 if name == "graft" else 6)
        take_back(root, before)


def test_a_cooldown_begins_at_the_rate_of_the_next_step(run: Callable[[str], Path]) -> None:
    """The Trainer's LambdaLR gets its base rate; the shape is in the arguments that are named."""
    root = run("trainer")
    before = snapshot(root)
    rate = look.inspect(Run.open(root)).promise.lr
    recipe = from_data({"cooldown": {"steps": 4, "to": 1e-6}})
    plan = surgery.plan(Run.open(root), recipe)
    surgery.apply(Run.open(root), plan)
    assert "--lr_scheduler_type warmup_stable_decay" in plan.warnings[-1]
    state = torch.load(root / "checkpoint-6" / "scheduler.pt", weights_only=False)
    assert state["base_lrs"] == [rate] * 2 and look.inspect(Run.open(root)).promise.lr == rate
    take_back(root, before)


def test_a_lambda_of_the_script_is_written_out(run: Callable[[str], Path]) -> None:
    with pytest.raises(SurgeryError, match="LambdaLR can't decay linear") as error:
        surgery.plan(Run.open(run("accelerate")), from_data({"cooldown": {"steps": 4}}))
    assert "make the scheduler LambdaLR(optimizer, lambda t" in error.value.next[0]


def test_two_models_are_averaged_apart(run: Callable[[str], Path]) -> None:
    """The names are the same in both; each has the moments of its own optimizer."""
    root = run("two-models")
    before, steps = snapshot(root), Run.open(root).steps()

    def weights(step: int, number: int) -> dict[str, torch.Tensor]:
        folder = root / f"step_{step}" / f"pytorch_model_fsdp_{number}"
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        wanted = {name: torch.empty(item.size) for name, item in metadata.items()}
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
        return wanted

    old = [[weights(step, number) for step in (steps[0], steps[-1])] for number in (0, 1)]
    recipe = from_data({"average": {"steps": [str(steps[0]), str(steps[-1])]}})
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), recipe))
    for number, (first, last) in enumerate(old):
        for name, tensor in weights(steps[-1], number).items():
            assert torch.equal(tensor, ((first[name].double() + last[name].double()) / 2).float())
    take_back(root, before)
    recipe = from_data({"scale": {"params": "^optimizer_1.first", "by": 2.0, "moments": "scale"}})
    plan = surgery.plan(Run.open(root), recipe)
    files = {Path(change.file).parent.name for change in plan.changes}
    assert files == {"optimizer_1", "pytorch_model_fsdp_1"}
