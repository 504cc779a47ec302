"""A Llama goes on in OLMo-core's own Trainer, and from there in transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.support import llamas
from tests.support.olmo_llama import ADAM, BARE, MORE, SHAPE, STEP, copied, olmo
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.olmo,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmo")
    llamas.hugging_face(folder / "hugging_face", STEP, **ADAM, **SHAPE)
    llamas.hugging_face(folder / "fresh hugging_face", 1, seed=7, **ADAM, **SHAPE)
    olmo(folder / "olmo", STEP)
    olmo(folder / "fresh olmo", 1)
    return folder


def filled(run: Path, source: Path, order: Path) -> Plan:
    before = snapshot(run)
    section = {
        "source": str(source), "step": STEP, "names": "llama-huggingface-olmo-core",
        "order": str(order / "order.txt"), "settings": "template",
    }  # fmt: skip
    made = plan(Run.open(run), from_data({"transplant": section}))
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()
    return made


def test_its_trainer_has_what_its_own_converter_makes(runs: Path, tmp_path: Path) -> None:
    """Bit for bit; and the losses that transformers has on the same words."""
    from olmo_core.nn.hf.convert import convert_state_from_hf
    from safetensors.torch import load_file

    run, step = copied(runs, "fresh olmo", tmp_path), runs / "hugging_face" / f"checkpoint-{STEP}"
    filled(run, step.parent, step.parent)
    seen = olmo(run, STEP + MORE)
    config = llamas.llama(**SHAPE).config
    order = (step.parent / "order.txt").read_text().split("\n")
    states = torch.load(step / "optimizer.pt")["state"]
    known = {kind: {order[i]: state[kind] for i, state in states.items()}
             for kind in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    for kind, tensors in {"weights": load_file(step / "model.safetensors"), **known}.items():
        for name, tensor in convert_state_from_hf(config, tensors, model_type="llama").items():
            assert torch.equal(seen.loaded[name][kind], tensor), (name, kind)
    assert sorted(seen.losses) == list(range(STEP + 1, STEP + MORE + 1))
    words = [seen.words[i] for i in sorted(seen.words)]
    assert list(seen.losses.values()) == pytest.approx(llamas.gone_on(step, words, BARE), rel=1e-5)


def test_transformers_goes_on_with_its_losses(runs: Path, tmp_path: Path) -> None:
    own, run = copied(runs, "olmo", tmp_path), tmp_path / "transformers"
    shutil.copytree(runs / "fresh hugging_face", run)
    filled(run, runs / "olmo", run)
    seen = olmo(own, STEP + MORE)
    words = [seen.words[i] for i in sorted(seen.words)]
    losses = llamas.gone_on(run / f"checkpoint-{STEP}", words, BARE)
    assert losses == pytest.approx(list(seen.losses.values()), rel=1e-5)


def saved_once_more(run: Path, to: Path) -> Path:
    """The step, loaded by OLMo-core's own Trainer and saved by it into another run."""
    from tests.support.olmo_core import Start, trainer

    live, _ = trainer(to, STEP, Start(scheduler=None, lr=llamas.RATE))
    live.load_checkpoint(run)
    live.save_checkpoint()
    return to


def of_transformers(root: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Weights, moments and Adam's steps of a Trainer's step, by kind and name."""
    from safetensors.torch import load_file

    step = root / f"checkpoint-{STEP}"
    order = (root / "order.txt").read_text().split("\n")
    weights = load_file(step / "model.safetensors")
    found = {("weights", name): each for name, each in weights.items()}
    states = torch.load(step / "optimizer.pt")["state"]
    return found | {
        (kind, order[i]): each for i, state in states.items() for kind, each in state.items()
    }


def test_through_its_own_loader_and_saver_and_back_is_the_step_that_was_saved(
    runs: Path, tmp_path: Path
) -> None:
    """Bit for bit: its Trainer reads what was filled, and writes what is filled from."""
    source, run = runs / "hugging_face", copied(runs, "fresh olmo", tmp_path)
    filled(run, source, source)
    through = saved_once_more(run, tmp_path / "through")
    back = tmp_path / "back"
    shutil.copytree(runs / "fresh hugging_face", back)
    filled(back, through, back)
    known, found = of_transformers(source), of_transformers(back)
    assert known.keys() == found.keys() and len({kind for kind, _ in known}) == 4
    assert [key for key in known if not torch.equal(known[key], found[key])] == []


@pytest.mark.parametrize(("source", "target"), [("hugging_face", "olmo"), ("olmo", "hugging_face")])
def test_groups_of_other_parameters_are_refused(
    runs: Path, tmp_path: Path, source: str, target: str
) -> None:
    """The embeddings decay in transformers and not in OLMo-core, the norms the other way round."""
    run = copied(runs, f"fresh {target}", tmp_path)
    section = {
        "source": str(runs / source), "names": "llama-huggingface-olmo-core",
        "order": str(runs / "hugging_face" / "order.txt"),
    }  # fmt: skip
    with pytest.raises(SurgeryError, match="weight_decay differs between the param groups") as why:
        plan(Run.open(run), from_data({"transplant": section}))
    assert "--settings template" in str(why.value.next)
