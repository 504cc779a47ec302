"""The bundled trainer goes on from a transplant at other sizes as the source itself went on: data,
tensor and pipeline ranks, its first line as promised and its next losses to five digits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.export import export
from tests.support.in_process import one_rank
from tests.support.many_ranks import Ran, run_all, train_one
from tests.support.snapshot import snapshot
from tests.support.universal import converted, same

pytestmark = pytest.mark.long

TP, PP = "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"
STEP = 2
LAYOUTS = {
    "one": [],
    "zero 2": ["zero_stage=2"],
    "zero 3": ["zero_stage=3"],
    "tensor": [TP],
    "tensor zero 3": [TP, "zero_stage=3"],
    "stages": [PP],
}
FEW = (("tensor", "one"), ("zero 3", "tensor"), ("stages", "one"))
"""In `make test`: both directions of each cut, and what each of the others also needs."""
MORE = (
    ("one", "zero 2"),
    ("one", "tensor"),
    ("one", "stages"),
    ("zero 3", "one"),
    ("tensor", "zero 2"),
    ("tensor zero 3", "tensor"),
    ("zero 3", "tensor zero 3"),
    ("stages", "tensor"),
)
MOVES = [
    pytest.param(f"{a} to {b}", marks=[pytest.mark.slow] if (a, b) in MORE else [])
    for a, b in (*FEW, *MORE)
]
STAGES = """\
rename:
  tied_modules.embed.word_embeddings.weight: word_embeddings.weight
  1.weight: position_embeddings.weight
  4.{rest}: final_layernorm.{rest}     # num_layers + 2
  "{i+2}.{rest}": layers.{i}.{rest}
