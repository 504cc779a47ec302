"""Runs of the bundled trainer that diverge, or do not, for tests of `advise`; and their curves.

`python -m tests.look.advised_runs FOLDER [CASE…]` trains them anew in FOLDER and writes the curves
that tests/look/curves/ keeps: one CSV a run, by the real trainer, about 15 seconds each. `EVENT` is
the step at which the cause has its first effect.
"""

from __future__ import annotations

import csv
import gzip
import io
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.launch import launch, run_module

SEEDS = (1, 2, 3)
ITERATIONS = 600
EVENT = 300
CURVES = Path(__file__).parent / "curves"
TAGS = {
    "loss": "lm-loss-training/lm loss",
    "grad_norm": "grad-norm/grad-norm",
    "loss_scale": "loss-scale/loss-scale",
    "lr": "learning-rate/learning-rate",
}
"""Column of a CSV → tag of the trainer."""
BASE = (
    "log_interval=100",
    "save_interval=100",
    "lr=3e-3",
    "poison=null",
    f"train_iters={ITERATIONS}",
)


@dataclass(frozen=True)
class Case:
    """`start` are the settings of a run from scratch. With `then` it is stopped at EVENT, changed
    by it on disk, and goes on with `more`, until it exits with `ends`. `event`
    is None for a healthy run."""

    start: tuple[str, ...] = ()
    then: Callable[[Path], None] | None = None
    more: tuple[str, ...] = ()
    event: int | None = EVENT
    ends: int = 0


def _moment(root: Path) -> None:
    """The second moments are lost: their bytes are zero."""
    import torch

    for file in root.glob(f"global_step{EVENT}/*optim_states.pt"):
        content = torch.load(file, weights_only=False)
        for state in _states(content):
            state["exp_avg_sq"].zero_()
        torch.save(content, file)


def _states(content: Any) -> list[dict[str, Any]]:
    found = []
    if isinstance(content, dict):
        if "exp_avg_sq" in content:
            return [content]
        for value in content.values():
            found += _states(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            found += _states(value)
    return found


def _set(*values: str) -> Callable[[Path], None]:
    """The surgeon's own `set`."""

    def edit(root: Path) -> None:
        run_module("ckptsurgeon", "-C", root, "set", *values, "--yes")

    return edit


def _nothing(root: Path) -> None:
    """What changes is in the settings with which the run goes on."""


CASES = {
    "poisoned": Case(("poison=[300,600]", "lr=1e-2")),
    "lr-too-high": Case(then=_set("lr=0.3"), event=EVENT + 1),
    "scale-collapse": Case(
        ("dtype=fp16", "hysteresis=1", "loss_scale_window=200", "clip_grad=0"),
        then=_set("lr=3.0"),
        event=EVENT + 1,
        ends=1,
    ),
    "beta2-too-high": Case(("adam_beta2=0.9999", "clip_grad=0", "lr=1e-2", "poison=[300,315]")),
    "corrupted-moment": Case(("lr=1e-2", "adam_beta2=0.999"), then=_moment, event=EVENT + 1),
    "calm": Case(event=None),
    "bumpy-warm-up": Case(
        ("lr=3e-2", "lr_warmup_samples=800", "lr_decay_style=cosine"), event=None
    ),
    "batch-ramp": Case(("rampup_batch_size=[4,4,1200]", "global_batch_size=16"), event=None),
    "data-switch": Case(("data=TABLES",), then=_nothing, more=("data=TOPICS",), event=None),
    "lr-drop": Case(("lr=1e-2",), then=_set("lr=1e-3"), event=None),
}
"""A cause at EVENT + 1 is on disk at EVENT: the next update is the first that it touches."""


def prepare(folder: Path) -> dict[str, str]:
    """The texts: Python's manual, and the tables of its encodings, which are easier to guess."""
    import encodings

    topics, tables = folder / "topics", folder / "tables"
    if not tables.with_suffix(".idx").exists():
        launch("prepare-data", "--pydoc", "--output", topics)
        launch("prepare-data", "--output", tables, *sorted(Path(encodings.__path__[0]).glob("cp*")))
    return {"TOPICS": str(topics), "TABLES": str(tables)}


def make(folder: Path, name: str, seed: int) -> Path:
    """Train one run; its folder."""
    case, root = CASES[name], folder / f"{name}-{seed}"
    texts = prepare(folder)

    def named(settings: Sequence[str]) -> list[str]:
        pairs = (item.partition("=") for item in settings)
        return [f"{key}={texts.get(value, value)}" for key, _, value in pairs]

    shutil.rmtree(root, ignore_errors=True)
    start = (*BASE, f"seed={seed}", f"save={root}", *named(("data=TOPICS", *case.start)))
    from_scratch = ("--config=train/configs/poison.yaml", "--from-scratch", *start)
    if case.then is None:
        launch(*from_scratch)
        return root
    launch(*from_scratch, f"train_iters={EVENT}")
    case.then(root)
    again = (f"--config={root / 'train.yaml'}", f"train_iters={ITERATIONS}", *named(case.more))
    launch(*again, status=case.ends)
    return root


def curves(root: Path) -> str:
    """The scalars of a run, by TensorBoard's own reader, as CSV with six digits."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    log = EventAccumulator(str(root / "tensorboard"), size_guidance={"tensors": 0})
    log.Reload()
    columns = {
        name: {e.step: float(make_ndarray(e.tensor_proto)) for e in log.Tensors(tag)}
        for name, tag in TAGS.items()
    }
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["step", *columns])
    for step in sorted(columns["loss"]):
        table.writerow([step, *(f"{column[step]:.6g}" for column in columns.values())])
    return out.getvalue()


def kept(name: str, seed: int) -> Path:
    """The file that the repository keeps of a run."""
    return CURVES / f"{name}-{seed}.csv.gz"


def main(arguments: Sequence[str]) -> None:
    """Make the runs and keep their curves."""
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments[1:] or CASES:
        for seed in SEEDS:
            text = curves(make(folder, name, seed))
            kept(name, seed).parent.mkdir(exist_ok=True)
            kept(name, seed).write_bytes(gzip.compress(text.encode(), mtime=0))
            print(name, seed, len(text), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
