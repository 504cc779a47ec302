"""Real nights of the bundled trainer: each heals within its bounds, or a person is asked why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckptsurgeon import Run
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard.event import ASKED, STARTED
from ckptsurgeon.guard.ready import decide
from ckptsurgeon.guard.trainer import Process
from ckptsurgeon.look.ready import ready
from tests.guard.conftest import Policies, pages
from tests.support.launch import ON_CPU, REPO, launch

SAVED = 100
FAULTY = Path(__file__).parent / "nan_weights"
slow = pytest.mark.slow


def train(root: Path, corpus: Path, *settings: str) -> Path:
    launch(
        "--config=train/configs/poison.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "log_interval=100", f"save_interval={SAVED}", *settings,
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A healthy run of 200 iterations."""
    root = tmp_path_factory.mktemp("begun") / "run"
    return train(root, corpus, "poison=null", "train_iters=200")


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Callable[..., Path]:
    """`run(train_iters=600)`: a copy that goes on with these settings."""

    def copy(**settings: object) -> Path:
        root = tmp_path / "run"
        subprocess.run(["cp", "-a", begun, root], check=True)
        config = root / "train.yaml"
        lines = [
            line for line in config.read_text().splitlines() if line.split(":")[0] not in settings
        ]
        lines += [f"{key}: {json.dumps(value)}" for key, value in settings.items()]
        config.write_text("\n".join(lines) + "\n")
        return root

    return copy


