"""Our own records, mutated by what they are made of: no traceback, nothing outside is touched."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptsurgeon import Run, disk, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.as_json import to_json
from ckptsurgeon.recipe.file import from_data
from tests.hostile import lies
from tests.hostile.records import mutated
from tests.hostile.watched import run_watched
from tests.support.snapshot import HOME

Write = Callable[[Path, Any], None]


class Stop(Exception):
    """Where a surgery is cut off."""


@pytest.fixture(scope="module")
def worlds() -> Iterator[tuple[Path, dict[str, Any]]]:
    """A world to copy, and one honest document of each kind."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "template"
        root = lies.world(place) / "run"
        run = Run.open(root)
        saved = plan(run, from_data({"set": {"lr": 1e-5}}))
        documents = {
            "plan": json.loads(json.dumps(saved, default=to_json)),
            "receipt": json.loads((root / HOME / "receipts/0001/receipt.json").read_text()),
            "journal": _journal(root),
            "lock": {
                "token": "0123456789abcdef", "host": os.uname().nodename, "boot": "x",
                "namespace": 1, "pid": 1, "start": 1, "uid": 0, "title": "set", "time": "now",
            },
            "page": {
                "name": "mine", "pointer": {"file": "latest", "text": "{step}"},
                "files": {"checkpoint-{step}/optimizer.pt": {"optimizers": [[]]}},
                "logs": {"run": "tb"}, "options": {"clip_grad": "--clip {}"}, "unfinished": ".tmp",
            },
            "settings": {"tensorboard": ["tb"], "name": "x", "relaunch": {"command": ["a"]}},
        }  # fmt: skip
        yield place, documents


def _journal(root: Path) -> Any:
    """That of a surgery which was cut off after its commit point. What it staged stays."""
    run = Run.open(root)

    def cut(operation: str, path: str, details: Any) -> None:
        if operation in ("write", "rename") and path.startswith(str(root / "checkpoint-4")):
            raise Stop
        if operation == "rename" and str(details.get("target", "")).startswith(
            str(root / "checkpoint-4")
        ):
            raise Stop

    disk.calls.hook = cut
    try:
        with pytest.raises((SurgeryError, Stop)):
            surgery.apply(run, plan(run, from_data({"set": {"lr": 1e-5}})), jobs=1)
    finally:
        disk.calls.hook = None
    body = (root / HOME / "journal").read_bytes().partition(b"\n")[2]
    (root / HOME / "journal").unlink()
    return json.loads(body)


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


def _write_journal(root: Path, document: Any) -> None:
    body = _text(document)
    digest = hashlib.sha256(body).hexdigest().encode()
    (root / HOME / "journal").write_bytes(digest + b"\n" + body)


def _write_yaml(name: str) -> Write:
    def write(root: Path, document: Any) -> None:
        (root / name).write_text(yaml.safe_dump(document, allow_unicode=False), "utf-8")
        if name == "page.yaml":
            (root / "ckptsurgeon.yaml").write_text("format: page.yaml\n")

    return write


KINDS: dict[str, tuple[Write, Sequence[Sequence[str]]]] = {
    "receipt": (
        lambda root, it: _put(root / HOME / "receipts/0001/receipt.json", it),
        (("log",), ("status",), ("undo", "-n"), ("undo", "-y"), ("prune", "--keep", "0", "-y")),
    ),
    "journal": (_write_journal, (("status",), ("recover", "-n"), ("recover",))),
    "lock": (
        lambda root, it: _put(root / HOME / "lock", it),
        (("status",), ("unlock", "-n"), ("set", "lr=1e-5", "-y"), ("unlock", "-y")),
    ),
    "plan": (
        lambda root, it: _put(root / "plan.json", it),
        (("apply", "PLAN", "-n"), ("apply", "PLAN", "-y")),
    ),
    "page": (_write_yaml("page.yaml"), (("status",), ("set", "lr=1e-5", "-y"))),
    "settings": (_write_yaml("ckptsurgeon.yaml"), (("status",), ("rollback", "--to", "4", "-n"))),
}


def _put(path: Path, document: Any) -> None:
    path.write_bytes(_text(document))


def fuzzed(worlds: tuple[Path, dict[str, Any]], kind: str, seeds: range) -> None:
    template, documents = worlds
    write, commands = KINDS[kind]
    place = template.with_name(f"fuzzed-{kind}-{seeds.start}")
    for seed in seeds:
        world = lies.copied(template, place)
        document = mutated(documents[kind], random.Random(seed))
        if kind == "plan" and isinstance(document, dict):
            document["run"] = str(world / "run") if seed % 4 else document.get("run")
        write(world / "run", document)
        try:
            for words in commands:
                run_watched(world / "run", words)
        except BaseException as error:
            error.add_note(f"{kind}, seed {seed}: {json.dumps(document)[:3000]}")
            raise
        shutil.rmtree(place)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_a_mutated_record_harms_nobody(worlds: tuple[Path, dict[str, Any]], kind: str) -> None:
    fuzzed(worlds, kind, range(16))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_records_harm_nobody(worlds: tuple[Path, dict[str, Any]], kind: str) -> None:
    fuzzed(worlds, kind, range(1000, 3000))


def test_a_journal_that_has_more_bytes_than_were_staged(
    worlds: tuple[Path, dict[str, Any]],
) -> None:
    """None are made room for that are not there."""
    template, documents = worlds
    world = lies.copied(template, template.with_name("longer"))
    document = copy.deepcopy(documents["journal"])
    tail = [step for step in document["steps"] if step["kind"] == "Tail"][-1]
    tail["spans"][-1][1] = 1 << 60
    _write_journal(world / "run", document)
    status, said = run_watched(world / "run", ["recover"])
    assert status == 5 and "the staged bytes of" in said and "are damaged" in said
