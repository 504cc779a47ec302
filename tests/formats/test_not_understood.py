"""An operation needs only what it touches: a value of a kind that is not known here is neither
damage nor a reason to refuse what does not need it.

One value of a checkpoint becomes another kind of thing, at any place of its optimizer, scheduler
and trainer state; torch's own reader is asked after each surgery."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, report, surgery
from ckptsurgeon.errors import DamagedFile, NotUnderstood, SurgeryError, VerificationFailed
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.style import Style
from ckptsurgeon.surgery import fork
from tests.formats import matrix
from tests.support import odd_leaves
from tests.support.odd_leaves import (
    IN_JSON,
    ODD,
    OF_EVERY_RANK,
    STRANGER,
    Keys,
    make_odd,
    places,
    read,
)
from tests.support.snapshot import differs, snapshot

LOOK = Style(False, 100)
Made = Callable[[str], Path]
RUNS: Mapping[str, tuple[Any, str]] = {
    "Hugging Face": (matrix.hugging_face, ""),
    "one file": (odd_leaves.one_file, "torch:ckpt_{step}.pt=optimizer"),
}
MORE = ("Megatron-LM legacy", "DeepSpeed ZeRO 1", "nanotron", "bundled trainer")
"""Formats whose readers take long to import."""
FILES = (
    "optimizer.pt", "scheduler.pt", "trainer_state.json", "ckpt_*.pt", "model_optim_rng.pt",
    "*_optim_states.pt", "optimizer_*.pt", "lr_scheduler_*.pt", "lr_scheduler.pt",
)  # fmt: skip
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "rollback": {"rollback": {"to": "FIRST"}},
    "lr": {"set": {"lr": "0.5x"}},
    "betas": {"set": {"beta1": 0.8, "beta2": 0.9}},
    "eps": {"set": {"eps": 1e-6}},
    "weight_decay": {"set": {"weight_decay": 0.3}},
    "moments": {"reset": ["moments"]},
    "exp_avg": {"reset": ["moments"], "moments": {"only": "exp_avg"}},
    "cooldown": {"cooldown": {"steps": 2}},
    "scale": {"scale": {"params": "weight", "by": 0.9}},
    "skip": {"skip": ["100-110"]},
    "repair-latest": {"repair_latest": {}},
    "truncate-logs": {"logs": {"after": 3}},
    "fork": {},
}
NO_FIELD = ("num_steps", "last_epoch", "single_partition_of_fp32_groups")
"""Where an odd value is another one of its kind: a position may be -1, and weights are tensors."""
NEEDS_NO_FIELD = ("rollback", "repair-latest", "truncate-logs", "fork", "skip")
"""They go on, whatever is odd in `FILES`."""
KEPT_NOWHERE = "keeps no skip ranges"
"""What `skip` says in a sound run, too, where the trainer has them on its command line."""
SETTINGS = ("betas", "eps", "weight_decay")
"""Recipes that touch a key of the param groups and nothing else."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Makes a run of each kind once, to be copied."""
    folder = tmp_path_factory.mktemp("odd")

    def make(name: str) -> Path:
        root = folder / name.replace(" ", "-") / "run"
        if not root.exists():
            RUNS[name][0](root) if name in RUNS else matrix.make(name, root)
            lines = (json.dumps({"step": step, "loss": 2 / step}) for step in range(1, 7))
            (root / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return root

    yield make


def candidates(root: Path, format: str) -> list[tuple[str, Keys]]:
    """Every place of the latest step that may become odd: its file from the run, and its path."""
    run = Run.open(root, format)
    files = run.format.files(run.root, run.latest())
    return [
        (run.relative(file), path)
        for file in files
        if any(file.match(name) for name in FILES)
        for path in places(read(file))
        if not {*NO_FIELD} & {*path}
    ]


def recipe(name: str, run: Run) -> Any:
    return from_data(matrix._filled(RECIPES[name], {"FIRST": run.steps()[0]}))


def looks(run: Run) -> str:
    """What the commands that only look say; none of them fails, or finds anything wrong."""
    step = run.latest()
    state, checkpoint = run.state(step), run.checkpoint(step)
    found = look.verify(run)
    assert found.findings == ()
    assert diagnose(run) == []
    report.checkpoint_json(run, checkpoint)
    return "\n".join(
        (
            report.status(run, state, None, LOOK),
            report.checkpoint(run, checkpoint, LOOK),
            report.verification(found, LOOK),
        )
    )


def operate(root: Path, format: str, name: str) -> SurgeryError | None:
    """Plan, apply, verify and undo; the refusal, or None where all of it worked."""
    run = Run.open(root, format)
    if name == "repair-latest":
        for pointer in run.format.pointer_files(run.root):
            pointer.unlink(missing_ok=True)
    before = snapshot(root)
    if name == "fork":
        branch = root.parent / "branch"
        fork.fork(run, run.latest(), branch, recipe(name, run), "copy")
        assert look.verify(Run.open(branch, format)).findings == ()
        shutil.rmtree(branch)
        assert snapshot(root) == before
        return None
    try:
        plan = surgery.plan(run, recipe(name, run), allow_globals=[STRANGER])
    except SurgeryError as error:
        assert not isinstance(error, (DamagedFile, VerificationFailed)), error.what
        assert snapshot(root) == before
        return error
    if plan.empty:
        return None
    receipt = surgery.apply(run, plan)
    findings = look.verify(Run.open(root, format)).findings
    assert findings == (), findings
    for file in run.format.files(run.root, run.latest()):
        if file.suffix in (".pt", ".json"):
            read(file)
    again = Run.open(root, format)
    surgery.apply(again, surgery.plan_undo(again, receipt.id))
    assert differs(snapshot(root), before, times=False) is None
    return None


def apart(name: str, file: str, path: Keys) -> bool:
    """Whether the recipe touches nothing near the place."""
    if name in NEEDS_NO_FIELD:
        return True
    if name in SETTINGS:
        keys = [key for key in path if isinstance(key, str)]
        return file.endswith("scheduler.pt") or "state" in keys
    return name == "moments" and file.endswith(("scheduler.pt", "trainer_state.json"))


def alike(root: Path, format: str, file: str, path: Keys) -> list[str]:
    """`file` and the files of its step that have the same keys, as of other ranks."""
    found = candidates(root, format)
    return [each for each, keys in found if keys == path and each[-3:] == file[-3:]]


def check(root: Path, format: str, odd: tuple[str, Keys], kind: str, name: str) -> None:
    """The law, for one odd place and one recipe."""
    file, path = odd
    every = kind in OF_EVERY_RANK and len(path) > 1  # of None alone: saved without an optimizer
    files = alike(root, format, file, path) if every else [file]
    for each in files:
        make_odd(root / each, path, kind)
    assert "damaged" not in looks(Run.open(root, format))
    refused = operate(root, format, name)
    if refused is None:
        return
    said = f"{refused.what} {refused.next}"
    assert "damaged" not in said
    if name == "skip" and KEPT_NOWHERE in said:
        return
    assert not apart(name, file, path), said
    if isinstance(refused, NotUnderstood):
        assert any(Path(each).name in said for each in files)
        assert [key for key in path if isinstance(key, str)][-1] in said


def hold(made: Made, root: Path, data: st.DataObject, names: Sequence[str]) -> None:
    """The law for what hypothesis draws, on a copy at `root`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = data.draw(st.sampled_from(names))
        format = RUNS[run][1] if run in RUNS else ""
        odd = data.draw(st.sampled_from(candidates(made(run), format)))
        kind = data.draw(st.sampled_from(IN_JSON if odd[0].endswith(".json") else sorted(ODD)))
        name = data.draw(st.sampled_from(sorted(RECIPES)))
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(made(run), root)
        check(root, format, odd, kind, name)


QUICK = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@QUICK
@given(data=st.data())
@pytest.mark.long
def test_an_odd_value_stops_only_what_needs_it(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    hold(made, tmp_path_factory.getbasetemp() / "held", data, sorted(RUNS))


@pytest.mark.slow
@settings(QUICK, max_examples=600, derandomize=False)
@given(data=st.data())
def test_an_odd_value_anywhere_stops_only_what_needs_it(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    hold(made, tmp_path_factory.getbasetemp() / "held", data, [*RUNS, *MORE])


# --- what strangers save -------------------------------------------------------------------------

SCHEDULES: Mapping[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda adam: torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / 100),
    "CosineAnnealingLR": lambda adam: torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40),
    "LinearLR": lambda adam: torch.optim.lr_scheduler.LinearLR(adam, 0.5, 1.0, 10),
    "OneCycleLR": lambda adam: torch.optim.lr_scheduler.OneCycleLR(adam, 0.05, total_steps=40),
}


def trained(root: Path, optimizer: Any, model: Any, schedule: Any = None) -> Path:
    """Steps 2, 4 and 6 as the Hugging Face Trainer keeps them, by default with a LambdaLR."""
    schedule = SCHEDULES["LambdaLR"](optimizer) if schedule is None else schedule
    for step in range(1, 7):
        model(torch.rand(3, 4)).pow(2).sum().backward()
        optimizer.step()
        schedule.step()
        if step % 2 == 0:
            folder = root / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
            torch.save(schedule.state_dict(), folder / "scheduler.pt")
            (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    return root


def with_tensor_lr(name: str) -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))  # type: ignore[arg-type]
    return model, adam, SCHEDULES[name](adam)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_that_is_a_tensor_is_the_number_in_it(tmp_path: Path, name: str) -> None:
    """As torchao's optimizers have it; the scheduler keeps tensors, too. The real classes load the
    edited files, and use what was promised at the next update and at the one after it."""
    model, adam, schedule = with_tensor_lr(name)
    root = trained(tmp_path / "run", adam, model, schedule)
    run = Run.open(root)
    looks(run)
    plain = rates(root, name)
    made = surgery.plan(run, from_data({"set": {"lr": "0.5x"}}))
    surgery.apply(run, made)
    assert made.promise is not None and made.promise.lr == rates(root, name)[0]
    assert rates(root, name) == pytest.approx([rate / 2 for rate in plain], rel=1e-6)
    surgery.apply(run, surgery.plan_undo(run))
    assert rates(root, name) == plain
    assert operate(root, "", "rollback") is None


def rates(root: Path, name: str) -> list[float]:
    """What the next two updates use, by the loaded scheduler."""
    model, adam, schedule = with_tensor_lr(name)
    adam.load_state_dict(torch.load(root / "checkpoint-6/optimizer.pt", weights_only=False))
    schedule.load_state_dict(torch.load(root / "checkpoint-6/scheduler.pt", weights_only=False))
    out = []
    for _ in range(2):
        out.append(float(adam.param_groups[0]["lr"]))
        model(torch.rand(3, 4)).sum().backward()
        adam.step()
        schedule.step()
    return out


def test_betas_that_are_tensors_are_read_and_set(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    betas = (torch.tensor(0.9), torch.tensor(0.95))
    adam = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.01), betas=betas, capturable=False
    )  # type: ignore[arg-type]
    root = trained(tmp_path / "run", adam, model)
    run = Run.open(root)
    assert look.inspect(run).promise.betas == pytest.approx((0.9, 0.95))
    made = surgery.plan(run, from_data({"set": {"beta2": 0.5}}))
    surgery.apply(run, made)
    saved = torch.load(root / "checkpoint-6/optimizer.pt", weights_only=False)
    held = tuple(map(float, saved["param_groups"][0]["betas"]))
    assert made.promise is not None and held == made.promise.betas
    assert held == pytest.approx((0.9, 0.5))
    adam.load_state_dict(saved)
    surgery.apply(run, surgery.plan_undo(run))
    assert look.inspect(run).promise.betas == pytest.approx((0.9, 0.95))


@pytest.mark.parametrize("key", [0, "inner"])
def test_a_count_of_none_stops_nothing_and_states_by_name_a_reset_alone(
    tmp_path: Path, key: int | str
) -> None:
    """As heavyball keeps them: the group's step is None, and each parameter has a state a view."""
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    root = trained(tmp_path / "run", adam, model)
    for file in root.glob("*/optimizer.pt"):
        saved = torch.load(file)
        saved["state"] = {number: {key: state} for number, state in saved["state"].items()}
        saved["param_groups"][0]["step"] = None
        torch.save(saved, file)
    said = looks(Run.open(root))
    assert "adam_step" not in said  # None counts nothing
    for name in ("rollback", "lr", "betas", "eps", "weight_decay"):
        assert operate(root, "", name) is None, name
    refused = operate(root, "", "moments")
    if key == 0:
        assert refused is None
    else:
        assert refused is not None and "no known optimizer keeps inner" in refused.what


# --- numbers that no trainer uses ----------------------------------------------------------------


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["lr", "betas", "eps", "weight_decay"])
def test_a_number_that_no_trainer_uses_is_found_and_stops_only_its_field(
    tmp_path: Path, field: str, number: float
) -> None:
    """Its step is not sound, and every byte of it is: nothing is called damaged."""
    root = odd_leaves.one_file(tmp_path / "run")
    format = RUNS["one file"][1]
    saved = torch.load(root / "ckpt_6.pt", weights_only=True)
    saved["optimizer"]["param_groups"][0][field] = (0.9, number) if field == "betas" else number
    torch.save(saved, root / "ckpt_6.pt")
    before = snapshot(root)
    run = Run.open(root, format)
    (finding,) = look.verify(run).findings
    assert f"{field} is not understood: ckpt_6.pt: optimizer.param_groups.0.{field}" in finding
    told = report.status(run, run.state(6), None, LOOK) + str(diagnose(run))
    assert finding in " ".join(told.split()) and "damaged" not in told
    for name in ("rollback", "lr", *SETTINGS):
        refused = None
        try:
            surgery.apply(run, surgery.plan(run, recipe(name, run)))
        except NotUnderstood as error:
            refused = error
        assert (refused is not None) is (name == field), (name, refused)
        if refused is None:
            surgery.apply(run, surgery.plan_undo(run))
        assert differs(snapshot(root), before, times=False) is None


@pytest.mark.long
def test_no_limit_and_a_seed_of_anybodys_are_sound(tmp_path: Path) -> None:
    """-1 is "any seed" to some, torch's own seeds have 64 bits, and an infinite norm clips none."""
    root = matrix.make("DeepSpeed ZeRO 1", tmp_path / "run")
    for seed, clip in ((-1, math.inf), ((1 << 64) - 1, -1.0)):
        for file in root.rglob("*_states.pt"):
            saved = torch.load(file, weights_only=False)
            if "args" in saved:
                saved["args"].seed, saved["args"].clip_grad = seed, clip
            else:
                saved["optimizer_state_dict"]["clip_grad"] = clip
            torch.save(saved, file)
        looks(Run.open(root))
        for name in ("rollback", "betas", "moments"):
            assert operate(root, "", name) is None
        promised = Run.open(root).state(Run.open(root).latest()).promise
        assert promised.clip_grad == (clip if clip > 0 else None) and promised.seed is None
