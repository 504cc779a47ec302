"""Data, tensor and pipeline ranks: the same losses, real shards, and moves between them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import load
from tests.support.in_process import InProcess, one_rank
from tests.support.launch import REPO
from tests.support.many_ranks import TINY, UNIVERSAL, Ran, run_all, train_one
from tests.support.trained_run import edit, step_back
from train import kernels
from train.config import Config, load_config
from train.errors import TrainError
from train.model import GPT

pytestmark = pytest.mark.long

TP, PP = "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"
ALONE = ["tensor_model_parallel_size=1", "pipeline_model_parallel_size=1"]
ODD = ["untie_embeddings=true", "ffn_hidden_size=63"]  # whose biases two ranks can't halve
UNTIED, RECOMPUTED = "untie_embeddings=true", "checkpoint_activations=true"
TWO = {
    **{f"data-zero-{stage}": [f"zero_stage={stage}"] for stage in range(4)},
    **{f"tensor-zero-{stage}": [f"zero_stage={stage}", TP] for stage in range(4)},
    **{f"pipeline-zero-{stage}": [f"zero_stage={stage}", PP] for stage in range(2)},
    "tensor-untied": [TP, UNTIED],
    "pipeline-untied": [PP, UNTIED],
    "tensor-recomputed": [TP, RECOMPUTED],
    "pipeline-recomputed": [PP, RECOMPUTED],
    "data-zero-3-odd": ["zero_stage=3", *ODD],
}
FOUR = {"tensor-data": [TP], "pipeline-data": [PP], "tensor-pipeline": [TP, PP]}
ONE = {"one": [], "one-untied": [UNTIED], "one-odd": ODD}
LENGTH = ["train_iters=4", "save_interval=2", "micro_batch_size=2"]
# A run on some ranks → what it goes on as, on how many.
MOVES = {
    "one to two data ranks": ("one", 2, []),
    "one to two tensor ranks": ("one", 2, [TP]),
    "one to two stages": ("one", 2, [PP]),
    "two data ranks of zero 3 to one": ("data-zero-3", 1, ["zero_stage=3"]),
    "two tensor ranks to one": ("tensor-zero-1", 1, ALONE),
    "two stages to one": ("pipeline-zero-1", 1, ALONE),
    "two stages to two tensor ranks": ("pipeline-zero-1", 2, [TP]),
}
AGAIN = {"tensor-zero-1": [TP], "pipeline-zero-1": [PP], "tensor-zero-3": ["zero_stage=3", TP]}


ZEROS, ACTIVATIONS = "num-zeros/num-zeros", "activation-norm/activation-norm"


@dataclass
class Trained:
    """Runs by name: where they are, and what they said."""

    folder: Path
    corpus: Path
    ran: dict[str, Ran]

    def job(self, name: str, overrides: list[str]) -> list[str]:
        return [f"save={self.folder / name}", f"data={self.corpus}", *LENGTH, *overrides]

    def on_one_rank(self, jobs: dict[str, list[str]]) -> dict[str, Ran]:
        with one_rank() as device:
            return {name: Ran(*train_one(job, device)) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trained:
    """Every run of ONE and TWO, trained."""
    made = Trained(tmp_path_factory.mktemp("parallel"), corpus, {})
    made.ran = made.on_one_rank({name: made.job(name, own) for name, own in ONE.items()})
    jobs = {name: made.job(name, own) for name, own in TWO.items()}
    made.ran |= run_all(2, jobs, made.folder / "two")
    return made


@pytest.fixture(scope="module")
def moved(trained: Trained) -> dict[str, Ran]:
    """Each run of MOVES and AGAIN, gone on from step 2."""
    from train.universal import convert

    jobs: dict[int, dict[str, list[str]]] = {1: {}, 2: {}}
    with one_rank():
        for name, (source, ranks, overrides) in MOVES.items():
            copy = trained.folder / name.replace(" ", "-")
            shutil.copytree(trained.folder / source, copy)
            step_back(copy, 2)
            own = (ONE | TWO)[source]
            convert(load_config(TINY, trained.job(copy.name, own)))
            jobs[ranks][name] = [*trained.job(copy.name, overrides), UNIVERSAL]
    for source, overrides in AGAIN.items():
        shutil.copytree(trained.folder / source, trained.folder / f"{source}-again")
        step_back(trained.folder / f"{source}-again", 2)
        jobs[2][source] = trained.job(f"{source}-again", overrides)
    return trained.on_one_rank(jobs[1]) | run_all(2, jobs[2], trained.folder / "moved")


def alone_of(name: str) -> str:
    """The run of ONE with the model of this one."""
    return next((f"one-{kind}" for kind in ("untied", "odd") if kind in name), "one")


def same(ran: Ran, wanted: Ran) -> bool:
    """The same losses to five digits, in the iterations that `ran` has."""
    parts = {i: abs(loss / wanted.losses[i] - 1) for i, loss in ran.losses.items()}
    return bool(parts) and max(parts.values()) < 5e-6


def statistics(run: Path) -> dict[str, list[float]]:
    """What the fused optimizer and the last layer logged: tag → the value of each iteration."""
    events = EventAccumulator(str(run / "tensorboard"), {"tensors": 0})
    events.Reload()
    tags = [*(f"optimizer/{tag}" for tag in ("variance_l1", "variance_abs_max", "weight_l2",
                                             "update_l2", "update_rms")),
            ZEROS, ACTIVATIONS]  # fmt: skip
    return {
        tag: [event.tensor_proto.float_val[0] for event in events.Tensors(tag)]
        for tag in tags
        if tag in events.Tags()["tensors"]
    }


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", TWO)
def test_the_statistics_of_two_ranks_count_each_weight_once(trained: Trained, name: str) -> None:
    if (reason := kernels.load()) is not None:
        pytest.skip(f"no native kernels: {reason}")
    alone = statistics(trained.folder / alone_of(name))
    assert len(alone["optimizer/weight_l2"]) == 4
    found = statistics(trained.folder / name)
    # A flat slice of ZeRO 3 does not tell which weights the other tensor rank holds too.
    anywhere = {ACTIVATIONS: alone[ACTIVATIONS]}
    wanted = anywhere if name == "tensor-zero-3" else alone
    assert found.keys() == wanted.keys()
    for tag, values in wanted.items():
        # An element that rounding makes 0 on one side only: the untied have 4,000 that none makes.
        near = 4 if tag == ZEROS else 0
        assert found[tag] == pytest.approx(values, rel=1e-4, abs=near)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_have_the_losses_of_one(trained: Trained, name: str) -> None:
    alone = trained.ran[alone_of(name)]
    assert len(trained.ran[name].losses) == 4
    assert same(trained.ran[name], alone), (trained.ran[name], alone)


def test_four_ranks_have_the_losses_of_one(trained: Trained) -> None:
    jobs = {name: trained.job(name, own) for name, own in FOUR.items()}
    ran = run_all(4, jobs, trained.folder / "four")
    for name in FOUR:
        assert len(ran[name].losses) == 4
        assert same(ran[name], trained.ran["one"]), (name, ran[name])
    state = Run.open(trained.folder / "tensor-pipeline").checkpoint(4).state()
    assert state.dialect == "deepspeed · zero 1 · tp 2 · pp 2 · dp 1"


@pytest.mark.slow
def test_sixteen_bits_have_nearly_the_losses_of_one_rank(trained: Trained) -> None:
    dtypes = {"bf16": ["dtype=bf16"], "fp16": ["dtype=fp16", "initial_loss_scale=1024"]}
    jobs = {
        f"{layout}-{name}": [*own, *dtype]
        for name, dtype in dtypes.items()
        for layout, own in (("tensor", [TP]), ("pipeline", [PP]))
    }
    ran = run_all(2, {name: trained.job(name, job) for name, job in jobs.items()}, trained.folder)
    for name in jobs:
        assert ran[name].losses == pytest.approx(trained.ran["one"].losses, rel=1e-3)


@pytest.mark.parametrize("name", AGAIN)
def test_a_resumed_run_goes_on_bit_for_bit(
    trained: Trained, moved: dict[str, Ran], name: str
) -> None:
    whole = trained.ran[name].losses
    assert moved[name].losses == {i: whole[i] for i in (3, 4)}


@pytest.mark.parametrize("name", MOVES)
def test_a_universal_checkpoint_goes_on_with_other_ranks(
    trained: Trained, moved: dict[str, Ran], name: str
) -> None:
    source, _, _ = MOVES[name]
    assert set(moved[name].losses) == {3, 4}
    assert same(moved[name], trained.ran[source])
    run = Run.open(trained.folder / source)
    assert compare(run.checkpoint(2).state().promise, moved[name].line) == []


def test_a_pipeline_saves_a_file_for_each_layer_and_tensor_rank(trained: Trained) -> None:
    names = {p.name for p in (trained.folder / "pipeline-zero-1" / "global_step4").glob("layer_*")}
    assert names == {f"layer_0{layer}-model_00-model_states.pt" for layer in range(5)}
    for rank in range(2):
        path = trained.folder / "pipeline-zero-1" / "global_step4"
        state = torch.load(path / f"mp_rank_0{rank}_model_states.pt", weights_only=False)
        args = state["args"]
        assert state["module"] is None
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, 2)
        assert args.data_parallel_size == 1


@pytest.mark.parametrize(
    ("name", "overrides", "told"),
    [
        ("tensor-zero-1", [], "2 ranks (tensor 2 x pipeline 1 x data 1), but 1 rank run"),
        ("pipeline-zero-0", [], "2 ranks (tensor 1 x pipeline 2 x data 1), but 1 rank run"),
        ("data-zero-2", [], "2 ranks, but 1 rank run"),
        ("tensor-zero-1", [TP], "1 ranks run, but tensor_model_parallel_size 2"),
    ],
)
def test_other_ranks_are_refused(
    trained: Trained, in_process: InProcess, name: str, overrides: list[str], told: str
) -> None:
    stage = f"zero_stage={name[-1]}"
    with pytest.raises(TrainError) as refused:
        in_process.prepare(trained.folder / name, *LENGTH, stage, *overrides)
    said = refused.value.render()
    assert told in said
    assert "torchrun --nproc_per_node 2 -m train" in said
    assert len(said.splitlines()) in (3, 4)


def test_without_zero_any_number_of_data_ranks_resumes(
    trained: Trained, in_process: InProcess
) -> None:
    told = in_process.resumed_line(trained.folder / "data-zero-0", *LENGTH, "zero_stage=0")
    assert '"step": 5' in told


def test_a_universal_checkpoint_of_an_edited_step_is_refused(trained: Trained) -> None:
    from train.universal import convert
    from train.universal_source import find_universal

    copy = trained.folder / "edited"
    shutil.copytree(trained.folder / "one", copy)
    with pytest.raises(TrainError, match="no universal form of global_step4"):
        find_universal(copy / "global_step4")
    with one_rank():
        convert(load_config(TINY, trained.job("edited", [])))
    assert find_universal(copy / "global_step4").name == "global_step4_universal"
    run = Run.open(copy)
    surgery.apply(run, plan(run, load(REPO / "recipes" / "lower-clip.yaml", [])))
    with pytest.raises(TrainError, match="global_step4 has changed since it was converted"):
        find_universal(copy / "global_step4")


def test_what_deepspeed_cannot_convert_is_refused(trained: Trained) -> None:
    from train.universal import convert

    for name in ("data-zero-0", "tensor-zero-3"):
        before = sorted(trained.folder.joinpath(name).iterdir())
        with one_rank(), pytest.raises(TrainError, match=r"DeepSpeed (can't|converts)"):
            convert(load_config(TINY, trained.job(name, TWO[name])))
        assert sorted(trained.folder.joinpath(name).iterdir()) == before


def test_a_missing_layer_is_missed_by_trainer_and_surgeon(
    trained: Trained, in_process: InProcess
) -> None:
    copy = trained.folder / "hole"
    shutil.copytree(trained.folder / "pipeline-zero-1", copy)
    name = "layer_03-model_00-model_states.pt"
    (copy / "global_step4" / name).unlink()
    assert any(name in finding for finding in look.verify(Run.open(copy), 4).findings)
    with pytest.raises(TrainError, match=f"{name} missing"):
        in_process.prepare(copy, *LENGTH)


def foreign(state: dict[str, Any]) -> None:
    """As another trainer on an older DeepSpeed would have saved it."""
    del state["trainer"], state["checkpoint_parallel_dimensions"]


def test_another_trainers_layers_are_known_by_their_parameters(trained: Trained) -> None:
    copy = trained.folder / "foreign"
    shutil.copytree(trained.folder / "pipeline-zero-1", copy)
    for rank in range(2):
        edit(copy / "global_step4" / f"mp_rank_0{rank}_model_states.pt", foreign)
    assert Run.open(copy).checkpoint(4).state().dialect == "deepspeed · zero 1 · pp 2 · dp 1"
    assert look.verify(Run.open(copy), 4).findings == ()
    (copy / "global_step4" / "layer_03-model_00-model_states.pt").unlink()
    (finding,) = look.verify(Run.open(copy), 4).findings
    assert finding == (
        "layer_03-model_00-model_states.pt is missing: mp_rank_01_model_states.pt has parameters "
        "in layer 3"
    )


def test_sizes_that_do_not_multiply_are_found(trained: Trained) -> None:
    def stretch(state: dict[str, Any]) -> None:
        state["checkpoint_parallel_dimensions"]["pp_degree"] = 3

    copy = trained.folder / "stretched"
    shutil.copytree(trained.folder / "tensor-zero-1", copy)
    edit(copy / "global_step4" / "mp_rank_01_model_states.pt", stretch)
    findings = look.verify(Run.open(copy), 4).findings
    wrong = "mp_rank_01_model_states.pt: tensor 2 x pipeline 3 is not its mp_world_size 2"
    assert wrong in findings
    assert any("shards disagree on checkpoint_parallel_dimensions" in text for text in findings)


def test_recomputing_runs_each_layer_twice_with_the_same_gradients() -> None:
    gradients, calls = [], []
    tokens = torch.arange(32)[None]
    for recompute in (False, True):
        options = {"hidden_dropout": 0.1, "checkpoint_activations": recompute}
        model = GPT(Config(save="run", data="data", **options))  # type: ignore[arg-type]
        seen: list[int] = []
        layer = model.layers[0].input_layernorm
        layer.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        torch.manual_seed(3)
        model(tokens, tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
        calls.append(len(seen))
    assert calls == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["zero_stage=2", PP], "zero_stage is 2; it must be 0 or 1 with pipeline"),
        (["zero_stage=0", TP, "dtype=bf16"], "at least 1 with dtype bf16"),
        (["tensor_model_parallel_size=3"], "num_attention_heads is 2; it must be a multiple of"),
        (["pipeline_model_parallel_size=3"], "at most num_layers 2"),
    ],
)
def test_impossible_layouts_are_refused_at_once(overrides: list[str], told: str) -> None:
    with pytest.raises(TrainError, match=told):
        load_config(TINY, ["save=x", "data=y", *overrides])
