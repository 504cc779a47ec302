"""metaseq and fairseq: every shard and its copy in checkpoint_last get torch's new numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from tests.support.fairseq_files import NAMES, PIECES, make_run, resumed, size_of
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

KINDS = ("weights", "exp_avg", "exp_avg_sq")
State = dict[str, dict[str, torch.Tensor]]


def held(root: Path, stem: str) -> State:
    """What torch's own optimizer and `torch.load` have of each shard."""
    out: State = {}
    for suffix in NAMES:
        adam, document = resumed(root / f"{stem}{suffix}.pt")
        states = list(adam.state.values())
        out[suffix] = {
            "weights": torch.cat(list(document["model"].values())),
            **{kind: torch.cat([state[kind] for state in states]) for kind in KINDS[1:]},
        }
    return out


Named = dict[str, dict[str, torch.Tensor]]


def consolidated(state: State, part: int) -> Named:
    """Of one model part, each parameter by its name, as fairscale's `consolidate_shard_weights`
    joins them: the pieces of the ranks without padding, cut by the numbers of elements."""
    out: Named = {}
    at = 0
    for flat, (names, numels) in PIECES.items():
        for kind in KINDS:
            pieces = []
            for rank in (0, 1):
                size, padding = size_of(flat, rank)
                whole = state[f"-model_part-{part}-shard{rank}"][kind]
                pieces.append(whole[at : at + size - padding])
            for name, tensor in zip(names, torch.cat(pieces).split(numels), strict=True):
                out.setdefault(name, {})[kind] = tensor
        at += size_of(flat)[0]
    return out


def operated(root: Path, recipe: dict[str, Any]) -> State:
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    assert look.verify(Run.open(root), level=4).findings == ()
    for suffix in NAMES:  # what a restart loads is a copy, byte for byte
        last = root / f"checkpoint_last{suffix}.pt"
        assert last.read_bytes() == (root / f"checkpoint_30{suffix}.pt").read_bytes()
    return held(root, "checkpoint_last")


def same(found: State, wanted: State) -> None:
    differ = [
        (suffix, kind)
        for suffix in NAMES
        for kind in KINDS
        if not torch.equal(found[suffix][kind], wanted[suffix][kind])
    ]
    assert differ == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.mark.parametrize("moments", ["last", "average", "zero"])
@pytest.mark.long
def test_an_average_is_torchs(run: Path, moments: str) -> None:
    before, old = snapshot(run), [held(run, f"checkpoint_{step}") for step in (10, 20, 30)]
    found = operated(run, {"average": {"last": 3, "moments": moments}})
    wanted = {}
    for suffix in NAMES:
        of = [state[suffix] for state in old]
        mean = {
            kind: (sum(each[kind].double() for each in of) / 3).to(of[0][kind].dtype)
            for kind in KINDS
        }
        zero = {kind: torch.zeros_like(mean[kind]) for kind in KINDS}
        ways = {"last": of[-1], "average": mean, "zero": zero}
        wanted[suffix] = {**ways[moments], "weights": mean["weights"]}
        assert mean["weights"].dtype == torch.float16
    same(found, wanted)
    take_back(run, before)


def test_a_scale_a_graft_and_a_clip_are_torchs(run: Path) -> None:
    before, old, first = snapshot(run), held(run, "checkpoint_30"), held(run, "checkpoint_10")
    found = operated(run, {"scale": {"params": "decoder", "by": 0.9}})
    for state in found.values():
        assert state["weights"].abs().sum() > 0
    same(found, {
        suffix: {**state, "weights": (state["weights"].float() * 0.9).half()}
        for suffix, state in old.items()
    })  # fmt: skip
    take_back(run, before)
    found = operated(run, {"graft": {"step": 10}})
    same(found, {s: {**first[s], "weights": old[s]["weights"]} for s in NAMES})
    adam, _ = resumed(run / f"checkpoint_last{NAMES[0]}.pt")
    assert [float(state["step"]) for state in adam.state.values()] == [10] * len(PIECES)
    take_back(run, before)
    found = operated(run, {"clip_moments": {"above": 2}})
    parts = [(consolidated(old, part), consolidated(found, part)) for part in (0, 1)]
    for name in parts[0][0]:
        square = torch.cat([before[name]["exp_avg_sq"] for before, _ in parts])
        limit = square[square > 0].median() * 2  # the shards are pieces of one parameter
        for was, now in parts:
            assert torch.equal(now[name]["exp_avg_sq"], was[name]["exp_avg_sq"].clamp(max=limit))
    take_back(run, before)


