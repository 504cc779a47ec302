"""Runs made by the real trainer, once per session; each test works on its own copy."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from ckptsurgeon import surgery
from tests.support import claims
from tests.support.engines import end_engines, threads_of_groups
from tests.support.launch import REPO, launch

# The kernels are built once per checkout, and every process of a test finds them there.
KERNELS = str(REPO / ".cache")
os.environ["XDG_CACHE_HOME"] = KERNELS
# No example fails because the machine is slow or busy.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
STEPS = (2, 4, 6, 8)


def _refused(file: str, words: object) -> NoReturn:
    raise AssertionError(f"{file} would take the place of the process that runs the tests")


os.execvp = _refused
LONGEST = (
    "test_readme.py",
    "guard/test_nights.py",
    "transaction/test_held.py",
    "surgery/test_recovery.py",
    "formats/optimizers/test_described.py",
    "train/kernels/test_build.py",
    "train/test_saves.py",
    "test_contract.py",
    "train/test_parallel.py",
    "operations/test_new_numbers.py",
    "faults/test_faults.py",
    "cli/test_cluster_options.py",
    "operations/test_precision.py",
    "formats/test_matrix.py",
    "cli/test_hints_in_code.py",
    "faults/test_power_cuts.py",
    "train/test_fused_adamw.py",
    "transaction/test_ranks.py",
    "guard/test_job.py",
    "cli/test_growth.py",
    "train/test_watchdog.py",
    "transaction/test_lock.py",
    "operations/test_transplant_ranks.py",
    "cli/test_json.py",
    "test_imports.py",
    "cli/test_completion.py",
    "formats/test_ready.py",
    "faults/test_computed_run.py",
    "cli/test_bad_input.py",
    "operations/test_transplant.py",
    "train/test_precision.py",
    "train/test_step.py",
    "cli/test_relaunch.py",
    "train/test_two_ranks.py",
    "cli/test_advise.py",
    "train/test_gradient_dtype.py",
    "hostile/test_special_files.py",
    "logs/test_lineage.py",
    "hostile/test_lies.py",
    "formats/test_universal.py",
)
"""The modules that take longest, the longest first: a worker that got one last would end alone."""
Trained = Callable[..., Path]
PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Thin what is marked so; put the modules of LONGEST first, alike for every worker."""
    _thin(items)
    ranks = {str(REPO / "tests" / name): rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(str(item.path), len(ranks)))


def _thin(items: list[pytest.Item]) -> None:
    """Call all but each `every`-th case of a test that is `thinned` slow."""
    seen: Counter[str] = Counter()
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % thinned.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note which tests passed: one that was skipped or failed claims nothing."""
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def _claims_hold(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that is a witness carries out what it claims, and asks the library that it names."""
    marks = list(request.node.iter_markers("witness"))
    if not marks:
        yield
        return
    applied: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surgery, "apply", claims.recorder(surgery.apply, applied))
        yield
    for mark in marks if request.node.stash.get(PASSED, False) else ():
        lacking = set(mark.args[1:]) - applied
        assert not lacking, f"a witness of {sorted(lacking)}, which the test never applies"
        assert claims.asks(request.path, mark.kwargs["by"]), mark


@pytest.fixture(autouse=True, scope="module")
def _engines_end_with_their_module() -> Iterator[None]:
    """Hundreds of forgotten groups slow all that follows: each wakes up a hundred times a second.
    A few stay, which the parameters of ZeRO 3 hold."""
    before = threads_of_groups()
    yield
    end_engines()
    assert threads_of_groups() <= before + 16


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder on the disk of the checkout, wherever the folders of other tests lie."""
    tests = REPO / ".cache" / "tests"
    tests.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tests) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of the session share: what one has made there, none makes again."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """The folder, made by the first worker that asks; the others wait until it is whole."""
    whole = folder.with_suffix(".whole")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


@pytest.fixture(scope="session")
def corpus(shared: Path) -> Path:
    """The prefix of an indexed dataset of Python's own manual."""

    def make(folder: Path) -> None:
        launch("prepare-data", "--pydoc", "--output", folder / "topics")

    return once(shared / "corpus", make) / "topics"


@pytest.fixture(scope="session")
def run_of(shared: Path) -> Callable[[str], Path]:
    """`run_of(name)`: a run of a format of the table in docs/formats.md; nobody changes it. A test
    may have a cache of its own by then: its trainer compiles nothing there."""
    from tests.formats.matrix import FORMATS, make

    def made(name: str) -> Path:
        folder = shared / f"format-{[*FORMATS].index(name)}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", KERNELS)
            return once(folder, lambda place: make(name, place / "run")) / "run"

    return made


@pytest.fixture(scope="session")
def _originals(shared: Path, corpus: Path) -> Callable[[int, int, str], Path]:
    def make(ranks: int, zero: int, dtype: str) -> Path:
        def train(root: Path) -> None:
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

        return once(shared / f"w{ranks}-z{zero}-{dtype}", train)

    return make


@pytest.fixture
def trained(_originals: Callable[[int, int, str], Path], tmp_path: Path) -> Trained:
    """`trained(ranks=1, zero=1, dtype="fp32")`: a copy of a run with steps 2, 4, 6 and 8."""

    def copy(ranks: int = 1, zero: int = 1, dtype: str = "fp32") -> Path:
        root = tmp_path / "run"
        shutil.copytree(_originals(ranks, zero, dtype), root, symlinks=True)
        return root

    return copy


@pytest.fixture
def accelerate_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate looks for a launcher's environment, and for a GPU."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
