"""Moments of 8 bits become numbers, and numbers codes, as bitsandbytes itself makes them.

Its CPU kernel looks codes up in steps that are too coarse for second moments; the codes of a
transplant are those of its kernel for any device. Run by `make test-formats`.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats import Codes, Place
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction.coding import codes_of, scales_of
from tests.support.deepspeed_engine import Options, build, process_group, train
from tests.support.hugging_face import trainer
from tests.support.launch import run_module
from tests.support.saved_engines import saved
from tests.support.snapshot import exact_snapshot, snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
NESTED, STEP, BLOCK = "__bnb_optimizer_quant_state__", 6, 256
PLAIN = Options(model="wide")
CODED = replace(PLAIN, optimizer="adamw8bit")
ORDER = ("0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias")
"""Of the two param groups."""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


# --- what the library makes ----------------------------------------------------------------------


def encode(numbers: torch.Tensor, book: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, by the kernel that serves every device without one of its own."""
    import bitsandbytes  # noqa: F401  registers it

    kernel = torch.ops.bitsandbytes.quantize_blockwise.default
    found = kernel._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, numbers, book, BLOCK)
    return found[0], found[1]


def decode(state: dict[str, Any], which: int) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_blockwise

    codes = state[f"state{which}"].reshape(-1)
    if codes.dtype == torch.float32:
        return torch.as_tensor(codes)
    book, scales = state[f"qmap{which}"], state[f"absmax{which}"]
    return torch.as_tensor(dequantize_blockwise(codes, absmax=scales, code=book, blocksize=BLOCK))


def states(root: Path, step: int) -> list[dict[str, Any]]:
    """Those of all files and param groups, in order."""
    out: list[dict[str, Any]] = []
    for path in sorted((root / f"global_step{step}").glob("*.pt")):
        tree = torch.load(path, weights_only=False)
        outer = tree.get("optimizer_state_dict", tree)
        held = outer.get("base_optimizer_state", outer.get("optimizer_state_dict"))
        held = held or tree.get("optimizer")
        if held is not None:
            out += [state.get(NESTED, state) for _, state in sorted(held["state"].items())]
    return out


def moments(root: Path, step: int = STEP) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The numbers of each state."""
    return [
        (decode(state, 1), decode(state, 2))
        if "state1" in state
        else (state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1))
        for state in states(root, step)
    ]


# --- the runs ------------------------------------------------------------------------------------


def transplanted(run: Path, source: Path, numbered: bool = False) -> Plan:
    """The run, filled, taken back and filled again."""
    order = run.with_name("order.txt")
    order.write_text("\n".join(ORDER))
    before, untouched = snapshot(run), exact_snapshot(source)
    section = {"source": str(source), "order": str(order) if numbered else ""}
    made = plan(Run.open(run), from_data({"transplant": section}))
    surgery.apply(Run.open(run), made)
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
    surgery.apply(Run.open(run), surgery.plan_redo(Run.open(run)))
    assert exact_snapshot(source) == untouched
    assert look.verify(Run.open(run), level=4).findings == ()
    return made


def same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) > 0 and all(
        torch.equal(one, other) for pair in zip(ones, others, strict=True)
        for one, other in zip(*pair, strict=True)
    )  # fmt: skip


STAGES = [(0, 0), (1, 1), (2, 2), (3, 3), (1, 2)]


@pytest.mark.parametrize(("stage", "target"), STAGES)
def test_codes_become_the_numbers_that_the_library_makes_of_them(
    tmp_path: Path, stage: int, target: int
) -> None:
    source = saved(tmp_path / "source", replace(CODED, stage=stage))
    run = saved(tmp_path / "run", replace(PLAIN, stage=target), steps=1)
    assert any("absmax1" in state for state in states(source, STEP))
    transplanted(run, source, not stage)
    assert same(moments(run), moments(source))


@pytest.mark.parametrize(("stage", "target"), STAGES)
def test_numbers_become_the_codes_that_the_library_makes_of_them(
    tmp_path: Path, stage: int, target: int
) -> None:
    """What is small stays numbers, as the library keeps it."""
    source = saved(tmp_path / "source", replace(PLAIN, stage=stage))
    run = saved(tmp_path / "run", replace(CODED, stage=target), steps=1)
    transplanted(run, source, not stage)
    coded = 0
    for state, numbers in zip(states(run, STEP), moments(source), strict=True):
        for which, wanted in zip((1, 2), numbers, strict=True):
            found = state[f"state{which}"].reshape(-1)
            if found.dtype == torch.float32:
                assert torch.equal(found, wanted)
                continue
            codes, scales = encode(wanted, state[f"qmap{which}"])
            assert torch.equal(found, codes) and torch.equal(state[f"absmax{which}"], scales)
            coded += 1
    assert coded >= 2


@pytest.mark.parametrize("stage", [0, 1])
def test_codes_of_one_layout_are_the_same_codes(tmp_path: Path, stage: int) -> None:
    """Or stand for the same numbers to a code's width, as each block has another scale."""
    source = saved(tmp_path / "source", replace(CODED, stage=stage))
    run = saved(tmp_path / "run", replace(CODED, stage=stage), steps=1)
    transplanted(run, source, not stage)
    for state, wanted in zip(states(run, STEP), states(source, STEP), strict=True):
        for which in (1, 2):
            numbers = decode(wanted, which)
            if f"absmax{which}" in wanted:
                codes, scales = encode(numbers, wanted[f"qmap{which}"])
                assert torch.equal(state[f"state{which}"].reshape(-1), codes)
                assert torch.equal(state[f"absmax{which}"], scales)
            else:
                assert torch.equal(decode(state, which), numbers)


