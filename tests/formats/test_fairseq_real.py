"""fairseq: its own command line (tests.support.fairseq_trainer) saves, and resumes what was edited;
the flags of refusals work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ckptsurgeon import look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.launch.flags import launch_flags
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.fairseq_runs import (
    HALF,
    NEEDED,
    PEAK,
    SCHEDULE,
    SETTINGS,
    WARMUP,
    document,
    flags,
    names,
    rate,
    refused,
    train,
    twin,
)
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = NEEDED
PLATEAU = f"--lr {PEAK} --lr-scheduler reduce_lr_on_plateau --lr-patience 3"
RANKS = "--ddp-backend legacy_ddp --distributed-backend gloo"
BEST = "--keep-best-checkpoints 2"


def call(*words: object) -> Result:
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(app, [str(w) for w in words])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of ten updates, trained once, by its flags and ranks."""
    made: dict[tuple[str, str, int], Path] = {}

    def make(words: str, schedule: str, ranks: int) -> Path:
        key = words, schedule, ranks
        if key not in made:
            root = tmp_path_factory.mktemp("fairseq") / "run"
            used = train(root, 10, words, schedule=schedule, ranks=ranks)
            (root.parent / "used.json").write_text(json.dumps(used))
            made[key] = root
        return made[key]

    return make