@contextmanager
def watching(
    root: Path, policy: Path, *, start: bool = True, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A watch, which starts the trainer; in the end none of both is left."""
    words = ["watch", str(policy), "-C", str(root), *(["--start"] if start else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptsurgeon", *words],
        cwd=REPO, env={**os.environ, **ON_CPU, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()
        for each in events.read(root):
            for part in Process(each.pid, each.born).below() if each.pid else ():
                part.send(signal.SIGKILL)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=900)
    return process.returncode, said


def until(found: Callable[[], object]) -> None:
    for _ in range(3000):
        look_again()
        if found():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come")


def rank(root: Path) -> int:
    """The process of the trainer's first rank."""
    return int(json.loads((root / "trainer.pid").read_text())["pid"])


def saved(root: Path) -> int:
    return max(Run.open(root).steps())


def is_ready(root: Path) -> bool:
    look_again()
    return ready(Run.open(root), level=2).ready


def causes(root: Path) -> list[tuple[str, str]]:
    return [(each.cause, each.state) for each in events.read(root) if each.cause]


@pytest.mark.long
def test_poisoned_data_are_skipped_and_the_run_ends_well(
    corpus: Path, policy: Policies, tmp_path: Path
) -> None:
    root = train(tmp_path / "run", corpus, "poison=[300,400]", "train_iters=410")
    config = root / "train.yaml"
    config.write_text(config.read_text().replace("train_iters: 410", "train_iters: 600"))
    with watching(root, policy(do="apply", on=["diverged", "ended"]), start=False) as watch:
        code, said = ended(watch)
    assert code == 0, said
    assert causes(root) == [("diverged", STARTED)] and pages(tmp_path) == []
    (receipt,) = Run.open(root).receipts()
    assert receipt.recipe["skip"] and receipt.why.startswith("watch 0001: diverged at 30")
    assert saved(root) == 600 and is_ready(root)


@slow
def test_a_trainer_that_diverges_is_stopped_and_at_last_a_person_is_asked(
    run: Callable[..., Path], policy: Policies, tmp_path: Path
) -> None:
    """Of its data only those around the first sign are skipped, and all that follow are bad."""
    root = run(train_iters=100000, poison=[300, 100000])
    with watching(root, policy(do="apply", min_steps=50)) as watch:
        code, said = ended(watch)
    assert code == 3 and len(pages(tmp_path)) == 1, said
    assert causes(root)[0] == ("diverged", STARTED) and causes(root)[-1] == ("diverged", ASKED)
    assert 1 <= len(Run.open(root).receipts()) <= 2 and is_ready(root)


HEALTHY: list[dict[str, object]] = [
    {},
    {"lr": 3e-3},
    {"lr": 3e-2},
    {"lr_decay_style": "cosine", "min_lr": 1e-4},
    {"lr_decay_style": "linear"},
    {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 2400},
    {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    {"global_batch_size": 4},
    {"global_batch_size": 32},
    {"adam_beta2": 0.999},
    {"adam_beta1": 0.5, "adam_beta2": 0.5},
    {"clip_grad": 0.0},
    {"clip_grad": 0.1},
    {"weight_decay": 0.0},
    {"skip_grad_norm": 1.5},
    {"adam_eps": 1e-6, "sgd_momentum": 0.5},
    {"seed": 77},
    {"save_interval": 37, "log_interval": 1},
    {"async_save": True, "keep_last": 2},
    {"checkpoint_activations": True, "threads": 2},
]


@slow
@pytest.mark.parametrize("night", range(len(HEALTHY)))
def test_a_healthy_night_has_no_event(
    run: Callable[..., Path], policy: Policies, tmp_path: Path, night: int
) -> None:
    root = run(train_iters=900, **HEALTHY[night])
    with watching(root, policy(do="apply")) as watch:
        code, said = ended(watch)
    assert (code, causes(root), pages(tmp_path)) == (0, [], []), said
    assert saved(root) == 900 and is_ready(root)


@slow
@pytest.mark.parametrize("once", [True, False])
def test_weights_that_become_nan_are_those_of_the_step_before(
    run: Callable[..., Path], policy: Policies, tmp_path: Path, once: bool
) -> None:
    """As a broken chip makes them, once; as a bug makes them, after each start again."""
    root = run(train_iters=600)
    fault = {"PYTHONPATH": f"{FAULTY}:{os.environ.get('PYTHONPATH', '')}", "NAN_AT": "320"}
    if once:
        fault["NAN_ONCE"] = str(tmp_path / "was")
    with watching(root, policy(do="apply", min_steps=50), **fault) as watch:
        code, said = ended(watch)
    cause, state = causes(root)[0]
    assert (cause, state) == ("nan", STARTED), said
    first = next(each for each in events.read(root) if each.cause)
    assert (first.step, first.signal) == (320, "loss") and is_ready(root)
    receipts = Run.open(root).receipts()
    assert receipts[0].why.startswith(f"watch {first.id}: ") and receipts[0].step == 300
    if once:
        assert len(receipts) == 1
        assert (code, len(causes(root)), pages(tmp_path)) == (0, 1, []), said
        assert saved(root) == 600
    else:
        assert (code, causes(root)[-1]) == (3, ("nan", ASKED)), said
        assert len(pages(tmp_path)) == 1 and len(receipts) <= 2


@slow
def test_a_rank_that_is_killed_and_one_that_hangs_start_again(
    run: Callable[..., Path], policy: Policies, tmp_path: Path
) -> None:
    root = run(train_iters=2500)
    with watching(root, policy(do="apply", hung=0.1, stop_within=3)) as watch:
        until(lambda: saved(root) >= 400)
        os.kill(rank(root), signal.SIGKILL)
        until(lambda: causes(root) == [("ended", STARTED)] and saved(root) >= 700)
        os.kill(rank(root), signal.SIGSTOP)
        until(lambda: len(causes(root)) == 2 and causes(root)[1][1] == STARTED)
        code, said = ended(watch)
    assert code == 0, said
    assert causes(root) == [("ended", STARTED), ("hung", STARTED)] and pages(tmp_path) == []
    assert saved(root) == 2500 and is_ready(root)


@slow
def test_a_torn_save_is_passed_over_by_the_next_start(
    run: Callable[..., Path], policy: Policies, tmp_path: Path
) -> None:
    root = run(train_iters=1500)
    with watching(root, policy(do="apply", every=5)) as watch:
        until(lambda: saved(root) >= 500)
        os.kill(rank(root), signal.SIGKILL)  # it looks again seconds later
        step = Run.open(root).latest()
        shard = max((root / f"global_step{step}").glob("*"), key=lambda path: path.stat().st_size)
        os.truncate(shard, 100)
        code, said = ended(watch)
    assert code == 0 and "the start was repaired: surgery 0001" in said, said
    assert saved(root) == 1500 and is_ready(root)


@slow
def test_a_rate_that_is_too_high_is_lowered_or_a_person_is_asked(
    run: Callable[..., Path], policy: Policies, tmp_path: Path
) -> None:
    root = run(train_iters=900)
    subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", "set-lr", "0.5", "--yes", "-C", root], check=True
    )
    with watching(root, policy(do="apply", min_steps=50)) as watch:
        code, said = ended(watch)
    assert causes(root)[0][0] in ("diverged", "nan"), said
    if code == 3:
        assert causes(root)[-1][1] == ASKED and len(pages(tmp_path)) == 1
    else:
        assert code == 0 and saved(root) == 900
    assert is_ready(root)


@slow
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("after", [0.0, 0.3, 0.6, 1.0, 2.0])
def test_whoever_is_killed_the_next_watch_goes_on(
    run: Callable[..., Path], policy: Policies, both: bool, after: float
) -> None:
    root = run(train_iters=100000, poison=[300, 100000])
    rule = policy(do="apply", min_steps=50)
    with watching(root, rule) as watch:
        until(lambda: causes(root))
        time.sleep(after)
        watch.kill()
        with suppress(OSError, ValueError):
            if both:
                os.kill(rank(root), signal.SIGKILL)
    assert decide(Run.open(root), 2, repair=True, wait=60).ready
    with watching(root, rule) as watch:
        code, said = ended(watch)
    assert code == 3, said
    assert causes(root)[-1][1] == ASKED and is_ready(root)
    by = [each.why for each in Run.open(root).receipts() if each.why.startswith("watch ")]
    assert 1 <= len(by) <= 2 and len({why.split(":")[0] for why in by}) == len(by)