def test_a_graft_works_from_and_to_a_step_without_copies(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", folders=True)
    before = snapshot(root)
    for recipe in ({"graft": {"step": 20}}, {"average": {"last": 2}}):
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        take_back(root, before)
    for suffix in NAMES:
        assert (root / "checkpoint_30" / f"checkpoint{suffix}.pt").is_file()


Q_PROJ = "decoder.layers.0.self_attn.q_proj.weight"


def test_parameters_of_a_flat_one_are_told_apart(run: Path) -> None:
    """By the names, sizes and padding that fairscale saves: one parameter of one model part lies in
    the pieces of two ranks, and neighbours and padding stay."""
    before, old, first = snapshot(run), held(run, "checkpoint_30"), held(run, "checkpoint_10")

    def expect(found: State, change: dict[str, Any]) -> None:
        for part in (0, 1):
            was, then, now = (consolidated(state, part) for state in (old, first, found))
            assert was.keys() == now.keys() and Q_PROJ in was
            for name, kinds in was.items():
                for kind, tensor in kinds.items():
                    make = change.get(kind) if name == Q_PROJ else None
                    wanted = tensor if make is None else make(tensor, then[name][kind])
                    assert torch.equal(now[name][kind], wanted), (name, kind)
                    assert make is None or not torch.equal(wanted, tensor)

    pattern = "q_proj.weight"
    found = operated(run, {"scale": {"params": pattern, "by": 0.5, "moments": "scale"}})
    expect(found, {
        "weights": lambda own, _: (own.float() * 0.5).half(),
        "exp_avg": lambda own, _: own * 0.5, "exp_avg_sq": lambda own, _: own * 0.25,
    })  # fmt: skip
    take_back(run, before)
    found = operated(run, {"graft": {"step": 10, "params": pattern}})
    expect(found, {kind: lambda _, other: other for kind in KINDS[1:]})
    take_back(run, before)
    found = operated(run, {"reset": ["moments"], "moments": {"params": pattern}})
    expect(found, {kind: lambda own, _: torch.zeros_like(own) for kind in KINDS[1:]})
    take_back(run, before)


def edited(root: Path, change: Any) -> None:
    for file in root.glob("checkpoint_*.pt"):
        document = torch.load(file, weights_only=False)
        change(document)
        torch.save(document, file)


def nameless(document: dict[str, Any]) -> None:
    for module in document["shard_metadata"]["param_metadata"]:
        del module["params"]["flat_param_0"]["names"]


def in_two_groups(document: dict[str, Any]) -> None:
    state = document["last_optimizer_state"]
    (group,) = state["param_groups"]
    state["param_groups"] = [{**group, "params": [i]} for i in group["params"]]


def of_fairseq(document: dict[str, Any]) -> None:
    document["fsdp_metadata"] = document.pop("shard_metadata")


def longer(document: dict[str, Any]) -> None:
    document["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]["padding"] += 1


@pytest.mark.parametrize("change", [nameless, in_two_groups])
def test_what_the_metadata_does_not_say_is_refused(run: Path, change: Any) -> None:
    """Without names, or moments that may be in another order than the model's."""
    edited(run, change)
    for recipe in (
        {"graft": {"step": 10, "params": "weight"}},
        {"scale": {"params": "decoder", "by": 2.0, "moments": "scale"}},
    ):
        with pytest.raises(SurgeryError, match=r"does not say which parameter|have no names"):
            surgery.plan(Run.open(run), from_data(recipe))


def test_fairseq_calls_its_metadata_otherwise(run: Path) -> None:
    edited(run, of_fairseq)
    for suffix in NAMES:
        shutil.copyfile(run / f"checkpoint_30{suffix}.pt", run / f"checkpoint_last{suffix}.pt")
    old = held(run, "checkpoint_30")
    found = operated(run, {"reset": ["moments"], "moments": {"params": "q_proj.weight"}})
    for part in (0, 1):
        was, now = consolidated(old, part), consolidated(found, part)
        for name in was:
            reset = not torch.equal(now[name]["exp_avg"], was[name]["exp_avg"])
            assert reset == (name == Q_PROJ)


def test_metadata_of_another_size_is_refused(run: Path) -> None:
    edited(run, longer)
    with pytest.raises(SurgeryError, match="its metadata says otherwise"):
        surgery.plan(Run.open(run), from_data({"scale": {"params": "decoder", "by": 2.0}}))


SHARED = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
UNSET = "decoder.embed_positions._float_tensor"


def with_modules_of_fairseq(document: dict[str, Any]) -> None:
    """Embeddings that two modules share, saved for each, and a buffer whose number nobody set."""
    document["cfg"]["model"] = {"share_decoder_input_output_embed": True}
    embeddings = torch.arange(6.0) * document["optimizer_history"][-1]["num_updates"]
    document["model"] |= {name: embeddings.clone() for name in SHARED}
    document["model"][UNSET] = torch.tensor([float("nan")])


def test_what_modules_share_is_edited_in_each_copy(tmp_path: Path) -> None:
    """And no number that nobody set keeps a step from being sound, or from an average."""
    root = make_run(tmp_path / "run", suffixes=[""])
    edited(root, with_modules_of_fairseq)
    shutil.copyfile(root / "checkpoint_30.pt", root / "checkpoint_last.pt")
    assert look.verify(Run.open(root), level=4).findings == ()
    before = snapshot(root)
    for recipe, factor in (
        ({"scale": {"params": "embed_tokens", "by": 0.5}}, 15),
        ({"average": {"steps": [10, 30]}}, 20),
    ):
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        for name in ("30", "last"):
            model = torch.load(root / f"checkpoint_{name}.pt")["model"]
            for shared in SHARED:
                assert torch.equal(model[shared], torch.arange(6.0) * factor)
            assert model[UNSET].isnan().all()
        take_back(root, before)
    with pytest.raises(UsageError, match="no parameter matches"):
        plan = {"scale": {"params": "output_projection", "by": 0.5}}
        surgery.plan(Run.open(root), from_data(plan))
