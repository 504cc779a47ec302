"""Hostile pickles in a real shard: nothing runs or is written; the file and the byte are named."""

from __future__ import annotations

import importlib
import pickle
import re
from pathlib import Path

import pytest
import torch

from ckptsurgeon.formats.fields.known_globals import EXACT, unknown
from tests.conftest import Trained
from tests.hostile.bad_pickles import CODE, REFUSED, SHORT, TOUCH, P, nan_rate
from tests.hostile.hostile_run import (
    MODEL,
    OPTIM,
    Damage,
    call,
    entry,
    harmless,
    refused,
    text,
    with_pickle,
)

RANKS = {
    "-1": b"J\xff\xff\xff\xff",
    "2^40": b"\x8a\x06\0\0\0\0\0\1",
    "text": text("many"),
    "true": b"\x88",
}


def check(root: Path, file: str, says: str) -> None:
    for words in (["show", 8], ["set", "eps=1e-6"], ["rollback", "--to", 8, "--set", "eps=1e-6"]):
        said = refused(root, *words, says=says)
        assert file in said
        assert ": byte " in said or "is not understood here" in said or "_world_size" in said, said


def stops_only(root: Path, file: str, says: str, *needs: object) -> None:
    """A value that no trainer goes on with: what `needs` it is refused with file and key, verify
    finds it, and all else goes on."""
    said = refused(root, *needs, says=says)
    assert file in said
    status, found, _ = call("verify", 8, "-C", root)
    assert status == 4 and says in found, found
    harmless(root, "show", 8)
    for words in (["rollback", "--to", 6], ["set", "beta2=0.9"]):
        harmless(root, *words, "--dry-run")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.long
def test_it_is_refused_with_file_and_byte(trained: Trained, name: str) -> None:
    root = trained()
    damage, says = REFUSED[name]
    with_pickle(root / "global_step8" / OPTIM, damage)
    check(root, OPTIM, says)


@pytest.mark.parametrize("name", CODE)
@pytest.mark.long
def test_code_is_named_by_show_and_not_written(
    trained: Trained, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained()
    damage, says = CODE[name]
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    with_pickle(root / "global_step8" / OPTIM, damage)
    out = harmless(root, "show", 8)
    assert re.search(rf"{OPTIM} names\s+{re.escape(says)}", out), out
    for words in (["set", "eps=1e-6"], ["repair-latest"], ["reset", "moments"]):
        if words[0] != "repair-latest":
            assert says in refused(root, *words, says="--allow-global")
    (root / "latest").write_text("global_step6")
    refused(root, "repair-latest", "--to", 8, says=says)
    (root / "latest").write_text("global_step8")
    done = call("set", "eps=1e-6", "-C", root, "--yes", "--allow-global", says)
    assert done[0] == 0, done
    assert says in done[1]
    assert call("undo", "-C", root, "--yes")[0] == 0
    assert not list((tmp_path / "cwd").iterdir())


def test_what_is_known_of_layers_is_a_layer() -> None:
    """Their classes only build themselves when a pickle calls them."""
    layers = [name for name in EXACT if name.startswith("torch.nn.modules.")]
    for name in layers:
        module, _, kind = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), kind), torch.nn.Module), name
    assert unknown(["ultralytics.nn.tasks.DetectionModel", *layers]) == [
        "ultralytics.nn.tasks.DetectionModel"
    ]


@pytest.mark.parametrize("name", RANKS)
def test_a_world_size_that_is_none_is_refused(trained: Trained, name: str) -> None:
    root = trained()
    place = re.compile(re.escape(text("dp_world_size")) + rb"r.{4}K\x01", re.DOTALL)

    def damage(data: bytes) -> bytes:
        return place.sub(lambda match: match[0][:-2] + RANKS[name], data)

    with_pickle(root / "global_step8" / MODEL, damage)
    check(root, MODEL, "dp_world_size is")


BOMB = (
    b"]r\xe8\3\0\0"
    + b"".join(
        b"0]r" + SHORT(1001 + i) + (b"j" + SHORT(1000 + i) + b"a") * 2 for i in range(40)
    )
)  # fmt: skip
"""40 lists of two references to the list before: a walk that goes through both never ends."""


SAFE: dict[str, Damage] = {
    "11 a memo bomb": entry(BOMB),
    "12 a list that contains itself": entry(b"]r\xe8\3\0\0j\xe8\3\0\0a"),
    "12 a dict that contains itself": entry(b"}r\xe8\3\0\0K\1j\xe8\3\0\0s"),
}


@pytest.mark.parametrize("name", SAFE)
def test_it_is_read_without_a_walk_that_does_not_end(trained: Trained, name: str) -> None:
    root = trained()
    for file in (OPTIM, MODEL):
        with_pickle(root / "global_step8" / file, SAFE[name])
    harmless(root, "show", 8)
    for words in (["set", "eps=1e-6"], ["reset", "moments"]):
        harmless(root, *words, "--dry-run")


@pytest.mark.parametrize(
    ("field", "needs"),
    [
        ("lr_scheduler", ["cooldown", "2"]),
        ("skip_train_iteration_range", ["skip", "20"]),
        ("iteration", ["set", "iteration=3"]),
    ],
)
def test_a_bomb_in_a_field_stops_only_what_needs_it(
    trained: Trained, field: str, needs: list[str]
) -> None:
    root = trained()
    with_pickle(root / "global_step8" / MODEL, lambda data: data[:-1] + text(field) + BOMB + b"s.")
    stops_only(root, MODEL, "is of type list", *needs)


def test_a_bomb_in_a_param_group_stops_only_what_needs_it(trained: Trained) -> None:
    root = trained()
    place = re.compile(rb"(X\x03\0\0\0epsq.)G.{8}", re.DOTALL)
    filler = b"N0" * 1000  # memo indices lie below the number of bytes before them
    with_pickle(
        root / "global_step8" / OPTIM,
        lambda data: place.sub(lambda m: m[1] + filler + BOMB, data, count=1),
    )
    stops_only(root, OPTIM, "eps is of type list", "set", "eps=1e-6")


def test_a_rate_that_is_nan_stops_only_what_needs_it(trained: Trained) -> None:
    root = trained()
    with_pickle(root / "global_step8" / OPTIM, nan_rate)
    stops_only(root, OPTIM, "lr is nan", "set-lr", "0.5x")


def test_a_key_that_is_there_twice_is_not_set(trained: Trained) -> None:
    """Row 15: the last one is what a trainer reads."""
    root = trained()
    place = re.compile(rb"(X\x03\0\0\0epsq.)(G.{8})", re.DOTALL)
    with_pickle(
        root / "global_step8" / OPTIM,
        lambda data: place.sub(lambda m: m[0] + text("eps") + m[2], data, count=1),
    )
    harmless(root, "show", 8)
    refused(root, "set", "eps=1e-6", says="is twice in one dict", offset=True)


def test_a_tensor_of_2_to_the_50_is_not_reset(trained: Trained) -> None:
    """Row 17: it would be filled with zeros beyond its storage."""
    root = trained()
    place = re.compile(rb"(QK\0)M..(\x85)", re.DOTALL)
    huge = rb"\1" + b"\x8a\x07" + (1 << 50).to_bytes(7, "little") + rb"\2"
    with_pickle(root / "global_step8" / OPTIM, lambda data: place.sub(huge, data))
    refused(root, "reset", "moments", says="leaves the storage", offset=True)


def test_the_canary_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(P + b"cposix\nsystem\n" + TOUCH + b"R.")
    assert (tmp_path / "CANARY").exists()
