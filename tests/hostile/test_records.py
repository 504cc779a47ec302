"""The surgeon's own records lie in the run, where others write: whatever they hold, a command ends
in three lines or does its work."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.plans.as_json import MAX_KEYS, Malformed, from_json
from ckptsurgeon.transaction import lock
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.kept import record_file
from ckptsurgeon.transaction.receipts import receipt_file
from tests.hostile.hostile_run import call, fifo
from tests.support.tiny_run import make_run

WRONG: tuple[Any, ...] = (
    None, True, 5, -1, 2**31, 2**63, 10**400, 0.5, float("nan"), "", "\0", "\ud800", "x" * 300,
    "../../x", "/", [], [[]], [None], {}, {"kind": "Move"}, {"kind": 5}, {"kind": "Receipt"},
    {"base64": "!"}, {"first": 0, "last": 10**10},
)  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
LOOKS = ("status", "log", "verify", "doctor")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a receipt, a lock and a journal from before the commit, each as it was written,
    and a plan beside it."""
    folder = tmp_path_factory.mktemp("sound")
    root = make_run(folder / "run", steps=(4, 8))
    recipe = folder / "recipe.yaml"
    recipe.write_text("set: {beta1: 0.8}\n")
    assert call("set", "eps=1e-6", "--yes", "-C", root)[0] == 0
    assert call("plan", recipe, "-o", folder / "plan.json", "-C", root)[0] == 0
    with lock.hold(root, "set lr"):
        shutil.copy(root / HOME / "lock", folder / "lock")
    entry = {"id": "0002", "title": "set lr", "files": [], "directories": []}
    (folder / "journal").write_text(json.dumps({**entry, "steps": [], "committed": False}))
    return folder


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a document, and to the document."""
    yield path
    inner = document.items() if isinstance(document, dict) else ()
    inner = enumerate(document) if isinstance(document, list) else inner
    for key, value in inner:
        yield from places(value, (*path, key))


def mutants(text: str) -> Iterator[str]:
    """The document with one value replaced by each of WRONG, or without one."""
    document = json.loads(text)
    for path in places(document):
        for wrong in (*WRONG, copy):  # a module is none of them: it stands for what is not there
            holder: dict[Any, Any] = {0: copy.deepcopy(document)}
            inner: Any = holder
            for key in (0, *path)[:-1]:
                inner = inner[key]
            last = (0, *path)[-1]
            if wrong is not copy:
                inner[last] = wrong
            elif path:
                del inner[last]
            yield json.dumps(holder[0])


def sample(text: str, many: int, seed: int) -> list[str]:
    found = list(mutants(text))
    return random.Random(seed).sample(found, min(many, len(found)))


MANY = [8, pytest.param(400, marks=pytest.mark.slow)]


@pytest.mark.parametrize("many", MANY)
@pytest.mark.long
def test_a_receipt_of_any_content(sound: Path, tmp_path: Path, many: int) -> None:
    text = (sound / "run" / receipt_file("0001")).read_text()
    for i, mutant in enumerate([*sample(text, many, 1), DEEP, "{}", "null", "", "[]"]):
        root = tmp_path / str(i)
        shutil.copytree(sound / "run", root)
        (root / receipt_file("0001")).write_text(mutant)
        for words in (("status",), ("log",), ("undo", "-n"), ("set", "eps=1e-7", "-n")):
            ends_well(root, *words)


@pytest.mark.parametrize("many", MANY)
def test_a_journal_of_any_content(sound: Path, tmp_path: Path, many: int) -> None:
    text = (sound / "journal").read_text()
    for i, mutant in enumerate([*sample(text, many, 2), DEEP, "[]", "5", "{}"]):
        root = tmp_path / str(i)
        shutil.copytree(sound / "run", root)
        data = mutant.encode()
        digest = hashlib.sha256(data).hexdigest().encode()
        (root / HOME / "journal").write_bytes(digest + b"\n" + data)
        for words in (("status",), ("recover", "-n"), ("recover",)):
            ends_well(root, *words)


@pytest.mark.parametrize("many", MANY)
def test_a_lock_of_any_content(sound: Path, tmp_path: Path, many: int) -> None:
    text = (sound / "lock").read_text()
    for i, mutant in enumerate([*sample(text, many, 3), DEEP, "[]", ""]):
        root = tmp_path / str(i)
        shutil.copytree(sound / "run", root)
        (root / HOME / "lock").write_text(mutant)
        for words in (("status",), ("set", "eps=1e-7", "--yes")):
            ends_well(root, *words)


@pytest.mark.parametrize("many", MANY)
def test_what_was_kept_of_any_content(sound: Path, tmp_path: Path, many: int) -> None:
    template = tmp_path / "template"
    shutil.copytree(sound / "run", template)
    assert call("rollback", "--to", "4", "--yes", "-C", template)[0] == 0
    path = Path(record_file("0002"))
    text = (template / path).read_text()
    endless = text.replace("[", "[1e999, ", 1)
    for i, mutant in enumerate([*sample(text, many, 5), DEEP, '{"a":' * 99_999, endless, "[]"]):
        root = tmp_path / str(i)
        shutil.copytree(template, root)
        (root / path).write_text(mutant)
        for words in (("undo", "-n"), ("undo", "--as-they-are", "-n"), ("undo", "--yes")):
            ends_well(root, *words)
        ends_well(root, "redo", "--yes")


@pytest.mark.parametrize("many", MANY)
def test_a_plan_of_any_content(sound: Path, tmp_path: Path, many: int) -> None:
    text = (sound / "plan.json").read_text()
    root = tmp_path / "run"
    shutil.copytree(sound / "run", root)
    for mutant in [*sample(text, many, 4), DEEP, "null"]:
        (tmp_path / "plan.json").write_text(mutant)
        ends_well(root, "apply", tmp_path / "plan.json", "-n")


SETTINGS = (
    "name: [a]", "name: {a: 1}", "name: null", "tensorboard: {a: b}", 'tensorboard: ["\\0"]',
    "tensorboard: [[a]]", "format: [a]", 'format: "\\0"', "relaunch: 5", "relaunch: {}",
    "relaunch: {command: []}", "relaunch: {command: [{}]}", 'relaunch: {command: ["\\0"]}', "5",
    "format: page.yaml", "name: 0x" + "f" * 5000,
    'optimizer: "\\0"', "optimizer: [a]", "tensorboard: " + "9" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("text", SETTINGS)
def test_settings_of_any_content(sound: Path, tmp_path: Path, text: str) -> None:
    root = tmp_path / "run"
    shutil.copytree(sound / "run", root)
    (root / "ckptsurgeon.yaml").write_text(text)
    for words in (("status",), ("relaunch", "-n"), ("set", "eps=1e-7", "-n")):
        ends_well(root, *words)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "name",
    [
        *("lock", "journal", "../ckptsurgeon.yaml"),
        *(file("0001").removeprefix(f"{HOME}/") for file in (receipt_file, record_file)),
    ],
)
@pytest.mark.parametrize("kind", ["fifo", "endless", "sparse", "socket", "folder"])
def test_a_record_that_is_no_file_is_not_waited_for(
    sound: Path, tmp_path: Path, name: str, kind: str
) -> None:
    root = tmp_path / "run"
    shutil.copytree(sound / "run", root)
    path = root / HOME / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        fifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(40 << 30)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)
    for words in (*((word,) for word in LOOKS), ("undo", "-n"), ("set", "eps=1e-7", "-n")):
        ends_well(root, *words)


def test_ranges_of_a_record_stand_for_so_many_keys_and_no_more() -> None:
    half = {"kind": "Each", "keys": {"first": 1, "last": MAX_KEYS // 2}}
    assert len(from_json([half, half])) == 2
    with pytest.raises(Malformed, match="keys"):
        from_json([half, half, {"kind": "Each", "keys": {"first": 0, "last": 0}}])


def ends_well(root: Path, *words: object) -> None:
    """An answer, or three lines; a traceback fails in `call`, and so does too much work."""
    code, _, said = call(*words, "-C", root)
    assert code in (0, 1, 2, 4, 5), f"{words}: {code}"
    if code in (1, 2, 5):
        labels = [line.split(":")[0] for line in said.splitlines() if not line.startswith(" ")]
        assert labels[0] == "error" and labels[-1] == "next" and "untouched" in labels, said