def test_blocks_go_over_parameters_and_ranks(tmp_path: Path) -> None:
    """Two ranks' flat codes become one rank's numbers, and go back."""
    source = saved(tmp_path / "source", replace(CODED, stage=1), 2)
    run = saved(tmp_path / "run", replace(PLAIN, stage=1), 1, 1)
    transplanted(run, source)
    ones, others = moments(source), moments(run)
    groups = len(others)
    for group in range(groups):
        pieces = ones[group::groups]
        for which in (0, 1):
            whole = torch.cat([piece[which] for piece in pieces])
            size = others[group][which].numel()
            assert torch.equal(whole[:size], others[group][which])
    back = saved(tmp_path / "back", replace(CODED, stage=2), 2, 1)
    transplanted(back, run)
    for state, wanted in zip(states(back, STEP), moments(source), strict=True):
        for which in (1, 2):
            if f"absmax{which}" in state:
                codes, _ = encode(wanted[which - 1], state[f"qmap{which}"])
                assert torch.equal(state[f"state{which}"].reshape(-1), codes)


@pytest.mark.parametrize(("options", "other"), [(CODED, PLAIN), (PLAIN, CODED)])
def test_the_next_losses_are_near_those_of_the_source(
    tmp_path: Path, options: Options, other: Options
) -> None:
    """To the quantization: nothing else differs, and with fresh moments they would be far off."""
    source = saved(tmp_path / "source", options)
    run = saved(tmp_path / "run", other, steps=1)
    transplanted(run, source)
    engines = {root: build(o) for root, o in ((source, options), (run, other))}
    weights = []
    for root, engine in engines.items():
        assert engine.load_checkpoint(str(root))[0] is not None
        before = [p.detach().clone() for p in engine.module.parameters()]
        train(engine, 5)
        weights.append([(p.detach() - old) for p, old in
                        zip(engine.module.parameters(), before, strict=True)])  # fmt: skip
    for one, two in zip(*weights, strict=True):
        assert torch.dist(one, two) < 0.1 * one.norm()


def test_the_trainer_of_hugging_face_goes_on_with_codes_and_back(tmp_path: Path) -> None:
    """Which numbers its states: the largest matrices of a GPT-2 are coded, the rest is numbers."""
    words = {"plain": (), "coded": ("--optim", "adamw_bnb_8bit")}
    runs = {name: tmp_path / name for name in words}
    for name, more in words.items():
        run_module(HUGGING_FACE, runs[name], 4, "--width", 64, *more)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(numbered_by_the_trainer(runs["plain"])))
    for name, source in (("coded", "plain"), ("plain", "coded")):
        run = Path(shutil.copytree(runs[name], tmp_path / f"{name} filled"))
        shutil.rmtree(run / "checkpoint-4")
        section = {"source": str(runs[source]), "order": str(order)}
        surgery.apply(Run.open(run), plan(Run.open(run), from_data({"transplant": section})))
        held, wanted = (
            torch.load(root / "checkpoint-4/optimizer.pt")["state"] for root in (run, runs[source])
        )
        coded = 0
        for number, other in wanted.items():
            state, other = ({**each, **each.get(NESTED, {})} for each in (held[number], other))
            assert int(state["step"]) == int(other["step"]) == 4
            for which, kind in enumerate(("exp_avg", "exp_avg_sq"), 1):
                numbers = other[kind].reshape(-1) if kind in other else decode(other, which)
                if kind in state or state[f"state{which}"].dtype == torch.float32:
                    mine = state[kind if kind in state else f"state{which}"]
                    assert torch.equal(mine.reshape(-1), numbers)
                else:
                    codes, scales = encode(numbers, state[f"qmap{which}"])
                    assert torch.equal(state[f"state{which}"].reshape(-1), codes)
                    assert torch.equal(state[f"absmax{which}"], scales)
                    coded += 1
        assert (coded > 0) == (name == "coded")
        run_module(HUGGING_FACE, run, 6, "--width", 64, *words[name])
        assert Run.open(run).latest() == 6  # its dropout draws other numbers: no losses to compare


HUGGING_FACE = "tests.support.hugging_face"


def numbered_by_the_trainer(run: Path) -> list[str]:
    wanted = Namespace(
        run=run, stop=4, max_steps=12, scheduler="cosine", optim="adamw_torch", width=64
    )
    made = trainer(wanted)
    made.create_optimizer()
    names = {id(p): name for name, p in made.model.named_parameters()}
    return [names[id(p)] for group in made.optimizer.param_groups for p in group["params"]]


