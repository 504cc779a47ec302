"""GPT-2 of transformers, and a GPT with the names of Megatron-DeepSpeed, go on in the bundled
trainer, and back, by the pages that are shipped: each with the losses that the other one has next
on the same samples.

Run by `make test-formats`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.support.in_process import one_rank
from tests.support.launch import by_step
from tests.support.llamas import EPS, RATE
from tests.support.many_ranks import train_one

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
STEP, MORE, BATCH = 3, 4, 8
OWN = (
    f"lr={RATE}", "lr_decay_style=constant", "lr_warmup_samples=0", f"adam_eps={EPS}",
    "adam_beta2=0.999", "clip_grad=0", "save_interval=1", "fused_optimizer=never",
)  # fmt: skip


def batches(corpus: Path, file: Path, then: int = STEP * BATCH) -> Path:
    """What the bundled trainer sees up to STEP, and from sample number `then` on."""
    from train.data import SampleStream
    from train.indexed_dataset import IndexedDataset

    stream = SampleStream(IndexedDataset(str(corpus)), 32, 1234, 256)
    both = zip(stream.batch(0, STEP * BATCH), stream.batch(then, MORE * BATCH), strict=True)
    inputs, targets = (torch.cat([torch.from_numpy(each.copy()) for each in two]) for two in both)
    torch.save({"batch": BATCH, "inputs": inputs, "targets": targets}, file)
    return file


class Trainers:
    """Both, on the same samples; a run whose name begins with "fresh" began with other weights."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.corpus = folder, corpus
        self.batches = batches(corpus, folder / "batches.pt")

    def train(self, kind: str, root: Path, stop: int, seed: int = 0) -> dict[int, float]:
        if kind == "bundled":
            words = [f"save={root}", f"data={self.corpus}", f"train_iters={stop}", *OWN]
            with one_rank() as device:
                return train_one([*words, f"init_method_std={0.02 + seed / 100}"], device)[1]
        told: tuple[str | Path, ...] = ("tests.support.gpt2s", "conv1d", root)
        if kind == "megatron":
            told = ("tests.support.megatron_gpt", root)
        return by_step(*told, stop, seed, self.batches)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trainers:
    made = Trainers(tmp_path_factory.mktemp("trainers"), corpus)
    for kind in ("bundled", *PAGES):
        made.train(kind, made.folder / kind, STEP)
        made.train(kind, made.folder / f"fresh {kind}", 1, 7)
    return made


PAGES = {
    "transformers": "gpt2-huggingface-bundled", "megatron": "gpt-megatron-deepspeed-bundled",
}  # fmt: skip


def filled(run: Path, source: Path, other: str) -> Plan:
    section = {"source": str(source), "step": STEP, "names": PAGES[other]}
    for root in (run, source):
        if (root / "order.txt").exists():
            section["order"] = str(root / "order.txt")
    made = plan(Run.open(run), from_data({"transplant": section}))
    surgery.apply(Run.open(run), made)
    assert look.verify(Run.open(run), level=4).findings == ()
    return made


PAIRS = [pair for other in PAGES for pair in ((other, "bundled"), ("bundled", other))]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_next_losses_are_those_of_the_source(
    trainers: Trainers, tmp_path: Path, source: str, target: str
) -> None:
    run, on = tmp_path / "run", tmp_path / "on"
    shutil.copytree(trainers.folder / f"fresh {target}", run)
    shutil.copytree(trainers.folder / source, on)
    made = filled(run, trainers.folder / source, target if source == "bundled" else source)
    assert not any("left" in text for text in made.warnings), made.warnings
    seen = None if made.promise is None else made.promise.consumed_samples
    if seen is not None:  # the Trainer counts no samples: what the bundled one goes on with
        batches(trainers.corpus, trainers.batches, seen)
    wanted = trainers.train(source, on, STEP + MORE)
    batches(trainers.corpus, trainers.batches)
    assert sorted(wanted) == list(range(STEP + 1, STEP + MORE + 1))
    assert trainers.train(target, run, STEP + MORE) == pytest.approx(wanted, rel=2e-6)


def test_there_and_back_is_the_step_that_was_saved(trainers: Trainers, tmp_path: Path) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    shutil.copytree(trainers.folder / "fresh bundled", run)
    shutil.copytree(trainers.folder / "fresh transformers", back)
    filled(run, trainers.folder / "transformers", "transformers")
    filled(back, run, "transformers")
    steps = [root / f"checkpoint-{STEP}" for root in (trainers.folder / "transformers", back)]
    known, again = (load_file(step / "model.safetensors") for step in steps)
    assert known.keys() == again.keys()
    assert all(torch.equal(known[name], again[name]) for name in known)
    wanted, states = (torch.load(step / "optimizer.pt")["state"] for step in steps)
    for number, state in wanted.items():
        assert all(torch.equal(states[number][key], state[key]) for key in state), number


def test_the_nested_weights_of_megatron_come_back_too(trainers: Trainers, tmp_path: Path) -> None:
    """Every tensor of the step; of the flat ones all but the padding, of which there is none."""
    run, back = tmp_path / "run", tmp_path / "back"
    shutil.copytree(trainers.folder / "fresh bundled", run)
    shutil.copytree(trainers.folder / "fresh megatron", back)
    filled(run, trainers.folder / "megatron", "megatron")
    filled(back, run, "megatron")
    known, found = (tensors(root) for root in (trainers.folder / "megatron", back))
    nested = [path for path in known if "language_model" in path and "module" in path]
    assert known.keys() == found.keys() and len(nested) == 28
    assert [path for path in known if not torch.equal(known[path], found[path])] == []


def tensors(root: Path) -> dict[tuple[object, ...], torch.Tensor]:
    """By file and key path."""
    out: dict[tuple[object, ...], torch.Tensor] = {}

    def walk(tree: object, path: tuple[object, ...]) -> None:
        if isinstance(tree, torch.Tensor):
            out[path] = tree
        items = tree.items() if isinstance(tree, dict) else ()
        for key, value in enumerate(tree) if isinstance(tree, (list, tuple)) else items:
            walk(value, (*path, key))

    for file in sorted((root / f"global_step{STEP}").glob("*.pt")):
        walk(torch.load(file, weights_only=False), (file.name,))
    return out
