"""Workers of a Dask cluster compute: the same bytes as alone, whoever of them dies, and when."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.cli.on import Computed
from ckptsurgeon.errors import UNTOUCHED, InterruptedSurgery, SurgeryError
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction import job_list
from tests.conftest import Trained
from tests.support.dask_workers import Dask, Slow, meanwhile, path, surgeon
from tests.support.launch import REPO
from tests.support.new_numbers import cases
from tests.support.snapshot import Snapshot, differs, exact_snapshot, snapshot

pytestmark = pytest.mark.cluster
NAME = ".*query_key_value.weight"
Recipe = dict[str, Any]
AVERAGE: Recipe = {"average": {"steps": ["6", "8"]}}
NO_NOTE = {"tensorboard": {"note": False}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs so small that a surgery on a tiny run has many."""
    monkeypatch.setattr(job_list, "BATCH", 1 << 15)
    monkeypatch.setattr(job_list, "STRETCH", 1 << 12)
    monkeypatch.setattr(job_list, "LONG", 1 << 12)


def operate(root: Path, recipe: Recipe, dask: Dask | None) -> Receipt:
    run = Run.open(root)
    made = plan(run, from_data({**recipe, **NO_NOTE}))
    if dask is None:
        return surgery.apply(run, made)
    dask.wait()
    with Computed(str(dask.file)).writers(1, [root]) as who:
        return surgery.apply(run, made, workers=who)


def twin(root: Path) -> Path:
    return Path(shutil.copytree(root, root.with_name("twin")))


def alone(root: Path, recipe: Recipe) -> Snapshot:
    """What a surgery without workers makes of a copy."""
    other = twin(root)
    operate(other, recipe, None)
    found = snapshot(other, own=True)
    shutil.rmtree(other)
    return found


def differing(root: Path, wanted: Snapshot) -> str | None:
    return differs(snapshot(root, own=True), wanted, times=False)


def recipes(donor: Path) -> Iterator[Recipe]:
    yield from (recipe for recipe, _ in cases(6, 8, NAME).values())
    yield {"precision": {"to": "fp32"}}
    yield {"transplant": {"source": str(donor), "step": 8, "logs": True}}


def another(trained: Trained, folder: Path) -> Path:
    """A run with other weights."""
    root = trained(zero=1, dtype="bf16").rename(folder / "donor")
    operate(root, {"scale": {"params": "weight", "by": 0.5}}, None)
    return root


@pytest.mark.parametrize("count", [1, 2, 3])
def test_so_many_workers_make_what_one_process_makes(
    dask: Dask, trained: Trained, tmp_path: Path, count: int
) -> None:
    donor = another(trained, tmp_path)
    root = trained(zero=1, dtype="bf16", ranks=2)
    for _ in range(count):
        dask.add()
    for recipe in recipes(donor):
        before = snapshot(root)
        wanted = alone(root, recipe)
        operate(root, recipe, dask)
        assert differing(root, wanted) is None, recipe
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert differs(snapshot(root), before, times=True) is None
        shutil.rmtree(root / ".ckptsurgeon")


def test_each_command_takes_them(dask: Dask, trained: Trained, tmp_path: Path) -> None:
    donor = another(trained, tmp_path)
    root = trained(zero=1, dtype="bf16")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**AVERAGE, **NO_NOTE}))
    dask.add()
    dask.wait()
    for words in (
        ("average", 6, 8), ("scale", NAME, "--by", "0.9"),
        ("graft", "moments", "--from", 6),
        ("clip-moments", "--above", 2), ("precision", "fp32"),
        ("transplant", "--from", donor, "--step", 8), ("apply", tmp_path / "recipe.yaml"),
    ):  # fmt: skip
        note = () if words[0] == "apply" else ("--no-tb-note",)
        other = twin(root)
        done = surgeon(*words, *note, "--yes", "-C", other)
        assert done[0] == 0, done
        done = surgeon(*words, *note, "--yes", "-C", root, "--on", dask.file)
        assert done[0] == 0, done
        assert differing(root, snapshot(other, own=True)) is None, words
        assert surgeon("undo", "--yes", "-C", root)[0] == 0
        shutil.rmtree(other)
        shutil.rmtree(root / ".ckptsurgeon")