# --- the arithmetic ------------------------------------------------------------------------------


@given(
    st.integers(1, 1100), st.booleans(), st.floats(0.01, 8), st.integers(0, 2**31), st.booleans()
)
@example(256, True, 0.0, 0, True)
@settings(max_examples=150, deadline=None)
def test_codes_and_scales_are_those_of_the_library(
    size: int, signed: bool, spread: float, seed: int, zeros: bool
) -> None:
    """Over sizes, spreads of the exponents, and blocks of zeros."""
    from bitsandbytes.functional import create_dynamic_map

    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, size, generator=generator)
    numbers = draw[0] * torch.exp(spread * draw[1])
    numbers = numbers if signed else numbers.abs()
    if zeros:
        numbers[: size // 2] = 0
    book = create_dynamic_map(signed=signed)
    codes, scales = encode(numbers, book)
    found = codes_of(numbers.numpy(), book.numpy(), BLOCK)
    assert found.tolist() == codes.tolist()
    assert scales_of(numbers.numpy(), BLOCK).tolist() == scales.tolist()


@given(st.integers(4096, 100_000), st.sampled_from([256, 2048]))
@example(5000, 256)
def test_the_block_of_a_scale_follows_from_their_numbers(size: int, block: int) -> None:
    """The last one may lack elements: 5,000 have 20 scales, and are not cut in twenty."""
    sizes = [size, -(-size // block), 256]
    places = [Place(Path(), (), Tensor("uint8", "0", n, 0, (n,), (1,))) for n in sizes]
    assert Codes(*places).block == block


# --- refused -------------------------------------------------------------------------------------


def test_numbers_that_no_code_stands_for_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", replace(PLAIN, stage=1))
    run = saved(tmp_path / "run", replace(CODED, stage=1), steps=1)
    (file,) = (source / f"global_step{STEP}").glob("*optim_states.pt")
    tree = torch.load(file, weights_only=False)
    held = tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    held["exp_avg"].view(-1)[300] = float("inf")
    torch.save(tree, file)
    before = exact_snapshot(run)
    with pytest.raises(SurgeryError, match="NaN or infinite, so no codes are made of it"):
        surgery.apply(
            Run.open(run), plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))
        )
    assert exact_snapshot(run) == before


@pytest.mark.parametrize(("name", "reason"), [
    ("Lion8bit", "which are not the two moments of Adam"),
    ("AdEMAMix8bit", "which are not the two moments of Adam"),
])  # fmt: skip
def test_another_optimizer_of_the_library_is_refused(
    tmp_path: Path, name: str, reason: str
) -> None:
    import bitsandbytes

    source = saved(tmp_path / "source", replace(CODED, stage=0))
    run = saved(tmp_path / "run", replace(PLAIN, stage=1), steps=1)
    (file,) = (source / f"global_step{STEP}").glob("*.pt")
    tree = torch.load(file, weights_only=False)
    base = tree["optimizer"]
    weight = torch.nn.Parameter(torch.randn(640, 8))
    made = getattr(bitsandbytes.optim, name)([weight])
    weight.grad = torch.randn_like(weight)
    made.step()
    base["state"][0] = made.state_dict()["state"][0]
    torch.save(tree, file)
    with pytest.raises(SurgeryError, match=reason):
        plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))


@pytest.mark.parametrize("side", ["source", "run"])
@pytest.mark.parametrize(("name", "kept"), [
    ("AdamW8bit", "torchao.optim.subclass_8bit.OptimState8bit"),
    ("AdamW4bit", "torchao.optim.subclass_4bit.OptimState4bit"),
    ("AdamWFp8", "torchao.optim.subclass_fp8.OptimStateFp8"),
])  # fmt: skip
def test_states_in_objects_are_refused_by_their_class(
    tmp_path: Path, name: str, kept: str, side: str
) -> None:
    """torchao's, whose codes are in a class of its own."""
    import torchao.optim

    roots = {
        "source": saved(tmp_path / "source", replace(PLAIN, stage=0)),
        "run": saved(tmp_path / "run", replace(PLAIN, stage=0), steps=1),
    }
    (file,) = roots[side].glob("global_step*/*.pt")
    tree = torch.load(file, weights_only=False)
    weight = torch.nn.Parameter(torch.randn(640, 8))
    made = getattr(torchao.optim, name)([weight])
    weight.grad = torch.randn_like(weight)
    made.step()
    tree["optimizer"]["state"][0] = made.state_dict()["state"][0]
    torch.save(tree, file)
    before = snapshot(roots["run"])
    with pytest.raises(SurgeryError) as refused:
        plan(Run.open(roots["run"]), from_data({"transplant": {"source": str(roots["source"])}}))
    assert f"{file.name}: " in str(refused.value) and kept in str(refused.value)
    assert snapshot(roots["run"]) == before
