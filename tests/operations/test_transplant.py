"""A transplant fills what a real DeepSpeed engine of another layout saved, bit for bit.

The witness is DeepSpeed's own converter: what it makes of the source and of the filled step is the
same. Where the arithmetic of both layouts is the same, so are the losses that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.plans.edits import Computed
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, build, launched, process_group, resume
from tests.support.saved_engines import saved
from tests.support.snapshot import exact_snapshot, snapshot
from tests.support.universal import converted, same

STEP = 6
BF16 = Options(dtype="bf16")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def transplanted(run: Path, source: Path, **more: Any) -> Plan:
    recipe = from_data({"transplant": {"source": str(source), **more}})
    made = plan(Run.open(run), recipe)
    surgery.apply(Run.open(run), made)
    return made


def weights(root: Path) -> dict[str, Any]:
    file = root / f"global_step{STEP}" / "mp_rank_00_model_states.pt"
    return dict(torch.load(file, weights_only=False)["module"])


def losses(root: Path, options: Options, steps: int = 5) -> list[float]:
    """Of the next updates of a new engine, which loads `latest`."""
    engine = build(options)
    assert engine.load_checkpoint(str(root))[0] is not None
    out = []
    for _ in range(steps):
        torch.manual_seed(engine.global_steps)
        x = torch.randn(2, 8).to(torch.bfloat16 if options.dtype == "bf16" else torch.float32)
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        out.append(float(loss.detach()))
    return out


PAIRS = {
    "zero1-to-zero0": ((Options(stage=1), 1), (Options(stage=0), 1)),
    "zero0-to-zero3": ((Options(stage=0), 1), (Options(stage=3), 1)),
    "zero1-to-zero2": ((Options(stage=1), 1), (Options(stage=2), 1)),
    "zero2-to-zero3-bf16": ((replace(BF16, stage=2), 1), (replace(BF16, stage=3), 1)),
    "zero3-to-zero1-bf16": ((replace(BF16, stage=3), 1), (replace(BF16, stage=1), 1)),
    "two-ranks-to-one": ((Options(stage=1), 2), (Options(stage=1), 1)),
    "one-to-two-ranks-bf16": ((replace(BF16, stage=1), 1), (replace(BF16, stage=2), 2)),
    "zero3-on-two-ranks-to-zero2": ((Options(stage=3), 2), (Options(stage=2), 1)),
    "zero1-to-zero3-on-two-ranks": ((Options(stage=1), 1), (Options(stage=3), 2)),
    "fp32-to-bf16": ((Options(stage=1), 1), (replace(BF16, stage=1), 1)),
    "bf16-to-fp32": ((replace(BF16, stage=1), 2), (Options(stage=1), 1)),
    "fp16-to-bf16": ((Options(stage=2, dtype="fp16"), 1), (replace(BF16, stage=1), 1)),
    "fp32-to-fp16": ((Options(stage=1), 1), (Options(stage=2, dtype="fp16"), 1)),
}


SAME = (
    "zero1-to-zero2", "zero2-to-zero3-bf16", "zero3-to-zero1-bf16", "zero1-to-zero0",
    "zero0-to-zero3",
)  # fmt: skip
"""Those whose arithmetic is the same: their losses are compared as well."""
BY_NIGHT = (*SAME, "fp32-to-bf16", "fp32-to-fp16")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] if name in BY_NIGHT else []) for name in PAIRS
])  # fmt: skip
@pytest.mark.long
def test_each_tensor_is_what_deepspeed_itself_makes_of_the_source(
    tmp_path: Path, name: str
) -> None:
    (options, ranks), (target, target_ranks) = PAIRS[name]
    source = saved(tmp_path / "source", options, ranks)
    run = saved(tmp_path / "run", target, target_ranks, 1)
    before, untouched = snapshot(run), exact_snapshot(source)
    made = transplanted(run, source)
    assert exact_snapshot(source) == untouched
    assert look.verify(Run.open(run), level=4).findings == ()
    if 0 not in (options.stage, target.stage):  # which it does not convert
        assert same(converted(run), converted(source))
    if 3 not in (options.stage, target.stage) and options.dtype == target.dtype:
        assert same(weights(run), weights(source))
    promise = made.promise
    assert promise is not None and (promise.step, promise.adam_step) == (STEP + 1, STEP)
    held = resume(run, target, 1) if target_ranks == 1 else launched("resume", run, target)[0]
    assert (held["step"], held["steps"]) == (STEP, [STEP])
    assert held["consumed_samples"] == promise.consumed_samples == STEP * 2
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before


@pytest.mark.parametrize("name", SAME)
@pytest.mark.long
def test_the_next_losses_are_those_of_the_source(tmp_path: Path, name: str) -> None:
    (options, _), (target, _) = PAIRS[name]
    source = saved(tmp_path / "source", options)
    run = saved(tmp_path / "run", target, steps=1)
    without = losses(run, target)
    transplanted(run, source)
    expected = losses(source, options)
    assert losses(run, target) == expected != without


@pytest.mark.parametrize("stage", [0, 3])
def test_there_and_back_is_the_step_that_was_saved(tmp_path: Path, stage: int) -> None:
    """Every tensor of the source, by torch.load; through another stage and another rank count."""
    source = saved(tmp_path / "source", Options(stage=1), 2)
    there = saved(tmp_path / "there", Options(stage=stage), 1, 1)
    back = saved(tmp_path / "back", Options(stage=1), 2, 1)
    transplanted(there, source)
    transplanted(back, there)
    for file in sorted((source / f"global_step{STEP}").glob("*.pt")):
        other = back / f"global_step{STEP}" / file.name
        one, two = (dict(_leaves(torch.load(f, weights_only=False))) for f in (file, other))
        assert one.keys() == two.keys()
        differing = [path for path in one if one[path] != two[path]]
        assert not differing, (file.name, differing)


def _leaves(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, (dict, list, tuple)):
            yield from _leaves(value, f"{at}.{key}")
        elif isinstance(value, torch.Tensor):
            yield f"{at}.{key}", value.tolist()
        elif isinstance(value, (bool, int, float, str)):
            yield f"{at}.{key}", value


def test_what_is_fused_is_split_and_fused_again(tmp_path: Path) -> None:
    """Rows one after another, over ranks that have any pieces of them."""
    pairs = {kind: [f"{one}.{kind}" for one in ("one", "two")] for kind in ("weight", "bias")}
    for rule in ("split", "fuse"):
        rules = "".join(f"  both.{kind}: [{', '.join(two)}]\n" for kind, two in pairs.items())
        (tmp_path / rule).write_text(f"{rule}:\n{rules}")
    source = saved(tmp_path / "source", Options(stage=2, model="fused"), 2)
    apart = saved(tmp_path / "apart", Options(stage=1, model="apart"), 1, 1)
    again = saved(tmp_path / "again", Options(stage=3, model="fused"), 2, 1)
    assert transplanted(apart, source, names=str(tmp_path / "split")).warnings == ()
    found, known = converted(apart), converted(source)
    for kind, names in pairs.items():
        for state, whole in known[f"both.{kind}"].items():
            assert same(torch.cat([found[name][state] for name in names]), whole)
    transplanted(again, apart, names=str(tmp_path / "fuse"))
    assert same(converted(again), known)


TURNED = {
    "one rank": ((1, 1), (1, 1)),
    "two ranks to one": ((2, 2), (1, 1)),
    "zero3 on two ranks": ((1, 1), (3, 2)),
}


@pytest.mark.parametrize("case", TURNED)
@pytest.mark.long
def test_a_transposed_matrix_is_that_of_torch_and_comes_back(tmp_path: Path, case: str) -> None:
    """Out of the pieces that data ranks have of it, in either direction, moments too."""
    (stage, ranks), (target, target_ranks) = TURNED[case]
    page = tmp_path / "names.yaml"
    page.write_text("transpose: [both.weight]\n")
    source = saved(tmp_path / "source", Options(stage=stage, model="fused"), ranks)
    run = saved(tmp_path / "run", Options(stage=target, model="turned"), target_ranks, 1)
    again = saved(tmp_path / "again", Options(stage=stage, model="fused"), ranks, 1)
    transplanted(run, source, names=str(page))
    known, found = converted(source), converted(run)
    for state, tensor in known["both.weight"].items():
        turned = tensor.reshape(16, 8).t().contiguous()
        assert same(found["both.weight"][state], turned.flatten())
    assert all(same(found[name], known[name]) for name in known if name != "both.weight")
    transplanted(again, run, names=str(page))
    assert same(converted(again), known)


def test_the_losses_go_on_with_a_transposed_matrix(tmp_path: Path) -> None:
    page = tmp_path / "names.yaml"
    page.write_text("transpose: ['both.{rest}']\n")
    own, other = Options(stage=1, model="fused"), Options(stage=1, model="turned")
    source, run = saved(tmp_path / "source", own), saved(tmp_path / "run", other, steps=1)
    assert "only a matrix is transposed" in refused(run, source, names=str(page))
    page.write_text("transpose: [both.weight]\n")
    without = losses(run, other)
    transplanted(run, source, names=str(page))
    assert losses(run, other) == pytest.approx(losses(source, own), rel=1e-6) != without


def test_a_larger_vocabulary_keeps_its_new_rows(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", Options(stage=1, model="words"), 2)
    run = saved(tmp_path / "run", Options(stage=1, model="more words"), 2, 1)
    fresh, known = converted(run, 1), converted(source)
    made = transplanted(run, source)
    assert any("embed.weight (12 of 20 rows)" in text for text in made.warnings)
    for state, tensor in converted(run)["embed.weight"].items():
        rows = tensor.reshape(20, 8)
        assert same(rows[:12].flatten(), known["embed.weight"][state])
        assert same(rows[12:], fresh["embed.weight"][state].reshape(20, 8)[12:])


def adam_steps(root: Path) -> dict[int, float]:
    """Of a step without ZeRO, by the number of the parameter."""
    file = root / f"global_step{STEP}" / "mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=False)["optimizer"]["state"]
    return {number: float(state["step"]) for number, state in states.items()}


def test_new_parameters_keep_their_own_step_where_there_is_one_for_each(tmp_path: Path) -> None:
    """And a step of such a run is a source with a step for each."""
    deeper = Options(stage=0, model="deeper")
    source = saved(tmp_path / "source", Options(stage=0))
    run, next = (saved(tmp_path / name, deeper, steps=1) for name in ("run", "next"))
    order = tmp_path / "order.txt"
    names = [f"{i}.weight" for i in (0, 2, 3)]
    order.write_text("\n".join([*names, "0.bias", "1.weight", "1.bias", "2.bias", "3.bias"]))
    (said, *_) = transplanted(run, source, order=str(order)).warnings
    assert said == "not in the source, and left as its trainer made it: 3.weight, 3.bias"
    assert adam_steps(run) == {i: 1.0 if i in (2, 7) else STEP for i in range(8)}
    held = resume(run, deeper, 1)
    assert held["steps"] == [1, STEP]
    assert transplanted(next, run, order=str(order)).promise is not None
    assert adam_steps(next) == adam_steps(run)
    zero = saved(tmp_path / "zero", Options(stage=1, model="deeper"), steps=1)
    (said, *_) = transplanted(zero, source, order=str(order)).warnings
    assert said.endswith("but for Adam's step, which is one for all: 3.weight, 3.bias")
    assert resume(zero, Options(stage=1, model="deeper"), 1)["steps"] == [STEP]
    last = saved(tmp_path / "last", Options(stage=1, model="deeper"), steps=1)
    transplanted(last, run, order=str(order))  # whose steps are 6 and 1
    assert resume(last, Options(stage=1, model="deeper"), 1)["steps"] == [STEP]


def test_a_smaller_vocabulary_leaves_rows_behind_and_says_so(tmp_path: Path) -> None:
    """Trainers pad it to a multiple of their ranks."""
    source = saved(tmp_path / "source", Options(stage=2, model="more words"), 2)
    run = saved(tmp_path / "run", Options(stage=1, model="words"), 1, 1)
    known = converted(source)
    assert "embed.weight (12 of 20 rows)" in refused(run, source, require_all=True)
    made = transplanted(run, source)
    assert any("left behind: embed.weight (12 of 20 rows)" in text for text in made.warnings)
    for state, tensor in converted(run)["embed.weight"].items():
        assert same(tensor.flatten(), known["embed.weight"][state].flatten()[: 12 * 8])


# --- refused, or named ---------------------------------------------------------------------------


def refused(run: Path, source: Path, **more: Any) -> str:
    before = exact_snapshot(run)
    with pytest.raises((SurgeryError, UsageError)) as error:
        transplanted(run, source, **more)
    assert exact_snapshot(run) == before
    return str(error.value)


def test_what_can_not_be_meant_is_refused_by_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", Options(stage=1))
    run = saved(tmp_path / "run", Options(stage=2), steps=1)
    assert "step 4 is not saved" in refused(run, source, step=4)
    assert "is the run that is filled" in refused(run, run)
    other = saved(tmp_path / "other", Options(stage=1, model="wide"), steps=1)
    assert "0.weight has the sizes [640, 8] and [8, 8]" in refused(other, source)
    numbered, more = (tmp_path / name for name in ("numbered", "more"))
    saved(numbered, Options(stage=0), steps=1)
    assert "numbers the states of its optimizer" in refused(numbered, saved(more, Options(stage=0)))
    order = tmp_path / "order.txt"
    order.write_text("0.weight\n1.weight\n")
    wrong = refused(numbered, more, order=str(order))
    assert (
        "parameter 1 has 64 elements, and 1.weight, which is number 1 by the order, has 8" in wrong
    )
    (source / f"global_step{STEP}" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "is not complete" in refused(run, source, step=STEP)


OTHERS: list[dict[str, Any]] = [
    {"set": {"lr": 1e-5}},
    {"reset": ["moments"]},
    {"rollback": {"to": 1}},
    {"skip": ["3-4"]},
]


@pytest.mark.parametrize("other", OTHERS)
def test_nothing_else_is_done_to_the_step_at_once(other: dict[str, Any]) -> None:
    """Both would read the step as it is, and one of them would be lost."""
    (key,) = other
    with pytest.raises(UsageError, match=f"both `transplant` and `{key}` change the step"):
        from_data({"transplant": {"source": "old"}, **other})
    from_data({"transplant": {"source": "old"}, "tensorboard": {"note": False}})


OTHER_STATES = [
    ("torch.RMSprop", "keeps"),
    ("torch.Adamax", "keeps"),
]


@pytest.mark.parametrize(("kind", "reason"), OTHER_STATES)
def test_an_optimizer_of_other_states_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    """They keep more than Adam's two moments, or other ones."""
    run = saved(tmp_path / "run", Options(stage=1, model="wide"), 1, 1)
    source = saved(tmp_path / "source", Options(stage=1, model="wide", optimizer=kind))
    assert reason in refused(run, source)
    assert refused(source, saved(tmp_path / "more", Options(stage=2, model="wide")))


