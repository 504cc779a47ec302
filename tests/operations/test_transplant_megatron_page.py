"""The page for a GPT with Megatron-DeepSpeed's names and the bundled trainer's: of any sizes, as an
engine of DeepSpeed and the bundled trainer save them, each weight is where both have it, and there
and back is the step that was saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.gathered import loaded
from tests.support.in_process import one_rank
from tests.support.many_ranks import train_one
from tests.support.megatron_gpt import Sizes, engine, save, update

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
PAGE, STEP, BATCH = "gpt-megatron-deepspeed-bundled", 3, 8


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    with one_rank() as found:
        yield found


def megatron(root: Path, sizes: Sizes, steps: int, seed: int) -> Path:
    made = engine(seed, sizes)
    maker = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        shape = (BATCH, sizes.seq_length + 1)
        words = torch.randint(sizes.words, shape, generator=maker)
        update(made, words[:, :-1], words[:, 1:])
    save(made, root, steps * BATCH)
    return root


def bundled(root: Path, sizes: Sizes, corpus: Path, stage: int, device: Any) -> Path:
    """One step; words are padded to a multiple that is their number."""
    own = {**sizes._asdict(), "make_vocab_size_divisible_by": sizes.words}
    del own["words"]
    more = {"save": root, "data": corpus, "zero_stage": stage, "train_iters": 1, "save_interval": 1}
    train_one([f"{key}={value}" for key, value in {**own, **more}.items()], device)
    return root


def filled(run: Path, source: Path) -> Path:
    recipe = from_data({"transplant": {"source": str(source), "step": STEP, "names": PAGE}})
    made = plan(Run.open(run), recipe)
    assert not any("left" in text or "larger" in text for text in made.warnings), made.warnings
    surgery.apply(Run.open(run), made)
    return run


def called(name: str) -> str:
    """What the bundled trainer calls a parameter of Megatron's."""
    for old in ("language_model.", "embedding.", "encoder.", "self_attention.", "mlp."):
        name = name.replace(old, "")
    return name.replace("output_layer", "head")


def weights(root: Path) -> dict[str, torch.Tensor]:
    (file,) = root.glob("global_step*/mp_rank_00_model_states.pt")
    found: dict[str, torch.Tensor] = {}

    def walk(tree: Any, at: str) -> None:
        for key, value in tree.items():
            name = f"{at}.{key}".lstrip(".")
            if isinstance(value, torch.Tensor):
                found[called(name)] = value
            else:
                walk(value, name)

    walk(torch.load(file, weights_only=False)["module"], "")
    return found


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    heads = draw(st.integers(1, 3))
    return Sizes(
        draw(st.integers(1, 3)), heads * draw(st.integers(1, 6)), heads, draw(st.integers(1, 9)),
        draw(st.integers(2, 9)), 256 + draw(st.integers(0, 9)), draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.parametrize(
    "examples", [pytest.param(4, id="thin"), pytest.param(25, id="dense", marks=pytest.mark.slow)]
)
def test_each_weight_is_where_both_have_it_and_all_comes_back(
    corpus: Path, device: Any, examples: int
) -> None:
    @given(sizes(), st.integers(1, 2))
    @settings(
        max_examples=examples, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    def holds(own: Sizes, stage: int) -> None:
        with TemporaryDirectory() as place:
            folder = Path(place)
            source = megatron(folder / "source", own, STEP, 1)
            there = filled(bundled(folder / "there", own, corpus, stage, device), source)
            back = filled(megatron(folder / "back", own, 1, 2), there)
            known, found = (loaded(root, STEP) for root in (source, back))
            wanted, moved = weights(source), weights(there)
        assert wanted.keys() == moved.keys()
        assert [name for name in wanted if not torch.equal(wanted[name], moved[name])] == []
        assert known.keys() == found.keys() and known
        assert [path for path in known if not torch.equal(known[path], found[path])] == []

    holds()
