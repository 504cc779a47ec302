"""A Llama in OLMo-core's own Trainer on two ranks, whose tensors FSDP shares, and from there in
transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support import llamas
from tests.support.launch import run_module
from tests.support.olmo_llama import ADAM, BARE, MORE, SHAPE, STEP, copied, olmo
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.olmo,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
PAGE = "llama-huggingface-olmo-core"
"""transformers decays the embeddings, and OLMo-core the norms: each keeps its own settings."""
Seen = tuple[dict[str, dict[str, torch.Tensor]], list[torch.Tensor], list[float]]
"""What the ranks loaded, the words of each update from then on, and its loss."""


def on_two(root: Path, stop: int) -> Seen:
    out = root.with_name("seen.pt")
    words = ("tests.support.olmo_ranks", root, stop, out)
    run_module(*words, ranks=2, environment={"PYTHONWARNINGS": "ignore"})
    loaded, batches, losses = torch.load(out)
    assert sorted(losses) == sorted(batches)
    return loaded, [batches[i] for i in sorted(batches)], [losses[i] for i in sorted(losses)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    """Runs of each library, and what the one on two ranks goes on with behind its step."""
    folder = tmp_path_factory.mktemp("olmo")
    llamas.hugging_face(folder / "hugging_face", STEP, **ADAM, **SHAPE)
    llamas.hugging_face(folder / "fresh hugging_face", 1, seed=7, **ADAM, **SHAPE)
    olmo(folder / "fresh olmo", 1)  # makes the data, which two ranks would write at once
    loaded, batches, losses = on_two(folder / "two", STEP + MORE)
    for name, step in (("fresh two", 1), ("two", STEP)):
        shutil.copytree(folder / "two", folder / "kept" / name)
        for other in (folder / "kept" / name).glob("step*"):
            if other.name != f"step{step}":
                shutil.rmtree(other)
    shutil.rmtree(folder / "two")
    for name in ("fresh two", "two"):
        (folder / "kept" / name).rename(folder / name)
    return folder, (loaded, batches[STEP:], losses[STEP:])


@pytest.fixture(scope="module")
def runs(made: tuple[Path, Seen]) -> Path:
    return made[0]


def filled(run: Path, source: Path, order: Path) -> None:
    before = snapshot(run)
    section = {
        "source": str(source), "step": STEP, "names": PAGE, "order": str(order / "order.txt"),
        "settings": "template",
    }  # fmt: skip
    made = plan(Run.open(run), from_data({"transplant": section}))
    assert not any("left" in text for text in made.warnings), made.warnings
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert look.verify(Run.open(run), level=4).findings == ()


def test_two_ranks_go_on_with_the_losses_of_transformers(runs: Path, tmp_path: Path) -> None:
    """Having loaded what OLMo-core's converter makes of its tensors, bit for bit."""
    from olmo_core.nn.hf.convert import convert_state_from_hf
    from safetensors.torch import load_file

    run, step = copied(runs, "fresh two", tmp_path), runs / "hugging_face" / f"checkpoint-{STEP}"
    filled(run, step.parent, step.parent)
    loaded, batches, losses = on_two(run, STEP + MORE)
    config = llamas.llama(**SHAPE).config
    order = (step.parent / "order.txt").read_text().split("\n")
    states = torch.load(step / "optimizer.pt")["state"]
    known = {kind: {order[i]: state[kind] for i, state in states.items()}
             for kind in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    for kind, each in {"weights": load_file(step / "model.safetensors"), **known}.items():
        for name, tensor in convert_state_from_hf(config, each, model_type="llama").items():
            assert torch.equal(loaded[name][kind], tensor), (name, kind)
    assert len(losses) == MORE
    assert losses == pytest.approx(llamas.gone_on(step, batches, BARE), rel=1e-5)


def test_transformers_goes_on_with_the_losses_of_two_ranks(
    made: tuple[Path, Seen], tmp_path: Path
) -> None:
    runs, (_, batches, losses) = made
    run = tmp_path / "transformers"
    shutil.copytree(runs / "fresh hugging_face", run)
    filled(run, runs / "two", run)
    assert len(losses) == MORE
    assert llamas.gone_on(run / f"checkpoint-{STEP}", batches, BARE) == pytest.approx(
        losses, rel=1e-5
    )