@pytest.fixture
def run(originals: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def copy(words: str = BEST, schedule: str = SCHEDULE, ranks: int = 1) -> Path:
        original = originals(words, schedule, ranks)
        shutil.copy(original.parent / "used.json", tmp_path)
        return Path(shutil.copytree(original, tmp_path / "run"))

    return copy


@pytest.mark.witness(
    "metaseq, fairseq", "rollback", "set betas", "set eps", "set weight_decay", by="fairseq"
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_promise_is_what_the_next_update_uses(run: Callable[..., Path], ranks: int) -> None:
    words = BEST if ranks == 1 else f"{BEST} {RANKS}"
    root = run(words, ranks=ranks)
    before, opened = snapshot(root), Run.open(root)
    assert (opened.format.name, opened.latest()) == ("fairseq", 10)
    assert opened.steps() == [2, 4, 6, 8, 10]
    assert look.verify(opened, level=4).findings == ()
    plan = operate(root, {"rollback": {"to": 4}, "set": SETTINGS})
    fourth = "checkpoint_1_4.pt" if ranks == 1 else "checkpoint1.pt"  # the end of an epoch
    assert names(root) == {"checkpoint_1_2.pt", fourth, "checkpoint_last.pt"}
    assert plan.promise is not None and plan.promise.asked and plan.promise.step == 5
    ignored = "--adam-betas (0.5,0.6) --adam-eps 1e-3 --weight-decay 0.9"
    used = train(twin(root), 6, f"{words} {ignored}", ranks=ranks)
    assert sorted(used) == [5, 6]
    for update in used.values():
        assert (update["betas"], update["eps"]) == ([[0.9, 0.98]], [1e-6])
        assert update["weight_decay"] == [0.3]
    assert used[5]["adam_step"] == plan.promise.adam_step == 4
    assert used[5]["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)]
    assert used[6]["lr"] == [pytest.approx(rate(5), rel=1e-12)]
    take_back(root, before)


@pytest.mark.parametrize("words", [BEST, HALF])
def test_a_rollback_alone_is_followed_by_the_same_run(run: Callable[..., Path], words: str) -> None:
    """Also the same files: a best one of the branch that left would rank above the new ones."""
    root = run(words)
    first = json.loads((root.parent / "used.json").read_text())
    old, ends = names(root), document(root, "checkpoint_last.pt")
    operate(root, {"rollback": {"to": 4}})
    assert train(root, 10, words) == {step: first[str(step)] for step in range(5, 11)}
    assert names(root) == old
    again = document(root, "checkpoint_last.pt")
    for name, tensor in ends["model"].items():
        assert torch.equal(again["model"][name], tensor) or name.endswith("_float_tensor")  # unset
    states = [made["last_optimizer_state"]["state"] for made in (ends, again)]
    for key, state in states[0].items():
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[1][key][kind], state[kind])


@pytest.mark.witness("metaseq, fairseq", "reset moments", by="fairseq")
def test_moments_that_are_reset_are_zero_at_the_next_update(run: Callable[..., Path]) -> None:
    root = run()
    plan = operate(root, {"reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    option, file = launch_flags(Run.open(root))
    used = train(root, 11, f"{option} {file}")
    assert [*used] == [11] and (used[11]["adam_step"], used[11]["moments"]) == (0, 0)


@pytest.mark.parametrize(
    ("recipe", "rates"),
    [
        ({"set": {"lr": "0.5x"}}, [rate(10, PEAK / 2), rate(11, PEAK / 2)]),
        (
            {"set": {"lr": 9e-4, "warmup": 4, "decay": 50, "min_lr": 1e-5}},
            [rate(10, 9e-4, 4, 50, 1e-5), rate(11, 9e-4, 4, 50, 1e-5)],
        ),
        ({"cooldown": {"steps": 4}}, [rate(10), rate(10) * 3 / 4]),
        ({"set": {"lr": 9e-4, "min_lr": 1e-5, "decay": 30}}, [rate(10, 9e-4, 2, 30, 1e-5), None]),
    ],
)
def test_a_schedule_is_made_by_the_flags_of_its_refusal(
    run: Callable[..., Path], recipe: dict[str, Any], rates: list[float | None]
) -> None:
    root = run()
    used = train(root, 12, flags(refused(root, recipe)))
    for update, wanted in zip((11, 12), rates, strict=True):
        assert wanted is None or used[update]["lr"] == [pytest.approx(wanted, rel=1e-12)]


def test_a_cosine_is_made_by_its_own_flags(run: Callable[..., Path]) -> None:
    root = run()
    told = flags(refused(root, {"set": {"decay_style": "cosine", "min_lr": 1e-5, "decay": 18}}))
    used = train(root, 12, schedule=f"--lr {PEAK} --warmup-updates {WARMUP} {told}")
    assert used[11]["lr"] == [pytest.approx((PEAK + 1e-5) / 2, rel=1e-12)]  # in the middle


def test_what_the_flags_decide_comes_from_the_flags(run: Callable[..., Path]) -> None:
    root = run()
    hints = [
        refused(root, {"set": {key: value}}) for key, value in (("clip_grad", 0.3), ("seed", 9))
    ]
    usual, told = train(twin(root), 11)[11], train(twin(root), 11, flags(" ".join(hints)))[11]
    assert (told["clip"], told["seed"]) == (0.3, 9)
    assert (usual["clip"], usual["seed"]) == (1.0, 7)
    assert "fairseq skips no data" in refused(root, {"skip": ["11-12"]})
    assert "counts its updates from 0" in refused(root, {"swap_optimizer": {"to": "sgdw"}})
    assert min(train(root, 2, "--reset-optimizer")) == 1


@pytest.mark.witness("metaseq, fairseq", "set loss_scale", "reset loss-scale", by="fairseq")
def test_the_loss_scale_is_the_checkpoints(run: Callable[..., Path]) -> None:
    root, other = run(HALF), HALF.replace("4", "2")
    before = snapshot(root)
    operate(root, {"set": {"loss_scale": 16}})
    assert train(twin(root), 11, other)[11]["loss_scale"] == 16
    take_back(root, before)
    train(root, 12, f"{HALF} --fp16-scale-window 1")
    operate(root, {"reset": ["loss_scale"]})
    assert train(root, 13, other)[13]["loss_scale"] == 4


def test_a_plateau_keeps_the_lr_that_is_set(run: Callable[..., Path]) -> None:
    root = run("", PLATEAU)
    before = snapshot(root)
    plan = operate(root, {"rollback": {"to": 6}, "set": {"lr": 3e-4}})
    assert plan.promise is not None and plan.promise.lr == 3e-4
    used = train(twin(root), 7, "--lr 0.5", schedule=PLATEAU)
    assert used[7]["lr"] == [3e-4]
    take_back(root, before)


def apply(root: Path, recipe: dict[str, Any]) -> None:
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    assert look.verify(Run.open(root), level=4).findings == ()


def sums(weights: dict[str, Any]) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in weights.items()}


@pytest.mark.witness("metaseq, fairseq", "scale", by="fairseq")
@pytest.mark.parametrize("words", [BEST, HALF])
def test_shared_embeddings_are_scaled_in_every_copy(run: Callable[..., Path], words: str) -> None:
    """fp16 weights are saved as fp32, what modules share once for each: a load takes the last."""
    root = run(words)
    before, old = snapshot(root), document(root, "checkpoint_last.pt")["model"]
    for name in ("decoder.embed_tokens.weight", "decoder.layers.0.fc1.weight"):
        apply(root, {"scale": {"params": name, "by": 0.5}})
        used = train(twin(root), 11, words)[11]["sums"]
        whole = {each: total for each, total in sums(old).items() if each in used}
        assert used == {**whole, name: whole[name] / 2}
        take_back(root, before)


@pytest.mark.witness("metaseq, fairseq", "average", "graft moments", by="fairseq")
def test_new_numbers_are_what_the_next_update_begins_with(run: Callable[..., Path]) -> None:
    root = run()
    before = snapshot(root)
    last, earlier = (document(root, f"checkpoint{name}.pt") for name in ("_2_10", "1"))
    apply(root, {"average": {"last": 2}})
    used = train(twin(root), 11)[11]["sums"]
    mean = {
        name: (t.double() + earlier["model"][name].double()) / 2
        for name, t in last["model"].items()
    }
    assert used == pytest.approx({name: sums(mean)[name] for name in used}, rel=1e-5, abs=1e-5)
    take_back(root, before)
    apply(root, {"graft": {"step": 8}})
    states = earlier["last_optimizer_state"]["state"].values()
    used_moments = train(twin(root), 11)[11]
    assert used_moments["adam_step"] == 8
    assert used_moments["moments"] == sum(float(state["exp_avg"].abs().sum()) for state in states)
    take_back(root, before)


def test_a_run_that_began_with_a_model_goes_on_by_the_printed_flags(
    run: Callable[..., Path], tmp_path: Path
) -> None:
    words = f"--finetune-from-model {run() / 'checkpoint_last.pt'}"
    train(root := tmp_path / "tuned", 4, words)
    printed = launch_flags(Run.open(root))
    with pytest.raises(AssertionError, match="can not be specified together"):
        train(twin(root), 5, words, more=printed[:2])
    assert [*train(twin(root), 5, words, more=printed)] == [5]


@pytest.mark.parametrize("format", ["json", "simple"])
def test_what_it_says_is_compared_with_the_promise(
    run: Callable[..., Path], tmp_path: Path, format: str
) -> None:
    """Its rate is not: the flags decide it."""
    root, words = run(HALF), f"{HALF} --log-format {format}"
    old, new, events = tmp_path / "old", tmp_path / "new", tmp_path / "tb"
    back = {"rollback": {"to": 4}}
    operate(other := twin(root), back)
    train(other, 6, words, log=old)
    operate(root, {**back, "set": {"loss_scale": 16}})
    train(twin(root), 6, f"{words} --tensorboard-logdir {events}", log=new)
    told = call("verify", "--log", new, "-C", root)
    assert told.exit_code == 0 and "loss scale" in told.stdout, told.output
    told = call("verify", "--tb", events, "-C", root)
    assert told.exit_code == 0 and "loss scale" in told.stdout, told.output
    old.touch()  # a file from before the surgery is refused
    told = call("verify", "--log", old, "-C", root)
    assert told.exit_code == 4 and "loss scale 4" in told.stdout, told.output
    said = json.loads(call("advise", "--log", new, "--json").stdout)
    assert said["points"] == 2
