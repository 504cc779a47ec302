"""Random damage to every kind of input: whatever happens is a SurgeryError, never another.

`make test` makes MUTATIONS of each kind, `make nightly` twenty times as many, from another seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.pickles.splice import splice
from ckptsurgeon.files.pickles.tree import tensors
from ckptsurgeon.formats.deepspeed.layout import DeepSpeed
from ckptsurgeon.logs.tensorboard.event_file import index
from ckptsurgeon.recipe.file import from_data, load
from tests.conftest import Trained
from tests.hostile.hostile_run import MODEL, OPTIM, with_pickle
from tests.hostile.mutations import RECIPE, mutated
from tests.support.torch_files import GROUPS, plain_shard, read, save

MUTATIONS = {
    "pickles": 4500,
    "archives": 2000,
    "shards": 200,
    "event files": 1800,
    "recipes": 1200,
    "latest": 1500,
}
ROUNDS = [pytest.param(1, id="short"), pytest.param(20, id="long", marks=pytest.mark.slow)]
Target = Callable[[bytes], object]


def fuzz(kind: str, good: bytes, target: Target, rounds: int, least: float) -> None:
    """Every mutation passes or is refused; a share of at least `least` is refused."""
    chance = random.Random(f"{kind} {rounds}")
    refused = 0
    for number in range(MUTATIONS[kind] * rounds):
        bad = mutated(good, chance)
        try:
            target(bad)
        except SurgeryError as error:
            refused += 1
            assert error.what and error.untouched and len(error.what) < 3000
        except Exception as error:
            raise AssertionError(f"{kind} {number}: {bad!r}") from error
    assert refused >= least * MUTATIONS[kind] * rounds


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.long
def test_pickles(tmp_path: Path, rounds: int) -> None:
    good = Archive.open(save(plain_shard(), tmp_path / "shard.pt")).pickle()

    def target(data: bytes) -> None:
        read(data)
        with contextlib.suppress(KeyError):  # a changed key: `render` says so
            splice(data, {(*GROUPS, 0, "lr"): 1.0, (*GROUPS, 0, "new"): 2})

    fuzz("pickles", good, target, rounds, 0.4)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_archives(tmp_path: Path, rounds: int) -> None:
    path = save({"a": 1.0, "b": plain_shard()["views"]}, tmp_path / "shard.pt")

    def target(data: bytes) -> None:
        path.write_bytes(data)
        archive = Archive.open(path)
        with archive.reading():
            for _, tensor in tensors(archive.tree()):
                archive.storage(tensor)
            for name in archive.records:
                archive.payload(name)

    fuzz("archives", path.read_bytes(), target, rounds, 0.3)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.long
def test_shards(trained: Trained, rounds: int) -> None:
    """The pickles of real shards, through the whole plan of a surgery."""
    root = trained()
    recipe = from_data({"set": {"eps": 1e-6, "lr": 3e-4}, "reset": ["moments"]})
    shards = {name: root / "global_step8" / name for name in (OPTIM, MODEL)}
    whole = {name: path.read_bytes() for name, path in shards.items()}
    for name, path in shards.items():
        good = Archive.open(path).pickle()

        def target(data: bytes, name: str = name, path: Path = path) -> None:
            path.write_bytes(whole[name])
            with_pickle(path, lambda _: data)
            run = Run.open(root)
            run.checkpoint(8).state()
            surgery.plan(run, recipe)

        fuzz("shards", good, target, rounds, 0.2)
        path.write_bytes(whole[name])


@pytest.mark.parametrize("rounds", ROUNDS)
def test_event_files(trained: Trained, rounds: int) -> None:
    file = next((trained() / "tensorboard").glob("*tfevents*"))
    good = file.read_bytes()[:3000]

    def target(data: bytes) -> None:
        index(data, file, salvage=True)
        index(data, file)

    fuzz("event files", good, target, rounds, 0.4)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.long
def test_recipes(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "recipe.yaml"

    def target(data: bytes) -> None:
        path.write_bytes(data)
        load(path)

    fuzz("recipes", RECIPE, target, rounds, 0.4)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_latest(tmp_path: Path, rounds: int) -> None:
    path, format = tmp_path / "latest", DeepSpeed()

    def target(data: bytes) -> None:
        path.write_bytes(data)
        step = format.pointed(path)
        assert step is None or 0 <= step < 10**18

    fuzz("latest", b"global_step6210\n", target, rounds, 0.0)