def test_a_truncated_source_and_one_that_changes_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", Options(stage=1))
    run = saved(tmp_path / "run", Options(stage=2), steps=1)
    before = snapshot(run)
    made = plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))
    shard = source / f"global_step{STEP}" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shard.write_bytes(shard.read_bytes())
    with pytest.raises(SurgeryError, match="was changed since the plan"):
        surgery.apply(Run.open(run), made)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(SurgeryError, match=shard.name):
        transplanted(run, source)
    assert snapshot(run) == before


def test_the_receipt_names_the_source_its_step_and_its_files(tmp_path: Path) -> None:
    """As they were; and it does not grow with the pieces that they are read in."""
    source = saved(tmp_path / "source", Options(stage=1))
    run = saved(tmp_path / "run", Options(stage=2), 2, 1)
    made = transplanted(run, source)
    (receipt,) = Run.open(run).receipts()
    assert receipt.title == f"transplant step {STEP} of {source}"
    known = {each.file: each for each in made.assumes}
    assert receipt.read == tuple(known[each.file] for each in receipt.read)
    files = {(run / each.file).resolve() for each in receipt.read}
    assert files == set((source / f"global_step{STEP}").iterdir())
    tensors = [c.new for c in receipt.changes if isinstance(getattr(c, "new", None), Computed)]
    assert tensors and all(new.terms == () and new.size for new in tensors)


def test_a_parameter_of_one_run_alone_is_named(tmp_path: Path) -> None:
    """What the new model has more stays as its trainer made it, moments and all."""
    small = saved(tmp_path / "small", Options(stage=1))
    deep = saved(tmp_path / "deep", Options(stage=1, model="deeper"), steps=1)
    fresh = converted(deep, 1)
    assert "not every parameter" in refused(deep, small, require_all=True)
    made = transplanted(deep, small)
    assert any("3.weight, 3.bias" in text and "left as" in text for text in made.warnings)
    found, known = converted(deep), converted(small)
    assert all(same(found[name], known[name]) for name in known)
    assert all(same(found[name], fresh[name]) for name in ("3.weight", "3.bias"))
    large = saved(tmp_path / "large", Options(stage=1, model="deeper"))
    run = saved(tmp_path / "run", Options(stage=2), steps=1)
    made = transplanted(run, large)
    assert any("3.weight, 3.bias" in text and "left behind" in text for text in made.warnings)