def test_an_export_by_workers_is_that_of_one_process(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    root = trained(zero=3, dtype="fp32", ranks=2)
    before = exact_snapshot(root)
    for _ in range(2):
        dask.add()
    dask.wait()
    words = ("export", 8, "--shard-size", "0.0001", "-C", root)
    assert surgeon(*words, "-o", tmp_path / "a")[0] == 0
    done = surgeon(*words, "-o", tmp_path / "b", "--on", dask.file)
    assert done[0] == 0, done
    assert snapshot(tmp_path / "a").keys() == snapshot(tmp_path / "b").keys()
    assert differs(snapshot(tmp_path / "b"), snapshot(tmp_path / "a"), times=False) is None
    assert exact_snapshot(root) == before


# --- deaths --------------------------------------------------------------------------------------


def killed_in_each(dask: Dask, root: Path, folder: Path, times: int) -> None:
    """So many surgeries, in each of which a worker is killed at a random moment."""
    chance = random.Random(30)
    wanted, before = alone(root, AVERAGE), snapshot(root)
    slow = Slow(dask, folder / "jobs", 0.02)
    for _ in range(3):
        slow.add()
    for _ in range(times):
        shutil.rmtree(slow.folder)
        slow.folder.mkdir()
        died: list[int] = []

        def kill() -> None:
            slow.wait()
            time.sleep(chance.uniform(0, 0.6))
            died.append(chance.choice(slow.busy()))  # noqa: B023
            os.kill(died[0], signal.SIGKILL)  # noqa: B023

        with meanwhile(kill):
            operate(root, AVERAGE, dask)
        assert differing(root, wanted) is None
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert differs(snapshot(root), before, times=True) is None
        shutil.rmtree(root / ".ckptsurgeon")
        for worker in [each for each in dask.workers if each.pid in died]:
            worker.wait()
            dask.workers.remove(worker)
        slow.add()


def test_a_worker_that_is_killed_costs_its_jobs(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    killed_in_each(dask, trained(zero=1, dtype="bf16"), tmp_path, 4)


@pytest.mark.slow
def test_a_worker_is_killed_in_each_of_50_surgeries(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    killed_in_each(dask, trained(zero=1, dtype="bf16"), tmp_path, 50)


def test_without_any_worker_left_the_run_is_as_it_was(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    root = trained(zero=1, dtype="bf16")
    before = snapshot(root)
    slow = Slow(dask, tmp_path / "jobs", 1)
    slow.add()

    def kill() -> None:
        slow.wait()
        dask.workers[0].kill()

    with meanwhile(kill), pytest.raises(SurgeryError, match=r"the workers of .* are lost"):
        operate(root, AVERAGE, dask)
    assert differs(snapshot(root, own=True), before, times=True) is None


@pytest.mark.parametrize("then", ["recover", "resume"])
def test_a_surgeon_that_is_killed_is_recovered_or_gone_on_with(
    dask: Dask, trained: Trained, tmp_path: Path, then: str
) -> None:
    """Its workers live on, and are at their jobs still when the next attempt begins, at another
    scheduler."""
    root = trained(zero=1, dtype="bf16")
    before, wanted = snapshot(root), alone(root, AVERAGE)
    slow = Slow(dask, tmp_path / "jobs", 0.3)
    for _ in range(2):
        slow.add()
    dask.wait()
    words = ["average", "6", "8", "--no-tb-note", "--yes", "-C", str(root)]
    code = (
        "import sys; from ckptsurgeon.transaction import job_list as j\n"
        "j.BATCH, j.STRETCH, j.LONG = 1 << 15, 1 << 12, 1 << 12\n"
        "from ckptsurgeon.cli import main; sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *words, "--on", str(dask.file)],
        env={**os.environ, "PYTHONPATH": path()}, stdout=subprocess.DEVNULL,
    ) as first:  # fmt: skip
        record = root / ".ckptsurgeon/staging/0001.jobs"
        while not (record.exists() and record.read_bytes().count(b'"crcs"') >= 2):
            assert first.poll() is None
            time.sleep(0.02)
        first.kill()
    with pytest.raises(InterruptedSurgery):
        operate(root, AVERAGE, None)
    if then == "recover":
        assert surgeon("recover", "-C", root)[0] == 0
        time.sleep(1)
        assert differs(snapshot(root, own=True), before, times=True) is None
        return
    second = Dask(tmp_path / "second")
    try:
        second.add()
        second.wait()
        resumed = subprocess.run(
            [sys.executable, "-c", code, *words, "--resume", "--on", str(second.file)],
            env={**os.environ, "PYTHONPATH": path()}, check=False, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        second.end()
    assert resumed.returncode == 0, resumed.stderr
    assert differing(root, wanted) is None


def test_a_surgery_under_way_at_another_scheduler_is_refused(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    root = trained(zero=1, dtype="bf16")
    wanted = alone(root, AVERAGE)
    slow = Slow(dask, tmp_path / "jobs", 0.2)
    slow.add()
    second = Dask(tmp_path / "second")
    refused: list[tuple[int, str, str]] = []

    def operate_too() -> None:
        slow.wait()
        words = ("average", 6, 8, "--yes", "-C", root, "--on", second.file)
        refused.append(surgeon(*words))
        refused.append(surgeon(*words, "--resume"))

    try:
        second.add()
        second.wait()
        with meanwhile(operate_too):
            operate(root, AVERAGE, dask)
    finally:
        second.end()
    assert [each[0] for each in refused] == [1, 1], refused
    assert all("is under way" in each[2] or "lock" in each[2] for each in refused), refused
    assert differing(root, wanted) is None


def test_a_worker_that_can_write_no_more_costs_its_jobs_or_the_surgery(
    dask: Dask, trained: Trained
) -> None:
    """The kernel refuses every write of one of two workers beyond a size, as on a full disk."""
    root = trained(zero=1, dtype="bf16")
    before, wanted = snapshot(root), alone(root, AVERAGE)
    dask.add()
    dask.add(limit=1 << 15)
    try:
        operate(root, AVERAGE, dask)
    except SurgeryError as error:
        assert "File too large" in error.what
        assert differs(snapshot(root, own=True), before, times=True) is None
    else:
        assert differing(root, wanted) is None


def fill(disk: Path) -> None:
    """Until no byte is free, whatever others write meanwhile."""
    with (disk / "filler").open("wb") as file:
        while (room := os.statvfs(disk)).f_bavail:
            at = os.fstat(file.fileno()).st_size
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), at, room.f_bavail * room.f_frsize)


def test_the_disk_of_the_run_fills_up_and_the_surgery_is_taken_back(
    dask: Dask, trained: Trained, tmp_path: Path, disk: Path
) -> None:
    """Then the same surgery succeeds with the same workers, once there is room."""
    root = Path(shutil.copytree(trained(zero=1, dtype="bf16"), disk / "run"))
    before, wanted = snapshot(root), alone(root, AVERAGE)
    slow = Slow(dask, tmp_path / "jobs", 0.3)
    slow.add()
    slow.add()

    def full() -> None:
        slow.wait()
        fill(disk)

    with meanwhile(full), pytest.raises(SurgeryError, match="No space left") as caught:
        operate(root, AVERAGE, dask)
    assert (caught.value.exit_code, caught.value.untouched) == (1, UNTOUCHED)
    assert "free some space" in caught.value.next[0], caught.value.next
    assert differs(snapshot(root, own=True), before, times=True) is None
    (disk / "filler").unlink()
    operate(root, AVERAGE, dask)
    assert differing(root, wanted) is None


def test_the_own_disk_of_a_worker_fills_up_and_costs_nothing(
    dask: Dask, trained: Trained, tmp_path: Path, disk: Path
) -> None:
    """Its working folder, and that of temporary files: a job keeps nothing there."""
    root = trained(zero=1, dtype="bf16")
    wanted = alone(root, AVERAGE)
    slow = Slow(dask, tmp_path / "jobs", 0.1)
    slow.add()
    slow.add("--local-directory", disk, TMPDIR=str(disk))
    dask.wait()
    assert any(disk.iterdir())
    fill(disk)
    operate(root, AVERAGE, dask)
    assert differing(root, wanted) is None
    assert dask.workers[1].pid in slow.busy()


def test_a_worker_of_another_version_computes_nothing(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    root = trained(zero=1, dtype="bf16")
    before = exact_snapshot(root)
    shutil.copytree(REPO / "ckptsurgeon", tmp_path / "ckptsurgeon")
    (tmp_path / "ckptsurgeon/version.py").write_text('VERSION = "0.9"\n')
    dask.add()
    dask.add(PYTHONPATH=os.pathsep.join([str(tmp_path), path()]))
    dask.wait()
    code, _, error = surgeon("average", 6, 8, "--yes", "-C", root, "--on", dask.file)
    assert code == 2 and "has 0.9; ckptsurgeon is" in error, error
    assert exact_snapshot(root).keys() == before.keys()
