"""docs/json.md lists exactly the keys that `--json` prints."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Surgeon, invoke
from tests.conftest import Trained
from tests.support.launch import REPO


def documented() -> dict[str, list[str]]:
    """Heading of docs/json.md → the keys of its table."""
    keys: dict[str, list[str]] = {}
    section = ""
    for line in (REPO / "docs" / "json.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif match := re.match(r"\| `(\w+)` \|", line):
            keys.setdefault(section, []).append(match[1])
    return keys


OPTIMIZERS = "torch:global_step{step}/*_optim_states.pt=optimizer_state_dict.base_optimizer_state"


@pytest.fixture(scope="module")
def documents(
    _originals: Callable[[int, int, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Heading → the document that the command prints."""
    folder = tmp_path_factory.mktemp("documents")
    root = Path(shutil.copytree(_originals(1, 1, "fp32"), folder / "run", symlinks=True))
    old = shutil.copytree(root, folder / "old", symlinks=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text("rollback: {to: 4}\nset: {lr: 5e-4}\nskip: [5-6]\n")

    def told(*words: object) -> dict[str, Any]:
        result = invoke(*words, "--json", "-C", root)
        document: dict[str, Any] = json.loads(result.stdout or result.stderr)
        return document

    found = {
        "plan": told("plan", recipe),
        "show": told("show", 4),
        "verify": told("verify"),
        "status": told("status"),
        "ready": told("ready"),
        "watch": told("watch", "--once"),
        "doctor": told("doctor", "--vitals"),
        "advise": told("advise"),
        "report": told("report", "-o", folder / "run.svg"),
        "diff": told("diff", 4, 8, "--tensors"),
        "recover": told("recover"),
        "relaunch": told("relaunch", "--dry-run"),
        "prune": told("prune", "--dry-run"),
        "transplant": told("transplant", "--from", old, "--print-map"),
        "unlock": told("unlock"),
        "export": told("export", 4, "-o", folder / "weights"),
        "fork": told("fork", folder / "branch", "--step", 4, "--copy", "--set", "seed=7"),
        "draft-format": told("draft-format"),
        "check-format": told("check-format", OPTIMIZERS),
        "check-optimizer": told("check-optimizer", "torch.optim.SGD"),
        "error": told("show", 5),
    }
    applied = told("apply", recipe, "--yes")
    assert applied.keys() == found["plan"].keys()
    found["log"] = told("log")
    found["promise"] = found["plan"]["promise"]
    return found


@pytest.fixture
def printed(documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same, for a test that takes some of them out."""
    return dict(documents)


@pytest.mark.long
def test_the_documents_have_the_documented_keys(printed: dict[str, dict[str, Any]]) -> None:
    assert {name: list(document) for name, document in printed.items()} == documented()
    for name, document in printed.items():
        assert document.get("schema") == (None if name == "promise" else 1), name


def test_every_document_names_its_run(
    printed: dict[str, dict[str, Any]], surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    """Those of a refusal too, once the run is found; one that is not found is null."""
    del printed["promise"]
    assert printed.pop("check-optimizer")["run"] is None  # it is of a class, not of a run
    runs = {document["run"] for document in printed.values()}
    assert len(runs) == 1 and None not in runs
    refused = surgeon("status", "--json", "-C", tmp_path)
    assert json.loads(refused.stderr)["run"] is None


def test_a_quiet_command_prints_the_document_it_was_asked_for(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    usual = surgeon("status", "--json", "-C", root)
    quiet = surgeon("status", "--json", "-q", "-C", root)
    assert quiet.stdout == usual.stdout != ""
    assert surgeon("status", "-q", "-C", root).stdout == ""
    done = surgeon("set", "beta2=0.9", "--yes", "--json", "-q", "-C", root)
    assert json.loads(done.stdout)["verdict"] == "verified" and done.stderr == ""


def test_an_undo_says_what_it_compared_and_restored(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()

    def told(*words: object) -> dict[str, Any]:
        return dict(json.loads(surgeon(*words, "--json", "--yes", "-C", root).stdout))

    assert told("rollback", "--to", 4)["restored"] is None
    assert told("undo", "-n")["restored"] == told("undo")["restored"] == "same"
    assert told("redo")["restored"] == "same"
    pointer = next((root / ".ckptsurgeon/attic").rglob("latest"))
    pointer.write_text("global_step2")
    assert told("undo", "--as-they-are")["restored"] == "changed"
    assert [item["restored"] for item in told("log")["receipts"]] == [
        "changed",
        "same",
        "same",
        None,
    ]


def test_every_promise_has_the_same_keys(printed: dict[str, dict[str, Any]]) -> None:
    keys = list(printed["promise"])
    for name in ("plan", "show", "verify", "status", "relaunch"):
        assert list(printed[name]["promise"]) == keys, name
    assert printed["plan"]["promise"]["step"] == 5
    assert printed["plan"]["promise"]["skip"] == [[5, 6]]


def test_inner_objects_have_the_documented_keys(printed: dict[str, dict[str, Any]]) -> None:
    text = (REPO / "docs" / "json.md").read_text("utf-8")
    inner = {
        *(key for change in printed["plan"]["changes"] for key in change),
        *(key for places in printed["show"]["places"].values() for one in places for key in one),
        *(key for receipt in printed["log"]["receipts"] for key in receipt),
    }
    assert [key for key in inner if f"`{key}`" not in text] == []
    assert all(printed["show"]["places"][field] for field in ("lr", "betas", "adam_step"))
