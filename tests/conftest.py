"""Runs made by the real trainer, once per session; each test works on its own copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).parent.parent
# The kernels are built once per checkout, and every process of a test finds them there.
os.environ["XDG_CACHE_HOME"] = str(REPO / ".cache")
# No example fails because the machine is slow or busy.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
STEPS = (2, 4, 6, 8)
Trained = Callable[..., Path]


def launch(*arguments: str, ranks: int = 1, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the trainer to its end and return what it printed; `status` is what it must exit with."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "train", *arguments],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of an indexed dataset of Python's own manual."""
    prefix = tmp_path_factory.mktemp("data") / "topics"
    launch("prepare-data", "--pydoc", "--output", str(prefix))
    return prefix


@pytest.fixture(scope="session")
def _originals(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> Callable[[int, int, str], Path]:
    made: dict[tuple[int, int, str], Path] = {}

    def make(ranks: int, zero: int, dtype: str) -> Path:
        key = (ranks, zero, dtype)
        if key not in made:
            root = tmp_path_factory.mktemp("trained") / f"w{ranks}-z{zero}-{dtype}"
            launch(
                "--config=train/configs/tiny.yaml",
                "--from-scratch",
                f"save={root}",
                f"data={corpus}",
                f"zero_stage={zero}",
                f"dtype={dtype}",
                f"train_iters={STEPS[-1]}",
                "save_interval=2",
                ranks=ranks,
            )
            made[key] = root
        return made[key]

    return make


@pytest.fixture
def trained(_originals: Callable[[int, int, str], Path], tmp_path: Path) -> Trained:
    """`trained(ranks=1, zero=1, dtype="fp32")`: a copy of a run with steps 2, 4, 6 and 8."""

    def copy(ranks: int = 1, zero: int = 1, dtype: str = "fp32") -> Path:
        root = tmp_path / "run"
        shutil.copytree(_originals(ranks, zero, dtype), root, symlinks=True)
        return root

    return copy