"""


@dataclass
class Trained:
    """Runs by name: what was trained, and the single steps of other seeds that are filled."""

    folder: Path
    corpus: Path
    sources: dict[str, Ran]

    def job(self, name: str, *overrides: str) -> list[str]:
        save = f"save={self.folder / name.replace(' ', '-')}"
        return [save, f"data={self.corpus}", "micro_batch_size=2", *overrides]

    def root(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-")


def ranks(name: str) -> int:
    return 1 if name == "one" else 2


def run(made: Trained, jobs: dict[str, list[str]], where: str) -> dict[str, Ran]:
    """Each job on as many ranks as its layout has, which is the end of its name."""
    alone = {name: job for name, job in jobs.items() if ranks(name.split(" to ")[-1]) == 1}
    both = {name: job for name, job in jobs.items() if name not in alone}
    with one_rank() as device:
        ran = {name: Ran(*train_one(job, device)) for name, job in alone.items()}
    return ran | run_all(2, both, made.folder / where)


@pytest.fixture(scope="module")
def moves(request: pytest.FixtureRequest) -> list[str]:
    """Those that are tried in this session."""
    found = (getattr(item, "callspec", None) for item in request.session.items
             if item.path == request.path)  # fmt: skip
    return list(
        dict.fromkeys(each.params["move"] for each in found if each and "move" in each.params)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path, moves: list[str]) -> Trained:
    """The sources and templates of these moves, and of the tests below."""
    made = Trained(tmp_path_factory.mktemp("transplant"), corpus, {})
    sources, templates = ({move.split(" to ")[i] for move in moves} for i in (0, 1))
    longer, once = ("train_iters=4", "save_interval=2"), ("train_iters=1", "save_interval=1")
    jobs = {n: made.job(n, *longer, *LAYOUTS[n]) for n in sorted(sources | {"tensor", "stages"})}
    made.sources = run(made, jobs, "s")
    templates |= {"one", "tensor"}
    fresh = {n: made.job(f"fresh {n}", *once, "seed=77", *LAYOUTS[n]) for n in sorted(templates)}
    run(made, fresh, "t")
    return made


def transplanted(made: Trained, source: str, template: str) -> Plan:
    """A copy of the template, filled, taken back and filled again; its name is that of the move."""
    root = made.root(f"{source} to {template}")
    shutil.copytree(made.root(f"fresh {template}"), root)
    before = snapshot(root)
    section = {"source": str(made.root(source)), "step": STEP}
    if "stages" in (source, template):
        page = made.folder / f"{source}-{template}.yaml"
        page.write_text(STAGES)
        section["names"] = str(page)
    planned = plan(Run.open(root), from_data({"transplant": section}))
    surgery.apply(Run.open(root), planned)
    after = snapshot(root)
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before
    surgery.apply(Run.open(root), surgery.plan_redo(Run.open(root)))
    assert snapshot(root) == after
    assert look.verify(Run.open(root), level=4).findings == ()
    return planned


@pytest.fixture(scope="module")
def moved(trained: Trained, moves: list[str]) -> dict[str, tuple[Plan, Ran]]:
    """Each move, gone on."""
    plans = {name: transplanted(trained, *name.split(" to ")) for name in moves}
    jobs = {
        name: trained.job(
            name, "train_iters=4", "save_interval=2", *LAYOUTS[name.split(" to ")[-1]]
        )
        for name in plans
    }
    ran = run(trained, jobs, "moved")
    return {name: (plans[name], ran[name]) for name in plans}


@pytest.mark.parametrize("move", MOVES)
def test_the_trainer_goes_on_as_the_source_did(
    trained: Trained, moved: dict[str, tuple[Plan, Ran]], move: str
) -> None:
    planned, ran = moved[move]
    assert planned.warnings == ()
    assert planned.promise == Run.open(trained.root(move.split(" to ")[0])).state(STEP).promise
    assert compare(planned.promise, ran.line) == []
    wanted = trained.sources[move.split(" to ")[0]].losses
    assert ran.losses == pytest.approx({i: wanted[i] for i in (3, 4)}, rel=5e-6)


@pytest.mark.parametrize("move", [each for each in MOVES if "zero 3" not in str(each.values[0])])
def test_each_tensor_is_what_deepspeed_itself_makes_of_the_source(
    trained: Trained, moved: dict[str, tuple[Plan, Ran]], move: str
) -> None:
    """Its universal form has neither ranks nor stages; ZeRO 3 with tensor ranks has none."""
    found, known = (
        converted(trained.root(name), STEP, strict=False) for name in (move, move.split(" to ")[0])
    )
    assert {whole(name) for name in found} == {whole(name) for name in known}
    wanted = {whole(name): tensors for name, tensors in known.items()}
    assert all(same(tensors, wanted[whole(name)]) for name, tensors in found.items())


def whole(name: str) -> str:
    """What a parameter of a stage is called where there are none."""
    number, _, rest = name.partition(".")
    if not number.isdigit():
        return name.removeprefix("tied_modules.embed.")
    if number == "1":
        return f"position_embeddings.{rest}"
    return f"final_layernorm.{rest}" if number == "4" else f"layers.{int(number) - 2}.{rest}"


def test_names_that_do_not_meet_are_said(trained: Trained, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(trained.root("fresh one"), root)
    section = {"source": str(trained.root("stages")), "step": STEP}
    with pytest.raises(SurgeryError, match="by its name"):
        plan(Run.open(root), from_data({"transplant": section}))
    page = tmp_path / "names.yaml"
    section["names"] = str(page)
    for rules, reason in (
        ("2.{rest}: layers.0.{rest}\n  3.{rest}: layers.0.{rest}",
         "both 2[.](.*) and 3[.]\\1 would be layers[.]0[.]\\1 here"),
        ("'{i}.{rest}': layers.0.{rest}", "both sides must have the same words in braces"),
    ):  # fmt: skip
        page.write_text(f"rename:\n  {rules}\n")
        with pytest.raises((SurgeryError, UsageError), match=reason):
            plan(Run.open(root), from_data({"transplant": section}))


@pytest.fixture
def gated(trained: Trained, tmp_path: Path) -> Callable[[str], Path]:
    """Copies of steps of two tensor ranks whose arguments say that the model has SwiGLU."""

    def of(name: str) -> Path:
        root = Path(shutil.copytree(trained.root(name), tmp_path / name))
        for file in root.glob("global_step*/mp_rank_*_model_states.pt"):
            content = torch.load(file, weights_only=False)
            content["args"].swiglu = True
            torch.save(content, file)
        return root

    return of


def model(root: Path, rank: int) -> dict[str, torch.Tensor]:
    """The weights of one tensor rank."""
    file = root / f"global_step{STEP}/mp_rank_0{rank}_model_states.pt"
    return dict(torch.load(file, weights_only=False)["module"])


def test_gates_of_other_tensor_ranks_are_refused(
    gated: Callable[[str], Path], trained: Trained, tmp_path: Path
) -> None:
    """Each rank has rows of the gate and rows beside it: no block of the parameter."""
    one = Path(shutil.copytree(trained.root("fresh one"), tmp_path / "one"))
    section = {"source": str(gated("tensor")), "step": STEP}
    with pytest.raises(SurgeryError, match=r"dense_h_to_4h.*which block of it each rank has"):
        plan(Run.open(one), from_data({"transplant": section}))
    alike = gated("fresh tensor")
    surgery.apply(Run.open(alike), plan(Run.open(alike), from_data({"transplant": section})))
    for rank in (0, 1):
        mine, its = (
            torch.load(
                root / f"global_step{STEP}/mp_rank_0{rank}_model_states.pt", weights_only=False
            )
            for root in (alike, Path(section["source"]))
        )
        assert all(torch.equal(mine["module"][name], its["module"][name]) for name in its["module"])


def test_an_export_has_the_gates_of_all_ranks_first(
    gated: Callable[[str], Path], tmp_path: Path
) -> None:
    root = gated("tensor")
    export(Run.open(root), STEP, tmp_path / "out")
    ranks = [model(root, rank) for rank in (0, 1)]
    name = next(name for name in ranks[0] if name.endswith("dense_h_to_4h.weight"))
    halves = [rank[name].chunk(2) for rank in ranks]
    wanted = torch.cat([half[i] for i in (0, 1) for half in halves])
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert torch.equal(load_file(file)[name], wanted)
