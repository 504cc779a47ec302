"""What a release wrote still works: its receipts, plans and recipes, and what scripts rely on."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, load, plan
from ckptsurgeon.errors import (
    InterruptedSurgery,
    SurgeryError,
    UsageError,
    VerificationFailed,
)
from ckptsurgeon.plans.as_json import from_json, to_json
from ckptsurgeon.plans.edits import Change, Computed, Elements, NewName, NewText, Renamed
from ckptsurgeon.report.document import changes_json
from tests.cli.conftest import Surgeon
from tests.cli.conftest import surgeon as surgeon
from tests.stable.make import DOCUMENTS, ROOT, api, unpack
from tests.support.launch import REPO
from tests.support.snapshot import snapshot

RELEASES = sorted(item for item in Path(__file__).parent.iterdir() if item.name[0].isdigit())
PAGE = (REPO / "docs" / "stable.md").read_text("utf-8")


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def release(request: pytest.FixtureRequest) -> Path:
    folder = request.param
    assert isinstance(folder, Path)
    return folder


@pytest.fixture
def before(release: Path, tmp_path: Path) -> Path:
    return unpack(release / "before.tar.gz", tmp_path / "before")


@pytest.fixture
def after(release: Path, tmp_path: Path) -> Path:
    return unpack(release / "after.tar.gz", tmp_path / "after")


def shards(root: Path) -> dict[str, Any]:
    """Of the checkpoints: a note in the event files has the time of its surgery."""
    return {k: v[:2] for k, v in snapshot(root).items() if k.startswith("checkpoint-")}


def test_an_older_receipt_is_undone_and_redone(surgeon: Surgeon, before: Path, after: Path) -> None:
    operated = snapshot(after)
    listed = json.loads(surgeon("log", "-C", after, "--json").stdout)["receipts"]
    assert [(item["receipt"], item["why"]) for item in listed] == [
        ("0001", "the loss rose after step 4")
    ]
    undone = surgeon("undo", "-C", after, "--yes")
    assert undone.exit_code == 0, undone.output
    assert "checkpoints and logs are byte for byte what they were before 0001" in undone.stdout
    assert snapshot(after) == snapshot(before)
    assert surgeon("redo", "-C", after, "--yes").exit_code == 0
    assert snapshot(after) == operated


def test_an_older_plan_is_applied_and_undone(
    surgeon: Surgeon, release: Path, before: Path, after: Path, tmp_path: Path
) -> None:
    was, saved = snapshot(before), tmp_path / "plan.json"
    document = json.loads((release / "plan.json").read_text())
    assert document["run"] == ROOT
    document["run"] = str(before)
    for assumed in document["assumes"]:  # the same files, on another disk
        if assumed["ino"]:
            info = (before / assumed["file"]).stat()
            assumed.update(dev=info.st_dev, ino=info.st_ino)
            if stat.S_ISDIR(info.st_mode):  # a file system has its own sizes for folders
                assumed.update(size=info.st_size)
    saved.write_text(json.dumps(document))
    applied = surgeon("apply", saved, "-C", before, "--yes")
    assert applied.exit_code == 0, applied.output
    assert shards(before) == shards(after)
    assert surgeon("undo", "-C", before, "--yes").exit_code == 0
    assert snapshot(before) == was


def test_an_older_recipe_means_what_it_meant(release: Path, before: Path) -> None:
    run = Run.open(before)
    planned = plan(run, load(release / "recipe.yaml"))
    promise = json.loads((release / "plan.json").read_text())["promise"]
    assert planned.promise is not None
    assert (planned.promise.step, planned.promise.lr) == (promise["step"], promise["lr"])
    assert list(planned.promise.betas or ()) == promise["betas"]
    assert planned.promise.adam_step == promise["adam_step"] == 0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_keeps_its_schema_and_keys(
    surgeon: Surgeon, release: Path, after: Path, name: str
) -> None:
    words, code = DOCUMENTS[name]
    kept = json.loads((release / "documents.json").read_text())[name]
    result = surgeon(*words, "-C", after, "--json")
    document = json.loads(result.stdout or result.stderr)
    assert result.exit_code == code
    assert document["schema"] == kept["schema"]
    assert set(kept["keys"]) <= set(document)


def test_the_python_names_take_what_they_took(release: Path) -> None:
    now = api()
    for name, parameters in json.loads((release / "api.json").read_text()).items():
        assert now[name][: len(parameters)] == parameters, name


def test_the_exit_codes_are_those_of_the_page() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert [int(code) for code, _ in rows] == [0, 1, 2, 3, 4, 5, 130]
    errors = (SurgeryError, UsageError, VerificationFailed, InterruptedSurgery)
    assert [error.exit_code for error in errors] == [1, 2, 4, 5]


PLACE = {"kind": "Change", "file": "f", "field": "x", "path": ["a"], "elements": None}
WHOLE = {**PLACE, "path": []}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({**WHOLE, "field": "latest", "old": "3", "new": "2"}, NewText("f", "latest", "3", "2")),
        ({**WHOLE, "field": "latest", "old": None, "new": "2"}, NewText("f", "latest", None, "2")),
        (
            {**WHOLE, "old": "f", "new": {"kind": "Renamed", "key": "g"}},
            NewName("f", "x", "f", Renamed("g")),
        ),
        ({**WHOLE, "old": 3, "new": 2}, Change("f", "x", 3, 2)),
        (
            {**PLACE, "old": 1, "new": {"kind": "Elements", "data": {"base64": ""}, "told": "t"}},
            Change("f", "x", 1, Elements(b"", "t"), ("a",)),
        ),
        (
            {
                **PLACE,
                "old": 1,
                "new": {
                    "kind": "Computed", "rule": "copy", "dtype": "float32", "size": 0,
                    "terms": [], "numbers": [], "via": "", "told": "t",
                },
            },
            Change("f", "x", 1, Computed("copy", "float32", 0, (), label="t"), ("a",)),
        ),
    ],
)  # fmt: skip
def test_a_change_as_1_0_0_wrote_it_is_read(written: dict[str, Any], meant: Change) -> None:
    read = from_json(written)
    assert (type(read), read) == (type(meant), meant)
    assert from_json(json.loads(json.dumps(meant, default=to_json))) == meant


def test_schema_1_says_what_is_computed_as_1_0_0_did() -> None:
    change = Change("f", "x", "values", Computed("copy", "float32", 0, (), label="mean"), ("a",))
    (document,) = changes_json([change])
    assert document["new"] == {
        "rule": "copy", "dtype": "float32", "size": 0, "terms": [], "numbers": [], "via": "",
        "told": "mean",
    }  # fmt: skip
